"""Memory that is reserved at once and comes page by page as it is touched, so that it grows without a copy.

Owns: how it is mapped. Invariants: it begins at a huge page; the first MiB comes in small pages, so that a small table
stays small; the rest in huge ones; it is unmapped with the last array on it. Must not know: what lies there.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardyard.ground.errors import TableError

HUGE_BYTES: Final = 2 << 20
_MAP_NORESERVE: Final = 0x4000


def reserve(nbytes: int, dtype: npt.DTypeLike, *, small_bytes: int = HUGE_BYTES) -> npt.NDArray[Any]:
    """Zeros of that dtype, one-dimensional, in `nbytes` bytes of address space. The first `small_bytes` come in small
    pages. Raises TableError where the address space is refused."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        room = mmap.mmap(-1, nbytes + HUGE_BYTES, flags=flags)
    except (OSError, ValueError, OverflowError) as error:
        raise TableError(
            f"{nbytes / 2**30:.1f} GiB of address space for a table are refused ({error})",
            todo="lower rows_max of the table, or lift the limit on address space (ulimit -v, vm.overcommit_memory)",
        ) from error
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    begin = -address % HUGE_BYTES
    end = begin + nbytes
    first = begin + small_bytes
    if end - first >= HUGE_BYTES:
        whole = (end - first) // HUGE_BYTES * HUGE_BYTES
        room.madvise(mmap.MADV_HUGEPAGE, first, whole)
    itemsize = np.dtype(dtype).itemsize
    return np.frombuffer(room, dtype, nbytes // itemsize, begin)
