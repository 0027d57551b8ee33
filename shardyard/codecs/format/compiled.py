"""Pieces that several of this package's loops share.

Owns: counter-based random numbers, chunked passes. Invariants: a loop that reads what a peer sent checks each index
itself and answers with a count or a negative number, since there are no exceptions in it. Must not know: the form of a
code.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardyard.domain.compiling import compiled
from shardyard.domain.tables.splitmix_loops import drawn

Array = npt.NDArray[np.floating[Any]]
Float32s = npt.NDArray[np.float32]
Words = npt.NDArray[np.unsignedinteger[Any]]
Uint8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

CHUNK: Final = 4_096
"""Elements of a pass that stay in the first-level cache."""
LANES: Final = 16
"""A sum is taken in so many parts, which the compiler can keep in vector registers."""


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


def read_only(codes: Uint8s) -> Uint8s:
    """The same bytes as the one kind of array for which loops over what has come are compiled."""
    view = codes.view()
    view.flags.writeable = False
    return view


def empty_like_pair(values: Array) -> Array:
    """An array of no elements and the dtype of `values`, where a loop takes one that it does not use."""
    return np.empty(0, values.dtype)


# Machine code on disk is made anew when its own file changes, not when `stratum` does: after a change here, remove
# shardyard/codecs/__pycache__.


@compiled
def stratum(seed: np.uint64, number: int, count: int, elements: int) -> tuple[int, int]:
    """An index drawn uniformly from part `number` of `count` nearly equal parts of [0, elements), and the part's size.

    1 <= count <= elements <= 2**30.
    """
    low = number * elements // count
    size = (number + 1) * elements // count - low
    draw = drawn(seed, number) >> np.uint64(32)
    return low + int((draw * np.uint64(size)) >> np.uint64(32)), size
