"""How loops reach the memory of an update, in pieces: pushed payloads, and the values before and after.

The gradient is the sum of share times value in the order of the sources. Each product and each sum is rounded to the
dtype. The sum is made piece by piece in the scratch memory, which stays in the processor's cache, and the rule reads it
there. So no sum is as long as the payload. Must not know: update rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numba.extending
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.np.arrayobj import populate_array
from numba.np.unsafe.ndarray import to_fixed_tuple

from shardyard.domain.compiling import compiled, inlined
from shardyard.transport.stream_copy import copy_past_cache

Array = npt.NDArray[np.floating[Any]]
Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]
Task = tuple[Bytes, Bytes, Addresses, Shares, Array, Array, int, int]
"""An update of bytes [start, stop) of one partition's payload:

    old, new     values before and after
    sources      addresses of pushed payloads, from `locate`
    shares       each source's share of the mean; empty: there is one source, used as it is
    scratch      memory for the sum of a piece; its dtype is that of the elements
    staged       memory for the next values of a piece, which are then copied past the cache; empty: no copy
    start, stop  multiples of the element's size
"""


def _floats(context: Any, builder: Any, signature: Any, pointer: Any, length: Any) -> Any:
    """Makes an array of shape (length,) of the memory at a pointer."""
    array: Any = context.make_array(signature.return_type)(context, builder)
    item = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(signature.return_type.dtype)))
    pointer = builder.bitcast(pointer, array.data.type)
    populate_array(array, pointer, [length], [item], item, None)  # type: ignore[no-untyped-call]
    return array._getvalue()


def _make_address(_context: Any, values: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array: Any = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.ptrtoint(array.data, ir.IntType(64))

    return types.int64(values), generate


def _make_source(_context: Any, _address: Any, _length: Any, like: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _floats(context, builder, signature, builder.inttoptr(arguments[0], _BYTE.as_pointer()), arguments[1])

    return types.Array(like.dtype, 1, "C")(types.int64, types.intp, like), generate


def _make_part(_context: Any, values: Any, _begin: Any, _end: Any, like: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array: Any = context.make_array(signature.args[0])(context, builder, arguments[0])
        item = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(like.dtype)))
        length = builder.sdiv(builder.sub(arguments[2], arguments[1]), item)
        first = builder.gep(builder.bitcast(array.data, _BYTE.as_pointer()), [arguments[1]])
        return _floats(context, builder, signature, first, length)

    return types.Array(like.dtype, 1, "C")(values, types.intp, types.intp, like), generate


_BYTE: Final = ir.IntType(8)
# Intrinsics take no time to compile; numba's own `view` and `carray` take a function each.
_address: Any = numba.extending.intrinsic(_make_address)
source_at: Any = numba.extending.intrinsic(_make_source)
"""source_at(address, length, like): the array of `like`'s dtype at an address."""
part: Any = numba.extending.intrinsic(_make_part)
"""part(values, begin, end, like): bytes [begin, end) of `values`, as an array of `like`'s dtype."""
unpacked: Any = to_fixed_tuple


@compiled
def locate(old: Bytes, new: Bytes, payload: Bytes, align_bytes: int) -> int:
    """Returns the address of a payload, or 0 if an update may not read it: it must be as long as the values, all must
    begin at a multiple of `align_bytes`, and `new` may overlap neither of the others."""
    n = new.size
    to, before, address = _address(new), _address(old), _address(payload)
    fits = old.size == n and payload.size == n and (to | before | address) % align_bytes == 0
    apart = abs(to - before) >= n and abs(to - address) >= n
    return address if fits and apart else 0


@inlined
def piece_range(task: Task) -> tuple[int, int, int]:
    """Returns the range of the offsets at which pieces begin. If nothing is summed or staged, there is one piece."""
    _, _, _, shares, scratch, staged, start, stop = task
    if staged.size:
        return start, stop, staged.size * staged.itemsize
    if shares.size:
        return start, stop, scratch.size * scratch.itemsize
    return start, stop, stop - start if stop > start else 1


@compiled
def add_up(sources: Addresses, shares: Shares, begin: int, total: Array) -> None:
    """Writes the sum of share times source into `total`."""
    n = total.size
    left, left_share = source_at(sources[0] + begin, n, total), total.dtype.type(shares[0])
    if sources.size == 1:
        for i in range(n):
            total[i] = left[i] * left_share
        return
    right, right_share = source_at(sources[1] + begin, n, total), total.dtype.type(shares[1])
    for i in range(n):
        total[i] = left[i] * left_share + right[i] * right_share
    for k in range(2, sources.size):
        value, share = source_at(sources[k] + begin, n, total), total.dtype.type(shares[k])
        for i in range(n):
            total[i] += value[i] * share


@inlined
def gradient_of(task: Task, begin: int, n: int) -> Array:
    _, _, sources, shares, scratch, _, _, _ = task
    total: Array = source_at(sources[0] + begin, n, scratch) if shares.size == 0 else scratch[:n]
    if shares.size:
        add_up(sources, shares, begin, total)
    return total


@inlined
def window(task: Task, begin: int, end: int) -> tuple[Array, Array, Array]:
    """Returns the values before, the gradient, and memory for the values after, of bytes [begin, end)."""
    old, new, _, _, scratch, staged, _, _ = task
    n = (end - begin) // scratch.itemsize
    after = staged[:n] if staged.size else part(new, begin, end, scratch)
    return part(old, begin, end, scratch), gradient_of(task, begin, n), after


@inlined
def put(task: Task, begin: int, end: int) -> None:
    """Copies the next values of bytes [begin, end) from `staged` to their place, if they were staged."""
    _, new, _, _, _, staged, _, _ = task
    if staged.size:
        copy_past_cache(part(new, begin, end, new), part(staged, 0, end - begin, new))
