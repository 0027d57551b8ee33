"""Memory that two processes of one user share on one machine. It has no name, so nothing can be left behind.

`SharedMemory` is memory that this process exports (a memfd). Its descriptor travels to the other process beside a
message of a stream (interfaces.Descriptors), and `attach_received` maps it there. Invariants: exported memory is sealed
against shrinking, so that a mapping never loses pages while it is read. Before memory is mapped, it is checked: a
memfd, of this user, sealed, large enough. The kernel frees the memory when the last process has ended, in whatever way.
Must not know: what the bytes mean.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import sys
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from shardyard.domain.errors import NotShareable, TooLarge
from shardyard.domain.limits import SHARED_BYTES_MAX
from shardyard.domain.pulls import ShmHandle
from shardyard.transport.huge_pages import HugePageMapping
from shardyard.transport.interfaces import Descriptors

Bytes = npt.NDArray[np.uint8]

_NAME: Final = "shardyard"
# linux/memfd.h, linux/fcntl.h, linux/mman.h; Python 3.11 does not have them all
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
_MADV_POPULATE_WRITE = 23
_MAP_NORESERVE = 0x4000


def available() -> bool:
    """Whether this system supports `SharedMemory`."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


class SharedMemory:
    """Memory of this process that another process may open. `bytes` has shape (nbytes,), dtype uint8, and begins at a
    page.

    Pages take no memory before they are touched. `read_only`: no other process can ever map it for writing. Raises
    NotShareable if the system has no such memory, TooLarge if there is not enough.
    """

    def __init__(self, nbytes: int, *, read_only: bool) -> None:
        self._fd = -1
        if not available():
            raise NotShareable(f"{sys.platform} has no shared memory without a name")
        if nbytes > SHARED_BYTES_MAX:
            raise TooLarge(f"shared memory of {nbytes} bytes is too large; at most {SHARED_BYTES_MAX} are allowed")
        self.nbytes = nbytes
        try:
            self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            size = max(nbytes, 1)  # nothing cannot be mapped
            os.ftruncate(self._fd, size)
            self._map = HugePageMapping(
                self._fd, size, flags=mmap.MAP_SHARED, protection=mmap.PROT_READ | mmap.PROT_WRITE
            )
            seals = _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL | (_SEAL_FUTURE_WRITE if read_only else 0)
            fcntl.fcntl(self._fd, _F_ADD_SEALS, seals)
        except (OSError, ValueError) as error:
            self.close()
            raise NotShareable(f"cannot share {nbytes} bytes of memory: {error}") from error
        self.bytes: Bytes = self._map.bytes[:nbytes]

    def ticket(self, region: int = 0) -> ShmHandle:
        return ShmHandle(self.nbytes, region, self._fd)

    def descriptor(self) -> int:
        """Returns another descriptor of this memory, which the caller closes. Raises NotShareable if it was closed."""
        if self._fd < 0:
            raise NotShareable("this memory is not shared any more")
        return os.dup(self._fd)

    def populate(self, at: int, nbytes: int) -> None:
        """Allocates all pages of a range now, and makes huge pages of them where possible. Raises TooLarge if there is
        not enough memory."""
        populate(self._map, at, nbytes)
        self._map.collapse(at, nbytes)

    def close(self) -> None:
        """Ends sharing: no further process can get a descriptor. The memory lives as long as arrays refer to it. May be
        repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def populate(mapped: HugePageMapping, start: int, nbytes: int) -> None:
    """Allocates the pages of a range, if the kernel can; otherwise they come at the first touch. Raises TooLarge."""
    begin = start - start % mmap.PAGESIZE
    try:
        mapped.madvise(_MADV_POPULATE_WRITE, begin, start + nbytes - begin)
    except MemoryError:
        raise TooLarge(f"{nbytes} bytes of shared memory, which this machine does not have") from None
    except OSError as error:
        if error.errno in (12, 14):  # ENOMEM, EFAULT: no memory (in this container) for the pages
            raise TooLarge(f"{nbytes} bytes of shared memory, which this machine does not have") from None


class AttachedMemory:
    """Memory that another process exported. `bytes` has shape (nbytes,), dtype uint8.

    It is read-only, unless it was attached as writable or is `private`. A write to private memory copies the page for
    this process; the copy does not show later changes of the exporter until `refresh` is called.
    """

    def __init__(self, mapped: HugePageMapping, nbytes: int, *, private: bool) -> None:
        self._map = mapped
        self.nbytes = nbytes
        self.private = private
        self.bytes: Bytes = mapped.bytes[:nbytes]

    def refresh(self, at: int, nbytes: int) -> bool:
        """Drops the copies of pages that this process made by writing to a range. Returns whether there were any."""
        assert self.private
        begin = at // mmap.PAGESIZE
        end = -(-(at + nbytes) // mmap.PAGESIZE)
        if not _has_copies(self.bytes.ctypes.data, begin, end):
            return False
        self._map.madvise(mmap.MADV_DONTNEED, begin * mmap.PAGESIZE, (end - begin) * mmap.PAGESIZE)
        return True


def _has_copies(base: int, begin: int, end: int) -> bool:
    """Whether this process has its own copy of any of the pages [begin, end) after `base`. In pagemap, bit 61 of such a
    page is 0 while bit 63 (present) is 1, or bit 62 (swapped) is 1. True if pagemap cannot be read."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            raw = os.pread(pagemap.fileno(), 8 * (end - begin), 8 * (base // mmap.PAGESIZE + begin))
    except OSError:
        return True
    if len(raw) != 8 * (end - begin):
        return True
    top = np.frombuffer(raw, "<u8") >> np.uint64(61)
    return bool(np.any((top == 4) | (top == 2) | (top == 6) | (top == 3)))


def attach_received(
    ticket: ShmHandle, descriptors: Descriptors | None, *, private: bool = False, writable: bool = False
) -> AttachedMemory:
    """Maps memory whose descriptor came beside the message with the ticket. See `attach`. Raises NotShareable."""
    fd = None if descriptors is None else descriptors.take_descriptor()
    if fd is None:
        raise NotShareable("memory was named, and its descriptor did not come with it")
    try:
        return attach(replace(ticket, fd=fd), private=private, writable=writable)
    finally:
        os.close(fd)


def attach(ticket: ShmHandle, *, private: bool = False, writable: bool = False) -> AttachedMemory:
    """Maps memory that another process exported, and leaves its descriptor open. `writable`: the other process sees
    what is written here. Raises NotShareable if that is impossible or not safe."""
    assert not (private and writable)
    if not available():
        raise NotShareable(f"{sys.platform} has no shared memory without a name")
    size = max(ticket.nbytes, 1)
    try:
        found = os.fstat(ticket.fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise NotShareable(f"the memory belongs to user {found.st_uid}; this process is user {os.geteuid()}")
        if not _seals(ticket.fd) & _SEAL_SHRINK:
            raise NotShareable("the memory is not sealed against shrinking", why="pages could vanish while it is read")
        if found.st_size < size:
            raise NotShareable(f"the memory has {found.st_size} bytes; announced {size}")
        flags, protection = mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if private:
            flags, protection = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        mapped = HugePageMapping(ticket.fd, size, flags=flags, protection=protection)
    except (OSError, ValueError) as error:
        raise NotShareable(f"the memory cannot be mapped: {error}") from error
    return AttachedMemory(mapped, ticket.nbytes, private=private)


def _seals(fd: int) -> int:
    """The seals of a file; none for files that cannot have any, which are not memfds."""
    try:
        return fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:
        return 0
