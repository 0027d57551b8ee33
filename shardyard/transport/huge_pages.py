"""Maps files so that the kernel can use huge pages for them.

Large buffers are read and written from end to end in every step. With pages of 4 KiB, a part of that time is spent on
looking up pages. A huge page needs an address that is aligned like the offset in the file, which mmap alone does not
ensure.

Owns: the address range of one mapping. It is unmapped when the last array on it is freed. Must not know: what the file
is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

HUGE_BYTES: Final = 2 << 20
# linux/mman.h; Python's mmap has neither
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MADV_COLLAPSE: Final = 25
_FAILED: Final = ctypes.c_void_p(-1).value


def _library() -> Any:
    found = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    found.mmap.restype = pointer
    found.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_int64]
    found.munmap.argtypes = [pointer, size]
    found.madvise.argtypes = [pointer, size, number]
    return found


_C: Final = _library()


class HugePageMapping:
    """Maps the first `nbytes` bytes of a file. `bytes` has dtype uint8. Raises OSError."""

    def __init__(self, fd: int, nbytes: int, *, flags: int, protection: int) -> None:
        # first reserve a range that has an aligned address, then map the file into it
        room = _mmap(None, nbytes + HUGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        begin, stop = room, room + nbytes + HUGE_BYTES
        self.address = room + -room % HUGE_BYTES
        try:
            _mmap(self.address, nbytes, protection, flags | _MAP_FIXED, fd)
        except OSError:
            _C.munmap(begin, stop - begin)
            raise
        end = self.address + nbytes + -nbytes % mmap.PAGESIZE
        for at, after in ((begin, self.address), (end, stop)):
            if at < after:
                _C.munmap(at, after - at)
        memory = (ctypes.c_uint8 * nbytes).from_address(self.address)
        unmap = weakref.finalize(memory, _C.munmap, self.address, end - self.address)
        unmap.atexit = False  # other threads may still read
        self.bytes: Bytes = np.frombuffer(memoryview(memory), np.uint8)
        self.bytes.flags.writeable = bool(protection & mmap.PROT_WRITE)

    def madvise(self, advice: int, begin: int, nbytes: int) -> None:
        """`begin`: a multiple of the page size. Raises OSError."""
        if _C.madvise(self.address + begin, nbytes, advice):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def collapse(self, begin: int, nbytes: int) -> bool:
        """Makes huge pages of the pages in a range, whatever the machine's setting for shared memory is. Returns
        whether that was possible: it needs Linux 6.1 or newer, and contiguous free memory."""
        first, last = begin + -begin % HUGE_BYTES, (begin + nbytes) // HUGE_BYTES * HUGE_BYTES
        if first >= last:
            return False
        try:
            self.madvise(_MADV_COLLAPSE, first, last - first)
        except OSError:
            return False
        return True


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found: int | None = _C.mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
