"""Copies large memory without filling the processor's cache.

An ordinary store first reads the cache line that it writes to. For a buffer that is larger than the cache, this is a
third of the memory traffic. A non-temporal store does not read it.

Invariant: after the copy, other threads and processes see the bytes (a fence stands at its end). Must not know: what
the bytes mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numba
import numba.extending
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types

from shardyard.domain.compiling import compiled

Bytes = npt.NDArray[np.uint8]
LINE_BYTES: Final = 64
_WORD: Final = ir.IntType(32)
_LINE: Final = ir.VectorType(_WORD, 16)


def _make_copy_line(_context: Any, into: Any, values: Any, _at: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def place(number: int) -> Any:
            proxy: Any = cgutils.create_struct_proxy(signature.args[number])  # type: ignore[no-untyped-call]
            array = proxy(context, builder, arguments[number])
            return builder.bitcast(builder.gep(array.data, [arguments[2]]), _LINE.as_pointer())

        line = builder.load(place(1))
        line.align = 1
        store = builder.store(line, place(0))
        store.align = LINE_BYTES
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_WORD, 1)]))
        return context.get_dummy_value()

    return types.void(into, values, types.intp), generate


def _make_fence(_context: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_copy_line: Any = numba.extending.intrinsic(_make_copy_line)
_fence: Any = numba.extending.intrinsic(_make_fence)


@compiled
def copy_past_cache(into: Bytes, values: Bytes) -> None:
    """Copies `values` into `into`. Both have shape (n,), uint8, are contiguous, and do not overlap."""
    n = values.size
    head = min(n, -into.ctypes.data % LINE_BYTES)
    tail = n - (n - head) % LINE_BYTES
    for at in range(head):
        into[at] = values[at]
    for at in range(head, tail, LINE_BYTES):
        _copy_line(into, values, at)
    for at in range(tail, n):
        into[at] = values[at]
    _fence()
