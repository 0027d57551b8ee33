"""Memory shared by processes of one machine: what is shown, what is refused before it could do harm, private copies."""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import mmap
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from shardyard.domain.errors import NotShareable, TooLarge
from shardyard.domain.limits import NONCE_BYTES, SHARED_BYTES_MAX
from shardyard.domain.pulls import ShmHandle
from shardyard.transport import shared_memory as shm
from shardyard.transport.shared_memory import HEAD_BYTES, AttachedMemory, SharedMemory, attach

PAGE = mmap.PAGESIZE
F_ADD_SEALS, SEAL_SHRINK = 1033, 0x2
NOBODY = 65534

# Exports memory of 3 pages whose bytes are 7, and says what is needed to open it; fills it with each number on stdin.
EXPORTER = """
import os, sys
from shardyard.transport.shared_memory import SharedMemory
if sys.argv[1:]:
    os.seteuid(int(sys.argv[1]))
memory = SharedMemory(3 * 4096, read_only=True)
memory.bytes[:] = 7
ticket = memory.ticket(5)
print(ticket.pid, ticket.fd, ticket.nbytes, ticket.nonce.hex(), ticket.region, flush=True)
for line in sys.stdin:
    memory.bytes[:] = int(line)
    print("filled", flush=True)
"""


class Exporter:
    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", EXPORTER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        pid, fd, nbytes, nonce, region = self._line().split()
        self.ticket = ShmHandle(int(pid), int(fd), int(nbytes), bytes.fromhex(nonce), int(region))

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


@contextmanager
def exporting(*arguments: str) -> Iterator[Exporter]:
    exporter = Exporter(*arguments)
    try:
        yield exporter
    finally:
        exporter.kill()


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
        with pytest.raises(NotShareable):
            attach(exporter.ticket)
    assert shared_memory() == before


def test_exported_memory_begins_at_a_page_and_is_zero(shared: SharedMemory) -> None:
    assert shared.bytes.ctypes.data % PAGE == 0
    assert shared.bytes.dtype == np.uint8
    assert shared.bytes.tobytes() == bytes(4 * PAGE)
    assert SharedMemory(0, read_only=True).bytes.size == 0


def test_each_memory_has_a_nonce_of_its_own(shared: SharedMemory) -> None:
    other = SharedMemory(PAGE, read_only=True)
    assert len(shared.ticket().nonce) == len(other.ticket().nonce) == NONCE_BYTES
    assert shared.ticket().nonce != other.ticket().nonce
    other.close()


def test_closed_memory_cannot_be_attached_but_is_read_by_who_has_it(shared: SharedMemory) -> None:
    shared.bytes[:] = 3
    attached, ticket = attach(shared.ticket()), shared.ticket()
    shared.close()
    shared.close()
    shared.bytes[0] = 4
    assert attached.bytes[:2].tolist() == [4, 3]
    with pytest.raises(NotShareable, match="cannot be opened"):
        attach(ticket)


# ---- seals


def reopened(memory: SharedMemory, flags: int) -> int:
    return os.open(f"/proc/self/fd/{memory.ticket().fd}", flags)


