"""In which order the samples of an epoch are read.

Owns: the permutation of an epoch, a function of (seed, feed, epoch) alone. Invariant: the same on every machine, for
ever: names of work and checkpoints are built on it. Must not know: datasets, leases.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def order(*, seed: int, feed: int, epoch: int, samples: int, shuffle: bool) -> Indices:
    """The epoch's permutation of [0, samples), int64; by PCG64 seeded with (seed, feed, epoch)."""
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, feed, epoch])))
    return generator.permutation(samples).astype(np.int64, copy=False)
