"""How loops reach the memory of an update: payloads that were pushed, values before and after, in pieces.

The gradient is the sum of share times value in the order of the sources, each product and each sum rounded to the
dtype. It is made piece by piece in the scratch, which stays in the processor's cache; the rule reads it there. So no
sum is ever as long as the payload. Must not know: update rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba.extending
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.np.numpy_support import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from shardyard.domain.compiling import compiled
from shardyard.transport.stream_copy import copy_past_cache

Array = npt.NDArray[np.floating[Any]]
Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]
Task = tuple[Bytes, Bytes, Addresses, Shares, Array, Array, int, int]
"""What is to be updated, bytes [start, stop) of one partition's payload:

    old, new     values before and after
    sources      addresses of the payloads that were pushed, as `locate` gives them
    shares       each source's share of the mean; empty: a lone source, taken as it is
    scratch      memory for the sum of a piece; its dtype is that of the elements
    staged       memory for the next values of a piece, which then go past the cache; empty: they are written in place
    start, stop  multiples of the element's size
"""


def _make_pointer(_context: Any, _address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


# untyped, or typed as what they are before they are compiled
_pointer: Any = numba.extending.intrinsic(_make_pointer)
_array_at: Any = carray
unpacked: Any = to_fixed_tuple


@compiled
def locate(old: Bytes, new: Bytes, payload: Bytes, align_bytes: int) -> int:
    """The address of a payload, 0 where an update may not read it: it must be as long as the values, all must begin at
    a multiple of `align_bytes`, and `new` may overlap neither of the others."""
    n = new.size
    to, before, address = np.int64(new.ctypes.data), np.int64(old.ctypes.data), np.int64(payload.ctypes.data)
    fits = old.size == n and payload.size == n and (to | before | address) % align_bytes == 0
    apart = abs(to - before) >= n and abs(to - address) >= n
    return int(address) if fits and apart else 0


@compiled
def source_at(address: int, length: int, scratch: Array) -> Array:
    values: Array = _array_at(_pointer(address), (length,), scratch.dtype)
    return values


@compiled
def part(values: Bytes, begin: int, end: int, scratch: Array) -> Array:
    return values[begin:end].view(scratch.dtype)


@compiled
def piece_range(task: Task) -> tuple[int, int, int]:
    """The range of where pieces begin: one piece where there is nothing to sum, or to stage."""
    _, _, _, shares, scratch, staged, start, stop = task
    if staged.size:
        return start, stop, staged.size * staged.itemsize
    return start, stop, (max(stop - start, 1) if shares.size == 0 else scratch.size * scratch.itemsize)


@compiled
def add_up(sources: Addresses, shares: Shares, begin: int, total: Array) -> None:
    """Adds up at least two sources into `total`."""
    n = total.size
    left, right = source_at(sources[0] + begin, n, total), source_at(sources[1] + begin, n, total)
    left_share, right_share = total.dtype.type(shares[0]), total.dtype.type(shares[1])
    for i in range(n):
        total[i] = left[i] * left_share + right[i] * right_share
    for k in range(2, sources.size):
        value, share = source_at(sources[k] + begin, n, total), total.dtype.type(shares[k])
        for i in range(n):
            total[i] += value[i] * share


@compiled
def scale_into(source: int, share: float, begin: int, total: Array) -> None:
    value, factor = source_at(source + begin, total.size, total), total.dtype.type(share)
    for i in range(total.size):
        total[i] = value[i] * factor


@compiled
def gradient_of(task: Task, begin: int, n: int) -> Array:
    _, _, sources, shares, scratch, _, _, _ = task
    if shares.size == 0:
        return source_at(sources[0] + begin, n, scratch)
    total = scratch[:n]
    if shares.size == 1:
        scale_into(sources[0], shares[0], begin, total)
    else:
        add_up(sources, shares, begin, total)
    return total


@compiled
def window(task: Task, begin: int, end: int) -> tuple[Array, Array, Array]:
    """Values before, gradient, and values after, of bytes [begin, end)."""
    old, new, _, _, scratch, staged, _, _ = task
    n = (end - begin) // scratch.itemsize
    after = staged[:n] if staged.size else part(new, begin, end, scratch)
    return part(old, begin, end, scratch), gradient_of(task, begin, n), after


@compiled
def put(task: Task, begin: int, end: int) -> None:
    """The next values of bytes [begin, end) are made; they go where they belong."""
    _, new, _, _, _, staged, _, _ = task
    if staged.size:
        copy_past_cache(new[begin:end], staged.view(np.uint8)[: end - begin])
