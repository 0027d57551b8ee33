"""Compiles loops to machine code.

Owns: the options of the compiler. Invariants: no fastmath, so that a loop gives the same bits on every processor; loops
run without the interpreter's lock. Machine code on disk is made anew when its own file changes, not when a function of
another file that it calls does: after such a change, remove the `__pycache__` beside the caller. Must not know: what is
compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_F = TypeVar("_F", bound=Callable[..., object])


def compiled(function: _F, **options: Any) -> _F:
    """Compiles the function at its first call. The machine code is kept on disk (in NUMBA_CACHE_DIR if set), if a
    folder can be written."""
    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        return cast(_F, numba.njit(cache=True, **options)(function))
    except RuntimeError:  # no directory is writable
        return cast(_F, numba.njit(cache=False, **options)(function))


def inlined(function: _F) -> _F:
    """Becomes part of each compiled function that calls it: for helpers of a few lines, which take longer to compile as
    functions of their own. The bits are the same."""
    return cast(_F, numba.njit(nogil=True, error_model="numpy", inline="always")(function))
