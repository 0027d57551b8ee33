"""What loops need that the compiler's language lacks: locks, counters, and file I/O. Each is one intrinsic.

A lock is a word that is odd while it is held, and has another value after each release. So a thread that reads without
the lock can tell whether another one wrote meanwhile (a sequence lock; Boehm, Can Seqlocks Get Along With Programming
Language Memory Models?, MSPC 2012). `try_lock` acquires and `unlock` releases, so the holder sees everything that was
written under the lock. A thread never sleeps on a lock, but may yield. Must not know: what the words mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numba.extending
from llvmlite import ir
from numba.core import types

from shardyard.domain.tables.prefetch import BYTES, INT, address_of, declared

_WORD: Final = ir.IntType(64)
_WILL_NEED: Final = 3


def _make_try_lock(_context: Any, array: Any, _at: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = address_of(context, builder, signature, arguments)
        # an odd word does not equal `free`
        free = builder.and_(builder.load_atomic(place, "monotonic", 8), _WORD(~1 & (1 << 64) - 1))
        found = builder.cmpxchg(place, free, builder.add(free, _WORD(1)), "acquire", "monotonic")
        # a reader without the lock sees the odd word before it sees what is written under the lock
        builder.fence("release")
        return builder.extract_value(found, 1)

    return types.boolean(array, types.intp), generate


def _make_unlock(_context: Any, array: Any, _at: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = address_of(context, builder, signature, arguments)
        builder.store_atomic(builder.add(builder.load(place), _WORD(1)), place, "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _make_add(_context: Any, array: Any, _at: Any, _more: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", address_of(context, builder, signature, arguments), arguments[2], "monotonic")

    return types.int64(array, types.intp, types.int64), generate


def _make_load(_context: Any, array: Any, _at: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(address_of(context, builder, signature, arguments), "acquire", 8)

    return types.int64(array, types.intp), generate


def _make_fence(_context: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("acquire")
        return context.get_dummy_value()

    return types.void(), generate


def _make_give_way(_context: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(INT, [])
        builder.call(declared(builder, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


def _make_write(_context: Any, _file: Any, _address: Any, _nbytes: Any, _offset: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        file, address, nbytes, offset = arguments
        kind = ir.FunctionType(_WORD, [INT, BYTES, _WORD, _WORD])
        place = builder.inttoptr(address, BYTES)
        return builder.call(declared(builder, kind, "pwrite"), [builder.trunc(file, INT), place, nbytes, offset])

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate


def _make_will_need(_context: Any, _file: Any, _offset: Any, _nbytes: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        file, offset, nbytes = arguments
        kind = ir.FunctionType(INT, [INT, _WORD, _WORD, INT])
        function = declared(builder, kind, "posix_fadvise")
        builder.call(function, [builder.trunc(file, INT), offset, nbytes, INT(_WILL_NEED)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _make_pointer(_context: Any, _address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], BYTES)

    return types.voidptr(types.int64), generate


try_lock: Any = numba.extending.intrinsic(_make_try_lock)
"""(int64 array, index): adds one to an even word. Returns whether the word was even."""
unlock: Any = numba.extending.intrinsic(_make_unlock)
"""(int64 array, index): adds one to the word, which is even then."""
load: Any = numba.extending.intrinsic(_make_load)
"""(int64 array, index): reads the element before anything that is read later."""
fence: Any = numba.extending.intrinsic(_make_fence)
"""Earlier reads happen before later reads."""
add: Any = numba.extending.intrinsic(_make_add)
"""(int64 array, index, number): adds atomically. Returns the value before."""
give_way: Any = numba.extending.intrinsic(_make_give_way)
"""Lets another thread run."""
write_at: Any = numba.extending.intrinsic(_make_write)
"""(file, address, nbytes, offset): pwrite(2). Returns how many bytes were written, or -1."""
will_need: Any = numba.extending.intrinsic(_make_will_need)
"""(file, offset, nbytes): posix_fadvise(2). Reads ahead from the disk, without waiting."""
pointer: Any = numba.extending.intrinsic(_make_pointer)
"""(address): for numba's carray."""
