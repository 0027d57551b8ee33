"""Memory that is reserved at once and comes page by page as it is touched, so that it grows without a copy.

Owns: how it is mapped, and when its pages come. Invariants: it begins at a huge page; the first MiB comes in small
pages, so that a small table stays small; the rest in huge ones; it is unmapped with the last array on it. Must not
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
"""The last huge page has so much of what is reserved, or comes in small pages."""
_MAP_NORESERVE: Final = 0x4000
_MAP_FIXED: Final = 0x10
_POPULATE_WRITE: Final = 23


def reserve(nbytes: int, dtype: npt.DTypeLike, *, small_bytes: int = HUGE_BYTES) -> npt.NDArray[Any]:
    """Zeros of that dtype, one-dimensional, in `nbytes` bytes of address space. The first `small_bytes` come in small
    pages. Raises TableError where the address space is refused."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        room = mmap.mmap(-1, nbytes + 2 * HUGE_BYTES, flags=flags)
    except (OSError, ValueError, OverflowError) as error:
        raise TableError(
            f"{nbytes / 2**30:.1f} GiB of address space for a table are refused ({error})",
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
    """The bytes of `array`, which was reserved, from byte `begin` on become those of the file, to be read alone; those
    beyond its end must not be read until it has grown. `begin` is at a page. Raises OSError."""
    address, nbytes = array.ctypes.data + begin, array.nbytes - begin
    found = _MMAP(address, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, file, 0)
    if found != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    # one page for each row that is read: its neighbours in the file are no neighbours
    _MADVISE(address, nbytes, mmap.MADV_RANDOM)


def give_back(array: npt.NDArray[Any], begin: int, end: int) -> None:
    """Bytes [begin, end) of `array` take no memory any more, and are zeros, but for pages that are not wholly there."""
    first = -(-(array.ctypes.data + begin) // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (array.ctypes.data + end) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        _MADVISE(first, last - first, mmap.MADV_DONTNEED)


def populate(array: npt.NDArray[Any], begin: int, end: int) -> None:
    """The pages of bytes [begin, end) of `array` come now, and not when they are touched. What is there stays. Where
    the system cannot do that (before Linux 5.14) they come as ever."""
    address = array.ctypes.data
    # a huge page at a time, since nobody in this process can map or unmap anything meanwhile
    for first in range(begin // HUGE_BYTES * HUGE_BYTES, end, HUGE_BYTES):
        at = (address + max(first, begin)) // mmap.PAGESIZE * mmap.PAGESIZE
        _MADVISE(at, address + min(first + HUGE_BYTES, end) - at, _POPULATE_WRITE)


class Pages:
    """Of the rows of `array`, which was reserved, float32 (rows, row): they come before the rows are used, which are
    taken from its beginning on. Safe for several threads."""

    def __init__(self, array: npt.NDArray[np.float32]) -> None:
        self._array = array
        self._asking = threading.Lock()
        self._asked = HUGE_BYTES // array.strides[0]
        """Rows whose pages were asked for; those of the first are small, and come one by one."""

    def make_ready(self, rows: int) -> None:
        """Those of the first `rows` rows, or of all where there are fewer, are there, or come by another thread now;
        with them as many as make a huge page."""
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
