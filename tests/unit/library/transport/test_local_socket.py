"""Local sockets: who may talk, what is refused, descriptors, and what is left when a process has ended in any way."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.domain import errors
from shardyard.domain.limits import FRAME_BYTES, MESSAGE_BYTES_MAX
from shardyard.transport import local_listener
from shardyard.transport import local_socket as module
from shardyard.transport.interfaces import Context, LocalAddress
from shardyard.transport.local_listener import LocalListener
from shardyard.transport.local_socket import DESCRIPTORS_MAX, PACKET_BYTES, Connection, LocalStream
from shardyard.wire import methods
from shardyard.wire.frames import Frame
from tests.support.waiting import wait_until

TIMEOUT_MS = 10_000
NOBODY = 65534


class Echo:
    """A handler that answers each frame with the same. Frames of offset 1 are answered with the descriptors that came,
    those of offset 2 wait."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.goes_on = threading.Event()
        self.active: list[bool] = []
        self.ended = threading.Event()

    def handle(self, stream: Iterator[Frame], context: Context) -> Iterator[Frame | None]:
        try:
            while True:
                yield None
                frame = next(stream, None)
                if frame is None:
                    return
                if frame.offset == 1:
                    assert context.descriptors is not None
                    found = []
                    while (fd := context.descriptors.take_descriptor()) is not None:
                        found.append(fd)
                    context.descriptors.pass_descriptors(found)
                if frame.offset == 2:
                    self.waits.set()
                    self.goes_on.wait(TIMEOUT_MS / 1000)
                    self.active.append(context.is_active())
                yield frame
        finally:
            self.ended.set()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def listener(echo: Echo) -> Iterator[LocalListener]:
    before = set(threading.enumerate())
    made = LocalListener(methods.PUSH_PULL, echo.handle, connections_max=4)
    made.start()
    yield made
    echo.goes_on.set()
    made.stop()
    assert set(threading.enumerate()) <= before


def to(address: str, timeout_ms: int = TIMEOUT_MS) -> LocalStream:
    return LocalStream(
        LocalAddress(address),
        methods.PUSH_PULL,
        peer="server 1",
        unavailable=errors.ServerUnavailable,
        timeout_ms=timeout_ms,
    )


def said(stream: LocalStream, frame: Frame, timeout_ms: int = TIMEOUT_MS) -> Frame:
    stream.send([frame])
    answer = stream.receive(timeout_ms=timeout_ms)
    assert isinstance(answer, Frame)
    return answer


