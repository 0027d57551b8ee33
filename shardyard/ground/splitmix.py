"""SplitMix64: numbers that look random, each a function of a seed and its own number.

Owns: the generator. Invariant: it never changes: where a row is, what it begins with, and what codes draw, agree on
every machine and in every release. Must not know: what is drawn.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from shardyard.ground.compiling import compiled

_WORD: Final = np.uint64
_GOLDEN: Final = _WORD(0x9E3779B97F4A7C15)
_FIRST: Final = _WORD(0xBF58476D1CE4E5B9)
_SECOND: Final = _WORD(0x94D049BB133111EB)
_S27, _S30, _S31 = _WORD(27), _WORD(30), _WORD(31)


@compiled
def mixed(word: np.uint64) -> np.uint64:
    """A word for a word, one-to-one: the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom
    number generators, OOPSLA 2014)."""
    word = (word ^ (word >> _S30)) * _FIRST
    word = (word ^ (word >> _S27)) * _SECOND
    return word ^ (word >> _S31)


@compiled
def drawn(start: np.uint64, number: int) -> np.uint64:
    """Output `number` (from 0) of SplitMix64 started at `start`."""
    return mixed(start + np.uint64(number + 1) * _GOLDEN)
