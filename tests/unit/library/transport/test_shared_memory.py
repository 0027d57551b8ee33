"""Memory shared by processes of one machine: what is shown, what is refused before it could do harm, private copies."""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from shardyard.domain.errors import NotShareable, TooLarge
from shardyard.domain.limits import SHARED_BYTES_MAX
from shardyard.domain.pulls import ShmHandle
from shardyard.transport import shared_memory as shm
from shardyard.transport.in_process import InProcessDescriptors
from shardyard.transport.shared_memory import AttachedMemory, SharedMemory, attach, attach_received

PAGE = mmap.PAGESIZE
F_ADD_SEALS, SEAL_SHRINK = 1033, 0x2
NOBODY = 65534

# Exports memory of 3 pages whose bytes are 7, and says what is needed to open it; fills it with each number on stdin.
EXPORTER = """
import os, socket, sys
from shardyard.transport.shared_memory import SharedMemory
if sys.argv[2:]:
    os.seteuid(int(sys.argv[2]))
memory = SharedMemory(3 * 4096, read_only=True)
memory.bytes[:] = 7
ticket = memory.ticket(5)
with socket.socket(fileno=int(sys.argv[1])) as given:
    socket.send_fds(given, [f"{ticket.nbytes} {ticket.region}".encode()], [ticket.fd])
for line in sys.stdin:
    memory.bytes[:] = int(line)
    print("filled", flush=True)
"""


