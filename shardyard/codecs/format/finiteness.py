"""Checks whether numbers are finite, as fast as memory can be read, or while they are copied.

Invariant: each NaN and each infinity is found, and nothing else. Must not know: what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numba.extending
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.np.numpy_support import carray

from shardyard.domain.compiling import compiled

Array = npt.NDArray[np.floating[Any]]

PIECE: Final = 1 << 16
"""How many elements are summed before the sum is checked."""


def _make_pointer(_context: Any, _address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


_pointer: Any = numba.extending.intrinsic(_make_pointer)
_array_at: Any = carray


@partial(compiled, fastmath={"reassoc"})  # sums in any order: it only matters whether they are numbers
def _first(addresses: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], zero: Array) -> int:
    """A finite number times zero is zero; any other number times zero is NaN."""
    for index in range(addresses.size):
        values = _array_at(_pointer(addresses[index]), (lengths[index],), zero.dtype)
        for begin in range(0, values.size, PIECE):
            found = zero[0]
            for each in values[begin : begin + PIECE]:
                found += each * zero[0]
            if found != zero[0]:
                return index
    return -1


_ZEROS: Final[dict[str, Array]] = {"float32": np.zeros(1, np.float32), "float64": np.zeros(1, np.float64)}


def first_not_finite(addresses: Sequence[int], lengths: Sequence[int], dtype: str) -> int | None:
    """Returns the index of the first array with a NaN or an infinity; None: all numbers are finite. Each array has
    `lengths[i]` contiguous numbers of that dtype, float32 or float64, from `addresses[i]` on. The caller keeps them
    alive."""
    found = _first(np.array(addresses, np.int64), np.array(lengths, np.int64), _ZEROS[dtype])
    return None if found < 0 else found


@compiled
def _scale(source: int, target: int, size: int, numbers: Array) -> bool:
    factor, limit = numbers[0], numbers[1]
    given = _array_at(_pointer(source), (size,), numbers.dtype)
    scaled = _array_at(_pointer(target), (size,), numbers.dtype)
    beyond = np.int32(0)
    for i in range(size):
        scaled[i] = given[i] * factor
        beyond |= np.int32(not abs(scaled[i]) <= limit)
    return bool(beyond != 0)


def scale(source: int, target: int, size: int, factor: float, dtype: str) -> bool:
    """Writes `size` contiguous numbers of that dtype, float32 or float64, at address `source`, times `factor`, to
    address `target`. Returns whether one is not finite afterwards, or so large that a sum of a million may not be."""
    return bool(_scale(source, target, size, np.array((factor, _LIMITS[dtype]), dtype)))


_LIMITS: Final = {dtype: float(np.finfo(dtype).max) / (1 << 20) for dtype in _ZEROS}


def warm() -> None:
    """Compiles the loops, so that the first push does not wait for the compiler."""
    for dtype in _ZEROS:
        first_not_finite([], [], dtype)
        scale(0, 0, 0, 1.0, dtype)
