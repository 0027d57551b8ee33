"""SplitMix64: pseudo-random numbers, each a function of a seed and its index.

Invariant: the mixer never changes, so that every machine and release agrees on where a row is, how it begins, and what
codes draw. Must not know: the compiler, so that processes without tables start without it;
shardyard.domain.tables.splitmix_loops has the mixer as machine code.
"""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

Words = TypeVar("Words", np.uint64, npt.NDArray[np.uint64])

GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


def mixed(word: Words) -> Words:
    """A word for a word, one-to-one, or for each of an array: the finalizer of SplitMix64 (Steele, Lea, Flood: Fast
    splittable pseudorandom number generators, OOPSLA 2014)."""
    word = (word ^ (word >> _S30)) * _FIRST
    word = (word ^ (word >> _S27)) * _SECOND
    return word ^ (word >> _S31)