def test_exported_memory_can_be_neither_shrunk_nor_grown_nor_unsealed(shared: SharedMemory) -> None:
    fd = reopened(shared, os.O_RDWR)
    try:
        for nbytes in (0, HEAD_BYTES, HEAD_BYTES + 5 * PAGE):
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
            mmap.mmap(fd, HEAD_BYTES + PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", HEAD_BYTES)
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
def memfd(nbytes: int, *, name: str = "shardyard", seals: int = SEAL_SHRINK, nonce: bytes = b"") -> Iterator[ShmHandle]:
    """Memory made by somebody who does as they like, and the ticket that they give."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, HEAD_BYTES + nbytes)
        nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        os.pwrite(fd, nonce, 0)
        if seals:
            fcntl.fcntl(fd, F_ADD_SEALS, seals)
        yield ShmHandle(os.getpid(), fd, nbytes, nonce)
    finally:
        os.close(fd)


def test_memory_is_taken_from_any_exporter_that_keeps_the_rules() -> None:
    with memfd(PAGE) as ticket:
        assert attach(ticket).bytes.size == PAGE


def test_memory_that_is_not_sealed_against_shrinking_is_refused() -> None:
    for seals in (0, 0x4, 0x8, 0x4 | 0x8):
        with memfd(PAGE, seals=seals) as ticket, pytest.raises(NotShareable, match="not sealed against shrinking"):
            attach(ticket)


def test_memory_with_another_nonce_is_refused() -> None:
    with memfd(PAGE) as ticket:
        for nonce in (bytes(NONCE_BYTES), ticket.nonce[::-1], ticket.nonce[:-1], ticket.nonce + b"x", b""):
            with pytest.raises(NotShareable, match="other memory than was announced"):
                attach(dataclasses.replace(ticket, nonce=nonce))


@pytest.mark.parametrize("beyond", [1, PAGE, 1 << 40])
def test_memory_that_is_smaller_than_announced_is_refused(beyond: int) -> None:
    with memfd(PAGE) as ticket, pytest.raises(NotShareable, match=rf"{HEAD_BYTES + PAGE} bytes; announced"):
        attach(dataclasses.replace(ticket, nbytes=PAGE + beyond))


def test_neither_a_refusal_nor_an_attachment_that_is_gone_keeps_a_descriptor(shared: SharedMemory) -> None:
    gc.collect()  # what other tests have left
    before = os.listdir("/proc/self/fd")
    for changes in ({"nonce": bytes(NONCE_BYTES)}, {"nbytes": 5 * PAGE}, {"fd": 1 << 20}):
        with pytest.raises(NotShareable):
            attach(dataclasses.replace(shared.ticket(), **changes))
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
    os.ftruncate(fd, HEAD_BYTES + PAGE)
    return fd


def others_memory(_: Path) -> int:
    return os.memfd_create("somebody-elses", os.MFD_ALLOW_SEALING)


@pytest.mark.parametrize("make", [fifo, ordinary, others_memory, lambda _: os.open("/dev/zero", os.O_RDWR)])
def test_another_kind_of_file_is_not_even_opened(
    make: Callable[[Path], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = make(tmp_path)
    try:
        monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it was opened"))
        with pytest.raises(NotShareable, match="is not there"):
            attach(ShmHandle(os.getpid(), fd, 0, bytes(NONCE_BYTES)))
    finally:
        os.close(fd)


def test_process_or_descriptor_that_does_not_exist_is_refused(shared: SharedMemory) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for changes in ({"pid": gone.pid}, {"pid": (1 << 32) - 1}, {"fd": 1 << 20}, {"pid": 0}):
        with pytest.raises(NotShareable, match="cannot be opened"):
            attach(dataclasses.replace(shared.ticket(), **changes))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_memory_of_another_user_is_refused() -> None:
    with exporting(str(NOBODY)) as exporter:
        with pytest.raises(NotShareable, match=f"belongs to user {NOBODY}; this process is user 0"):
            attach(exporter.ticket)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_cannot_open_ours(shared: SharedMemory) -> None:
    ticket = shared.ticket()
    asked = (
        "import os, sys\n"
        "from shardyard.domain.errors import NotShareable\n"
        "from shardyard.domain.pulls import ShmHandle\n"
        "from shardyard.transport.shared_memory import attach\n"
        "os.setuid(int(sys.argv[1]))\n"
        "try:\n"
        "    attach(ShmHandle(int(sys.argv[2]), int(sys.argv[3]), 1, bytes.fromhex(sys.argv[4])))\n"
        "except NotShareable as error:\n"
        "    print('refused', error.what)\n"
    )
    given = [str(NOBODY), str(ticket.pid), str(ticket.fd), ticket.nonce.hex()]
    done = subprocess.run([sys.executable, "-c", asked, *given], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("refused")


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