class Exporter:
    def __init__(self, *arguments: str) -> None:
        here, there = socket.socketpair()
        with here, there:
            self.process = subprocess.Popen(
                [sys.executable, "-c", EXPORTER, str(there.fileno()), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=(there.fileno(),),
            )
            here.settimeout(60)
            said, (fd,), _, _ = socket.recv_fds(here, 100, 1)
        nbytes, region = said.split()
        self.ticket = ShmHandle(int(nbytes), int(region), fd)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def fill(self, number: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        assert self._line() == "filled\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def close(self) -> None:
        self.kill()
        os.close(self.ticket.fd)


@contextmanager
def exporting(*arguments: str) -> Iterator[Exporter]:
    exporter = Exporter(*arguments)
    try:
        yield exporter
    finally:
        exporter.close()


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    memory = SharedMemory(4 * PAGE, read_only=True)
    yield memory
    memory.close()


# ---- what is shown


def test_what_another_process_exports_is_read_as_it_is_written() -> None:
    with exporting() as exporter:
        attached = attach(exporter.ticket)
        assert exporter.ticket.region == 5
        assert attached.bytes.shape == (3 * PAGE,)
        assert set(attached.bytes) == {7}
        exporter.fill(9)
        assert set(attached.bytes) == {9}


def test_memory_outlives_a_killed_exporter_and_leaves_nothing_behind(
    shared_memory: Callable[[], frozenset[str]],
) -> None:
    before = shared_memory()
    with exporting() as exporter:
        attached = attach(exporter.ticket)
        exporter.kill()
        assert set(attached.bytes) == {7}
    assert set(attached.bytes) == {7}
    assert shared_memory() == before


def test_exported_memory_begins_at_a_page_and_is_zero(shared: SharedMemory) -> None:
    assert shared.bytes.ctypes.data % PAGE == 0
    assert shared.bytes.dtype == np.uint8
    assert shared.bytes.tobytes() == bytes(4 * PAGE)
    assert SharedMemory(0, read_only=True).bytes.size == 0


def test_closed_memory_cannot_be_attached_but_is_read_by_who_has_it(shared: SharedMemory) -> None:
    shared.bytes[:] = 3
    attached = attach(shared.ticket())
    shared.close()
    shared.close()
    shared.bytes[0] = 4
    assert attached.bytes[:2].tolist() == [4, 3]
    with pytest.raises(NotShareable, match="not shared any more"):
        shared.descriptor()
    with pytest.raises(NotShareable, match="cannot be mapped"):
        attach(shared.ticket())


# ---- seals


def reopened(memory: SharedMemory, flags: int) -> int:
    return os.open(f"/proc/self/fd/{memory.ticket().fd}", flags)


def test_exported_memory_can_be_neither_shrunk_nor_grown_nor_unsealed(shared: SharedMemory) -> None:
    fd = reopened(shared, os.O_RDWR)
    try:
        for nbytes in (0, PAGE, 5 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, nbytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SHRINK)
    finally:
        os.close(fd)


def test_nobody_else_can_write_to_memory_that_is_read_only(shared: SharedMemory) -> None:
    fd = reopened(shared, os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
    finally:
        os.close(fd)
    shared.bytes[0] = 1  # the owner can
    assert attach(shared.ticket()).bytes[0] == 1


def test_attached_memory_cannot_be_written(shared: SharedMemory) -> None:
    attached = attach(shared.ticket())
    with pytest.raises(ValueError, match="read-only"):
        attached.bytes[0] = 1
    assert not attached.private


# ---- what is refused


@contextmanager
def memfd(nbytes: int, *, seals: int = SEAL_SHRINK) -> Iterator[ShmHandle]:
    """Memory made by somebody who does as they like, and the ticket that they give."""
    fd = os.memfd_create("somebody-elses", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        if seals:
            fcntl.fcntl(fd, F_ADD_SEALS, seals)
        yield ShmHandle(nbytes, fd=fd)
    finally:
        os.close(fd)


def test_memory_is_taken_from_any_exporter_that_keeps_the_rules() -> None:
    with memfd(PAGE) as ticket:
        assert attach(ticket).bytes.size == PAGE


def test_memory_that_is_not_sealed_against_shrinking_is_refused() -> None:
    for seals in (0, 0x4, 0x8, 0x4 | 0x8):
        with memfd(PAGE, seals=seals) as ticket, pytest.raises(NotShareable, match="not sealed against shrinking"):
            attach(ticket)


@pytest.mark.parametrize("beyond", [1, PAGE, 1 << 40])
def test_memory_that_is_smaller_than_announced_is_refused(beyond: int) -> None:
    with memfd(PAGE) as ticket, pytest.raises(NotShareable, match=rf"{PAGE} bytes; announced"):
        attach(dataclasses.replace(ticket, nbytes=PAGE + beyond))


def test_neither_a_refusal_nor_an_attachment_that_is_gone_keeps_a_descriptor(shared: SharedMemory) -> None:
    gc.collect()  # what other tests have left
    before = os.listdir("/proc/self/fd")
    for changes in ({"nbytes": 5 * PAGE}, {"fd": 1 << 20}):
        with pytest.raises(NotShareable):
            attach(dataclasses.replace(shared.ticket(), **changes))
        here, there = InProcessDescriptors.pair()
        there.pass_descriptors([shared.descriptor()])
        with pytest.raises(NotShareable):
            attach_received(dataclasses.replace(shared.ticket(), nbytes=5 * PAGE), here)
    with memfd(PAGE, seals=0) as ticket, pytest.raises(NotShareable):
        attach(ticket)
    assert attach(shared.ticket()).bytes.size == attach(shared.ticket(), private=True).bytes.size
    for _ in range(3):
        SharedMemory(PAGE, read_only=True).close()
    gc.collect()
    assert os.listdir("/proc/self/fd") == before


def test_memory_larger_than_announced_is_read_as_far_as_announced() -> None:
    with memfd(2 * PAGE) as ticket:
        assert attach(dataclasses.replace(ticket, nbytes=100)).bytes.size == 100


def fifo(folder: Path) -> int:
    os.mkfifo(folder / "fifo")
    return os.open(folder / "fifo", os.O_RDWR)


def ordinary(folder: Path) -> int:
    fd = os.open(folder / "memfd:shardyard", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, PAGE)
    return fd


@pytest.mark.parametrize("make", [fifo, ordinary, lambda _: os.open("/dev/zero", os.O_RDWR)])
def test_another_kind_of_file_is_refused(make: Callable[[Path], int], tmp_path: Path) -> None:
    fd = make(tmp_path)
    try:
        with pytest.raises(NotShareable, match=r"belongs to user|not sealed"):
            attach(ShmHandle(0, fd=fd))
    finally:
        os.close(fd)


def test_descriptor_that_does_not_exist_or_has_not_come_is_refused(shared: SharedMemory) -> None:
    for fd in (1 << 20, -1):
        with pytest.raises(NotShareable, match="cannot be mapped"):
            attach(dataclasses.replace(shared.ticket(), fd=fd))
    for descriptors in (None, InProcessDescriptors.pair()[0]):
        with pytest.raises(NotShareable, match="its descriptor did not come with it"):
            attach_received(shared.ticket(), descriptors)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_memory_of_another_user_is_refused() -> None:
    with exporting(str(NOBODY)) as exporter:
        with pytest.raises(NotShareable, match=f"belongs to user {NOBODY}; this process is user 0"):
            attach(exporter.ticket)


def test_system_without_such_memory_is_told_in_words(shared: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "available", lambda: False)
    with pytest.raises(NotShareable, match="has no shared memory"):
        SharedMemory(PAGE, read_only=True)
    with pytest.raises(NotShareable, match="has no shared memory"):
        attach(shared.ticket())


def test_container_that_forbids_memfds_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    with pytest.raises(NotShareable, match="Operation not permitted"):
        SharedMemory(PAGE, read_only=True)


def test_more_memory_than_can_be_shared_is_too_large() -> None:
    with pytest.raises(TooLarge):
        SharedMemory(SHARED_BYTES_MAX + 1, read_only=True)


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "ENOMEM"), OSError(14, "EFAULT")])
def test_pages_that_are_not_there_are_too_large_instead_of_a_signal(error: Exception) -> None:
    class Full:
        def madvise(self, *_: int) -> None:
            raise error

    with pytest.raises(TooLarge, match="100 bytes of shared memory, which this machine does not have"):
        shm.populate(Full(), 0, 100)  # type: ignore[arg-type]


def test_kernel_that_cannot_populate_does_without(shared: SharedMemory) -> None:
    class Old:
        def madvise(self, *_: int) -> None:
            raise OSError(22, "EINVAL")

    shm.populate(Old(), 0, 100)  # type: ignore[arg-type]
    shared.populate(PAGE - 1, 2 * PAGE)
    assert shared.bytes.tobytes() == bytes(4 * PAGE)


# ---- private copies


@pytest.fixture
def private(shared: SharedMemory) -> AttachedMemory:
    shared.bytes[:] = 1
    return attach(shared.ticket(), private=True)


def test_a_write_to_a_private_attachment_is_seen_by_nobody_else(shared: SharedMemory, private: AttachedMemory) -> None:
    private.bytes[PAGE] = 9
    assert private.bytes[PAGE] == 9
    assert set(shared.bytes) == {1}
    assert set(attach(shared.ticket()).bytes) == {1}


def test_pages_that_were_not_written_follow_the_exporter(shared: SharedMemory, private: AttachedMemory) -> None:
    private.bytes[PAGE] = 9
    shared.bytes[:] = 2
    assert set(private.bytes[:PAGE]) == set(private.bytes[2 * PAGE :]) == {2}
    assert private.bytes[PAGE] == 9
    assert set(private.bytes[PAGE + 1 : 2 * PAGE]) == {1}  # the copy is of the whole page


def test_refresh_drops_the_copies_of_a_range_and_says_whether_there_were_any(
    shared: SharedMemory, private: AttachedMemory
) -> None:
    assert private.refresh(0, 4 * PAGE) is False
    private.bytes[PAGE] = 9
    private.bytes[3 * PAGE] = 9
    assert private.refresh(0, PAGE) is False
    assert private.refresh(PAGE, 10) is True
    assert set(private.bytes[: 3 * PAGE]) == {1}
    assert private.bytes[3 * PAGE] == 9
    shared.bytes[:] = 2
    assert set(private.bytes[PAGE : 2 * PAGE]) == {2}
    assert private.refresh(PAGE, 2 * PAGE) is False
    assert private.refresh(3 * PAGE, PAGE) is True
    assert set(private.bytes) == {2}


def test_reading_makes_no_copy(shared: SharedMemory, private: AttachedMemory) -> None:
    assert private.bytes.sum() == 4 * PAGE
    assert private.refresh(0, 4 * PAGE) is False
    shared.bytes[:] = 2
    assert private.bytes.sum() == 8 * PAGE
    assert private.refresh(0, 4 * PAGE) is False


def test_tensors_on_a_private_attachment_are_seen_when_they_are_written(private: AttachedMemory) -> None:
    view = private.bytes[2 * PAGE : 3 * PAGE].view(np.float32)
    view += 1.0
    assert private.refresh(0, 2 * PAGE) is False
    assert private.refresh(2 * PAGE, PAGE) is True
    assert set(private.bytes) == {1}


def test_where_nobody_may_know_of_copies_they_are_dropped(
    shared: SharedMemory, private: AttachedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    private.bytes[0] = 9

    def forbidden(*_: object, **__: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shm, "open", forbidden, raising=False)
    assert private.refresh(0, PAGE) is True
    assert set(private.bytes) == {1}


def test_what_pagemap_does_not_tell_counts_as_copied(private: AttachedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    private.bytes[0] = 9
    with tempfile.TemporaryFile(buffering=0) as empty:

        @contextmanager
        def opened(*_: object, **__: object) -> Iterator[object]:
            yield empty

        monkeypatch.setattr(shm, "open", opened, raising=False)
        assert private.refresh(0, PAGE) is True
    assert set(private.bytes) == {1}
