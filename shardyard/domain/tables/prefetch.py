"""`prefetch`, which the compiler's language does not have, and what other intrinsics on arrays need too.

Must not know: what lies in the arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numba.extending
from llvmlite import ir
from numba.core import cgutils, types

INT: Final = ir.IntType(32)
BYTES: Final = ir.IntType(8).as_pointer()


def address_of(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """The address of element `arguments[1]` of the contiguous array `arguments[0]`."""
    proxy: Any = cgutils.create_struct_proxy(signature.args[0])  # type: ignore[no-untyped-call]
    return builder.gep(proxy(context, builder, arguments[0]).data, [arguments[1]])


def declared(builder: Any, kind: Any, name: str) -> Any:
    """A function of LLVM or libc."""
    return cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]


def _make_prefetch(_context: Any, array: Any, _at: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.bitcast(address_of(context, builder, signature, arguments), BYTES)
        kind = ir.FunctionType(ir.VoidType(), [BYTES, INT, INT, INT])
        function = declared(builder, kind, "llvm.prefetch.p0")
        builder.call(function, [place, INT(0), INT(3), INT(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


prefetch: Any = numba.extending.intrinsic(_make_prefetch)
"""(array, index): asks for the cache line of that element."""
