"""Memory whose addresses are reserved at once and whose pages come when they are touched, so that it grows without a
copy.

Owns: how it is mapped, and when its pages come. Invariants: it begins at a huge page; the first MiB comes in small
pages, so that a small table stays small, the rest in huge pages; it is unmapped with the last array on it. Must not
know: what lies there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardyard.domain.errors import TableError

HUGE_BYTES: Final = 2 << 20
_FILLED_BYTES: Final = HUGE_BYTES * 3 // 4
"""If less than this of the last huge page is reserved, that page comes in small pages."""
_MAP_NORESERVE: Final = 0x4000
_MAP_FIXED: Final = 0x10
_POPULATE_WRITE: Final = 23


def reserve(nbytes: int, dtype: npt.DTypeLike, *, small_bytes: int = HUGE_BYTES) -> npt.NDArray[Any]:
    """Reserves `nbytes` bytes of address space: a one-dimensional array of zeros. The first `small_bytes` come in small
    pages. Raises TableError if the address space is refused."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        room = mmap.mmap(-1, nbytes + 2 * HUGE_BYTES, flags=flags)
    except (OSError, ValueError, OverflowError) as error:
        raise TableError(
            f"{nbytes / 2**30:.1f} GiB of address space for a table were refused ({error})",
            todo="lower rows_max of the table, or lift the limit on address space (ulimit -v, vm.overcommit_memory)",
        ) from error
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    begin = -address % HUGE_BYTES
    huge = (nbytes - small_bytes + HUGE_BYTES - _FILLED_BYTES) // HUGE_BYTES
    if huge > 0:
        room.madvise(mmap.MADV_HUGEPAGE, begin + small_bytes, huge * HUGE_BYTES)
    itemsize = np.dtype(dtype).itemsize
    return np.frombuffer(room, dtype, nbytes // itemsize, begin)


def map_file(array: npt.NDArray[Any], begin: int, file: int) -> None:
    """Maps the file over the bytes of `array`, which was reserved, from byte `begin` on, for reading. Bytes beyond the
    end of the file must not be read until it has grown. `begin` is at a page. Raises OSError."""
    address, nbytes = array.ctypes.data + begin, array.nbytes - begin
    found = _MMAP(address, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, file, 0)
    if found != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    # read one page for each row, since adjacent rows of the file are not used together
    _MADVISE(address, nbytes, mmap.MADV_RANDOM)


def give_back(array: npt.NDArray[Any], begin: int, end: int) -> None:
    """Gives the memory of bytes [begin, end) of `array` back. They are zeros then, except in pages that are only partly
    in that range."""
    first = -(-(array.ctypes.data + begin) // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (array.ctypes.data + end) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        _MADVISE(first, last - first, mmap.MADV_DONTNEED)


def populate(array: npt.NDArray[Any], begin: int, end: int) -> None:
    """Makes the pages of bytes [begin, end) of `array` come now, and not when they are touched. Values stay. Before
    Linux 5.14 it does nothing."""
    address = array.ctypes.data
    # one huge page at a time, since no other thread of the process can map or unmap memory meanwhile
    for first in range(begin // HUGE_BYTES * HUGE_BYTES, end, HUGE_BYTES):
        at = (address + max(first, begin)) // mmap.PAGESIZE * mmap.PAGESIZE
        _MADVISE(at, address + min(first + HUGE_BYTES, end) - at, _POPULATE_WRITE)


class Pages:
    """The pages of `array`, which was reserved, float32 (rows, row). Rows are used from the first one on; their pages
    come before. Safe for several threads."""

    def __init__(self, array: npt.NDArray[np.float32]) -> None:
        self._array = array
        self._asking = threading.Lock()
        self._asked = HUGE_BYTES // array.strides[0]
        """Rows whose pages have come, or come now. The first rows have small pages, which come one by one."""

    def make_ready(self, rows: int) -> None:
        """Makes the pages of the first `rows` rows come, at least a huge page at a time, unless another thread does so
        now."""
        row_bytes = self._array.strides[0]
        if min(rows, len(self._array)) <= self._asked:
            return
        with self._asking:
            first = self._asked
            last = self._asked = max(first, min(max(rows, first + HUGE_BYTES // row_bytes), len(self._array)))
        if last > first:
            populate(self._array, first * row_bytes, last * row_bytes)


def _from_libc(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype, function.argtypes = result, arguments
    return function


_MMAP: Final = _from_libc(
    "mmap", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)
_MADVISE: Final = _from_libc("madvise", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
