"""How this package's loops become machine code, and the pieces that several of them share.

Owns: the compiler's options, counter-based random numbers, chunked passes. Invariants: no fastmath, so a loop gives the
same bits on every processor; a loop that reads what a peer sent checks each index itself and answers with a count or a
negative number, since there are no exceptions in it. Must not know: the form of a code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]
Float32s = npt.NDArray[np.float32]
Words = npt.NDArray[np.unsignedinteger[Any]]
Uint8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

CHUNK: Final = 4_096
"""Elements of a pass that stay in the first-level cache."""
LANES: Final = 16
"""A sum is taken in so many parts, which the compiler can keep in vector registers."""

_F = TypeVar("_F", bound=Callable[..., object])


def compiled(function: _F) -> _F:
    """Machine code at the first call, kept on disk (in NUMBA_CACHE_DIR if set) where a directory can be written."""
    try:
        return cast(_F, numba.njit(nogil=True, cache=True, error_model="numpy")(function))
    except RuntimeError:  # no directory is writable
        return cast(_F, numba.njit(nogil=True, cache=False, error_model="numpy")(function))


class Scratch:
    """A chunk's worth of elements, and their bits. Each call has its own: calls may run in several threads."""

    def __init__(self, dtype: np.dtype[Any], elements: int) -> None:
        is_single = dtype.itemsize == 4
        self.values: Array = np.empty(elements, dtype)
        self.bits: Words = self.values.view(np.uint32 if is_single else np.uint64)
        word: Any = np.uint32 if is_single else np.uint64
        self.magnitude: np.unsignedinteger[Any] = word(0x7FFFFFFF if is_single else 0x7FFFFFFFFFFFFFFF)
        """Masks the sign away; bits of magnitudes are in the order of the magnitudes, NaN above infinity."""
        self.round: np.floating[Any] = dtype.type(1.5 * 2.0 ** (23 if is_single else 52))
        """Added and subtracted again, it rounds to the nearest whole number, halves to even."""


def empty_like_pair(values: Array) -> Array:
    """An array of no elements and the dtype of `values`, where a loop takes one that it does not use."""
    return np.empty(0, values.dtype)


# Machine code on disk is made anew when its own file changes, not when these two do: after a change here, remove
# shardyard/codecs/__pycache__.


@compiled
def stream64(seed: np.uint64, number: np.uint64) -> np.uint64:
    """Output `number` (from 0) of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
    OOPSLA 2014) started at `seed`."""
    z = seed + (number + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled
def stratum(seed: np.uint64, number: int, count: int, elements: int) -> tuple[int, int]:
    """An index drawn uniformly from part `number` of `count` nearly equal parts of [0, elements), and the part's size.

    1 <= count <= elements <= 2**30.
    """
    low = number * elements // count
    size = (number + 1) * elements // count - low
    draw = stream64(seed, np.uint64(number)) >> np.uint64(32)
    return low + int((draw * np.uint64(size)) >> np.uint64(32)), size