def raw(address: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(TIMEOUT_MS / 1000)
    made.connect("\0" + address[1:])
    return made


# ---- messages


@pytest.mark.parametrize("nbytes", [0, 1, PACKET_BYTES - 20, PACKET_BYTES, PACKET_BYTES + 1, FRAME_BYTES])
def test_messages_of_any_length_pass(listener: LocalListener, nbytes: int) -> None:
    stream = to(listener.address)
    data = os.urandom(nbytes)
    for _ in range(2):
        answer = said(stream, Frame(b"header", 64, data))
        assert (answer.header, answer.offset, bytes(answer.data)) == (b"header", 64, data)
    stream.cancel()


def test_message_beyond_the_limit_ends_the_connection(listener: LocalListener, echo: Echo) -> None:
    with raw(listener.address) as peer:
        peer.send(b"mid")
        with contextlib.suppress(BrokenPipeError):
            for _ in range(MESSAGE_BYTES_MAX // PACKET_BYTES + 2):
                peer.send(b"p" + bytes(PACKET_BYTES))
        assert echo.ended.wait(10)


@pytest.mark.parametrize("packet", [b"x", b"e", b"dd", b"mgarbage", b"m" + bytes(PACKET_BYTES + 1)])
def test_packets_that_are_none_end_the_connection_and_no_other(
    listener: LocalListener, echo: Echo, packet: bytes
) -> None:
    stream = to(listener.address)
    with raw(listener.address) as peer:
        peer.send(b"mid")
        peer.send(packet)
        assert echo.ended.wait(10)
    assert said(stream, Frame(b"", 5, b"ab")).offset == 5
    stream.cancel()


def test_first_packet_that_does_not_come_ends_the_connection(
    listener: LocalListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_listener, "_HELLO_MS", 50)
    with raw(listener.address) as peer:
        assert peer.recv(10) == b""


def test_more_connections_than_allowed_are_refused(listener: LocalListener) -> None:
    streams = [to(listener.address) for _ in range(4)]
    for stream in streams:
        said(stream, Frame(b"", 5, b"ab"))
    one_more = to(listener.address)
    with pytest.raises(errors.ServerUnavailable):
        said(one_more, Frame(b"", 5, b"ab"))
    streams.pop().cancel()
    wait_until(lambda: len(listener._served) < 4, "the connection to end")
    streams.append(to(listener.address))
    said(streams[-1], Frame(b"", 5, b"ab"))
    for stream in streams:
        stream.cancel()


# ---- time and ends


def test_answer_that_is_late_is_a_deadline_and_the_handler_learns_of_it(listener: LocalListener, echo: Echo) -> None:
    stream = to(listener.address)
    stream.send([Frame(b"", 2, b"ab")])
    with pytest.raises(errors.DeadlineExceeded, match="server 1 did not answer"):
        stream.receive(timeout_ms=50)
    echo.goes_on.set()
    assert echo.ended.wait(10)
    assert echo.active == [False]


def test_request_that_is_not_taken_is_a_deadline(listener: LocalListener, echo: Echo) -> None:
    stream = to(listener.address, timeout_ms=50)
    stream.send([Frame(b"", 2, b"ab")])
    assert echo.waits.wait(10)
    frames = [Frame(b"", 5, bytes(FRAME_BYTES))] * 100
    with pytest.raises(errors.DeadlineExceeded):
        stream.send(frames)


def test_cancel_wakes_the_thread_that_waits(listener: LocalListener, echo: Echo) -> None:
    stream = to(listener.address)
    stream.send([Frame(b"", 2, b"ab")])
    assert echo.waits.wait(10)
    timer = threading.Timer(0.05, stream.cancel)
    timer.start()
    with pytest.raises(errors.ServerUnavailable):
        stream.receive(timeout_ms=TIMEOUT_MS)
    timer.join()
    assert stream._connection._socket.fileno() == -1


@pytest.fixture
def folder() -> Iterator[Path]:
    """A path of a socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="sy-", dir="/tmp") as made:
        yield Path(made)


def test_killed_peer_is_noticed_at_once(folder: Path) -> None:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from shardyard.transport.local_listener import LocalListener\n"
        "from shardyard.wire import methods\n"
        "made = LocalListener(methods.PUSH_PULL, lambda s, c: (time.sleep(60) for _ in s), connections_max=4,\n"
        "                     folder=Path(sys.argv[1]))\n"
        "made.start()\n"
        "print(made.address, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        address = process.stdout.readline().strip()
        stream = to(address)
        stream.send([Frame(b"", 5, b"ab")])
        timer = threading.Timer(0.1, process.kill)
        timer.start()
        begun = time.monotonic()
        with pytest.raises(errors.ServerUnavailable, match="server 1 does not answer"):
            stream.receive(timeout_ms=60_000)
        assert time.monotonic() - begun < 30
        timer.join()
    # its socket has a file; the next server deletes it
    assert [str(path) for path in folder.iterdir()] == [address]
    with pytest.raises(errors.NotShareable, match="Connection refused"):
        to(address)
    other = LocalListener(methods.PUSH_PULL, Echo().handle, connections_max=1, folder=folder)
    third = LocalListener(methods.PUSH_PULL, Echo().handle, connections_max=1, folder=folder)
    assert sorted(map(str, folder.iterdir())) == sorted([other.address, third.address])
    for each in (other, third):
        each.stop()
    assert not list(folder.iterdir())


# ---- who may talk


def test_nobody_there_is_not_shareable(tmp_path: Path) -> None:
    for address in ("@shardyard-nobody", str(tmp_path / "nothing.sock")):
        with pytest.raises(errors.NotShareable, match="is it in another container"):
            to(address)


def test_folder_that_cannot_be_used_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.NotShareable, match="no local socket at"):
        LocalListener(methods.PUSH_PULL, Echo().handle, connections_max=1, folder=tmp_path / "file" / "folder")
    with pytest.raises(errors.NotShareable, match="too long"):
        LocalListener(methods.PUSH_PULL, Echo().handle, connections_max=1, folder=tmp_path / ("x" * 100))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_not_served(listener: LocalListener) -> None:
    script = (
        "import os, socket, sys\n"
        "os.setuid(int(sys.argv[1]))\n"
        "made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "made.settimeout(10)\n"
        "made.connect('\\0' + sys.argv[2][1:])\n"
        "print(made.recv(10))\n"
    )
    given = [sys.executable, "-c", script, str(NOBODY), listener.address]
    assert subprocess.run(given, capture_output=True, text=True, check=True).stdout == "b''\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_server_of_another_user_is_not_talked_to() -> None:
    script = (
        "import os, socket, sys\n"
        "os.setuid(int(sys.argv[1]))\n"
        "made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "made.bind('\\0' + sys.argv[2][1:])\n"
        "made.listen()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    address = f"@shardyard-test-{os.getpid()}"
    given = [sys.executable, "-c", script, str(NOBODY), address]
    with subprocess.Popen(given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(errors.NotShareable, match=f"runs as user {NOBODY}; this process is user 0"):
            to(address)
        process.communicate()


def test_system_without_local_sockets_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (module, local_listener):
        monkeypatch.setattr(each, "available", lambda: False)
    with pytest.raises(errors.NotShareable, match="no local sockets"):
        to("@anything")
    with pytest.raises(errors.NotShareable, match="no local sockets"):
        LocalListener(methods.PUSH_PULL, Echo().handle, connections_max=1)


# ---- descriptors


def opened() -> list[str]:
    """What this process has open, except the folder that is read for it."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(found)


def test_descriptors_travel_in_order_and_are_closed_here(listener: LocalListener) -> None:
    stream = to(listener.address)
    said(stream, Frame(b"", 5, b""))
    before = opened()
    for count in (1, 3, DESCRIPTORS_MAX):
        made = [os.memfd_create(f"number-{number}") for number in range(count)]
        for number, fd in enumerate(made):
            os.write(fd, f"{number}".encode())
        stream.descriptors.pass_descriptors(made)
        said(stream, Frame(b"", 1, b"ab"))
        for number in range(count):
            found = stream.descriptors.take_descriptor()
            assert found is not None
            assert os.pread(found, 10, 0) == f"{number}".encode()
            os.close(found)
        assert stream.descriptors.take_descriptor() is None
    assert opened() == before
    stream.cancel()


def test_descriptors_that_nobody_takes_are_closed_with_the_connection(listener: LocalListener, echo: Echo) -> None:
    before = opened()
    stream = to(listener.address)
    stream.descriptors.pass_descriptors([os.memfd_create("untaken") for _ in range(3)])
    said(stream, Frame(b"", 5, b""))
    stream.descriptors.pass_descriptors([os.memfd_create("unsent")])
    stream.cancel()
    assert echo.ended.wait(10)
    wait_until(lambda: opened() == before, "all descriptors to be closed")


def test_more_descriptors_than_may_wait_end_the_connection(listener: LocalListener, echo: Echo) -> None:
    before = opened()
    stream = to(listener.address)
    stream.descriptors.pass_descriptors([os.memfd_create("many") for _ in range(DESCRIPTORS_MAX + 1)])
    with pytest.raises(errors.ShardyardError):
        said(stream, Frame(b"", 5, b""))
    stream.cancel()
    assert echo.ended.wait(10)
    wait_until(lambda: opened() == before, "all descriptors to be closed")


def test_connection_that_is_cancelled_is_not_alive() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one, other = Connection(here), Connection(there)
    assert one.is_alive()
    other.cancel()
    assert not one.is_alive()
    assert not other.is_alive()
    one.cancel()
    assert not one.is_alive()
