"""Memory that two processes of one user share on one machine. It has no name, so nothing can be left behind.

`SharedMemory` is memory that this process exports (a memfd). `attach` opens the memory of another process through
/proc/PID/fd. Invariants: exported memory is sealed against shrinking, so that a mapping never loses pages while it is
read. Before memory is mapped, it is checked: a memfd, of this user, sealed, large enough. Before it is used, its nonce
is compared, since the same numbers mean another process in another PID namespace. The kernel frees the memory when the
last process has ended, in whatever way. Must not know: what the bytes mean.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
import sys
from typing import Final

import numpy as np
import numpy.typing as npt

from shardyard.domain.errors import NotShareable, TooLarge
from shardyard.domain.limits import NONCE_BYTES, SHARED_BYTES_MAX
from shardyard.domain.pulls import ShmHandle
from shardyard.transport.huge_pages import HugePageMapping

Bytes = npt.NDArray[np.uint8]

HEAD_BYTES: Final = mmap.PAGESIZE
"""The bytes before the payload, which hold only the nonce."""
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
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._fd, HEAD_BYTES + nbytes)
            self._map = HugePageMapping(
                self._fd, HEAD_BYTES + nbytes, flags=mmap.MAP_SHARED, protection=mmap.PROT_READ | mmap.PROT_WRITE
            )
            self._map.bytes[:NONCE_BYTES] = np.frombuffer(self._nonce, np.uint8)
            seals = _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL | (_SEAL_FUTURE_WRITE if read_only else 0)
            fcntl.fcntl(self._fd, _F_ADD_SEALS, seals)
        except (OSError, ValueError) as error:
            self.close()
            raise NotShareable(f"cannot share {nbytes} bytes of memory: {error}") from error
        self.bytes: Bytes = self._map.bytes[HEAD_BYTES:]

    def ticket(self, region: int = 0) -> ShmHandle:
        return ShmHandle(os.getpid(), self._fd, self.nbytes, self._nonce, region)

    def populate(self, at: int, nbytes: int) -> None:
        """Allocates all pages of a range now, and makes huge pages of them where possible. Raises TooLarge if there is
        not enough memory."""
        populate(self._map, HEAD_BYTES + at, nbytes)
        self._map.collapse(HEAD_BYTES + at, nbytes)

    def close(self) -> None:
        """Ends sharing: no process can attach any more. The memory lives as long as arrays refer to it. May be
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
        self.bytes: Bytes = mapped.bytes[HEAD_BYTES:]

    def refresh(self, at: int, nbytes: int) -> bool:
        """Drops the copies of pages that this process made by writing to a range. Returns whether there were any."""
        assert self.private
        begin = (HEAD_BYTES + at) // mmap.PAGESIZE
        end = -(-(HEAD_BYTES + at + nbytes) // mmap.PAGESIZE)
        if not _has_copies(self.bytes.ctypes.data - HEAD_BYTES, begin, end):
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


def attach(ticket: ShmHandle, *, private: bool = False, writable: bool = False) -> AttachedMemory:
    """Opens memory that another process exported. `writable`: the other process sees what is written here. Raises
    NotShareable if that is impossible or not safe."""
    assert not (private and writable)
    if not available():
        raise NotShareable(f"{sys.platform} has no shared memory without a name")
    what = f"the memory of process {ticket.pid}"
    path = f"/proc/{ticket.pid}/fd/{ticket.fd}"
    try:
        # checked before it is opened, since opening another kind of file may have effects
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise NotShareable(f"{what} is not there; is it in another container?")
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotShareable(f"{what} cannot be opened: {error.strerror}") from error
    try:
        return _checked(fd, ticket, what, private=private, writable=writable)
    finally:
        os.close(fd)


def _checked(fd: int, ticket: ShmHandle, what: str, *, private: bool, writable: bool) -> AttachedMemory:
    size = HEAD_BYTES + ticket.nbytes
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise NotShareable(f"{what} belongs to user {found.st_uid}; this process is user {os.geteuid()}")
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
        if not seals & _SEAL_SHRINK:
            raise NotShareable(f"{what} is not sealed against shrinking", why="pages could vanish while they are read")
        if found.st_size < size:
            raise NotShareable(f"{what} has {found.st_size} bytes; announced {size}")
        flags, protection = mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if private:
            flags, protection = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        mapped = HugePageMapping(fd, size, flags=flags, protection=protection)
    except (OSError, ValueError) as error:
        raise NotShareable(f"{what} cannot be mapped: {error}") from error
    if not secrets.compare_digest(mapped.bytes[:NONCE_BYTES].tobytes(), ticket.nonce):
        raise NotShareable(f"{what} is other memory than was announced; is it in another container?")
    return AttachedMemory(mapped, ticket.nbytes, private=private)
