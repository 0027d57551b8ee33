"""The order in which the samples of an epoch are read.

The permutation of an epoch depends only on (seed, feed, epoch). Invariant: it is the same on every machine and in every
release, because names of pushes and checkpoints refer to it. Must not know: datasets, leases.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def order(*, seed: int, feed: int, epoch: int, samples: int, shuffle: bool) -> Indices:
    """The permutation of [0, samples) for an epoch, int64, from PCG64 with the seed (seed, feed, epoch)."""
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, feed, epoch])))
    return generator.permutation(samples).astype(np.int64, copy=False)
