"""What several loops of this package share: counter-based random numbers, and passes in chunks.

Invariants: a loop that reads bytes from another process checks each index itself, and returns a count or a negative
number, since compiled loops raise no exceptions. Must not know: the form of a code.
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
"""How many elements of a pass fit into the first-level cache."""
LANES: Final = 16
"""A sum has this many parts, which the compiler keeps in vector registers."""


class Scratch:
    """Memory for the elements of a chunk, and their bits. Each call has its own, since several threads may run
    calls."""

    def __init__(self, dtype: np.dtype[Any], elements: int) -> None:
        is_single = dtype.itemsize == 4
        self.values: Array = np.empty(elements, dtype)
        self.bits: Words = self.values.view(np.uint32 if is_single else np.uint64)
        word: Any = np.uint32 if is_single else np.uint64
        self.magnitude: np.unsignedinteger[Any] = word(0x7FFFFFFF if is_single else 0x7FFFFFFFFFFFFFFF)
        """A mask without the sign. The bits of magnitudes are ordered as the magnitudes, with NaN above infinity."""
        self.round: np.floating[Any] = dtype.type(1.5 * 2.0 ** (23 if is_single else 52))
        """Adding and then subtracting this rounds to the nearest whole number, halves to even."""


def read_only(codes: Uint8s) -> Uint8s:
    """A read-only view. Loops that read codes are compiled only for read-only arrays."""
    view = codes.view()
    view.flags.writeable = False
    return view


def empty_like_pair(values: Array) -> Array:
    """An empty array with the dtype of `values`, for a loop that does not use this argument."""
    return np.empty(0, values.dtype)


# Machine code on disk is compiled again when its own file changes, not when `stratum` changes. After a change here,
# remove shardyard/codecs/__pycache__.


@compiled
def stratum(seed: np.uint64, number: int, count: int, elements: int) -> tuple[int, int]:
    """An index drawn uniformly from part `number` of `count` nearly equal parts of [0, elements), and the part's size.

    1 <= count <= elements <= 2**30.
    """
    low = number * elements // count
    size = (number + 1) * elements // count - low
    draw = drawn(seed, number) >> np.uint64(32)
    return low + int((draw * np.uint64(size)) >> np.uint64(32)), size
