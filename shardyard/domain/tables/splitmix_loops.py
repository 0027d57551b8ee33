"""SplitMix64 as machine code, for loops that are compiled.

Owns: `drawn`. Invariant: as of shardyard.domain.tables.splitmix. Must not know: what is drawn.
"""

from __future__ import annotations

import numpy as np

from shardyard.domain.compiling import compiled
from shardyard.domain.tables import splitmix

_GOLDEN = splitmix.GOLDEN

mixed = compiled(splitmix.mixed)


@compiled
def drawn(start: np.uint64, number: int) -> np.uint64:
    """Output `number` (from 0) of SplitMix64 started at `start`."""
    return mixed(start + np.uint64(number + 1) * _GOLDEN)
