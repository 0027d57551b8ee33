"""SplitMix64 (shardyard.domain.tables.splitmix) as machine code, for loops that are compiled."""

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
