"""Handlers that pause: who carries them on, and when they go on at the latest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from shardyard.domain import errors
from shardyard.transport.in_process import InProcessNetwork
from shardyard.transport.interfaces import Context, LocalAddress, Pause, Service
from shardyard.transport.local_listener import LocalListener
from shardyard.transport.local_socket import LocalStream
from shardyard.wire import methods
from shardyard.wire.frames import Frame
from tests.support.waiting import wait_until

TIMEOUT_MS = 10_000
SOON_S, NEVER_S = 0.1, 60.0
PAUSES, OPENS, FAILS = 1, 2, 3
"""Offsets of frames: the handler pauses before it answers; it opens the gate; it fails after a pause."""


class Gate:
    """Is open or not. `pauses`: how often handlers have paused before it."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.awaited: dict[object, Callable[[], None]] = {}
        self.pauses = 0
        self.lasts_s = NEVER_S
        self.answered_by: list[int] = []

    def open(self) -> None:
        self.opened.set()
        for call in list(self.awaited.values()):
            call()


class AtGate(Pause):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.until = time.monotonic() + gate.lasts_s

    @property
    def is_over(self) -> bool:
        return self._gate.opened.is_set() or time.monotonic() >= self.until

    def begin(self, go_on: Callable[[], None]) -> bool:
        if self._gate.opened.is_set():
            return False
        self._gate.awaited[self] = go_on
        self._gate.pauses += 1
        return True

    def end(self) -> None:
        self._gate.awaited.pop(self, None)

    def wait(self) -> None:
        self._gate.opened.wait(self.until - time.monotonic())


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def address(gate: Gate) -> Iterator[str]:
    before = set(threading.enumerate())
    listener = LocalListener(methods.PUSH_PULL, handler_at(gate), connections_max=8)
    listener.start()
    yield listener.address
    listener.stop()
    assert set(threading.enumerate()) <= before
    assert gate.awaited == {}


def handler_at(gate: Gate) -> Callable[[Iterator[Frame], Context], Iterator[Frame | Pause | None]]:
    def handle(stream: Iterator[Frame], _: Context) -> Iterator[Frame | Pause | None]:
        while True:
            yield None
            frame = next(stream, None)
            if frame is None:
                return
            if frame.offset == OPENS:
                gate.open()
            if frame.offset in (PAUSES, FAILS):
                pause = AtGate(gate)
                while not pause.is_over:
                    yield pause
                gate.answered_by.append(threading.get_ident())
            if frame.offset == FAILS:
                raise errors.NotFound("nothing behind the gate")
            yield frame

    return handle


def to(address: str) -> LocalStream:
    return LocalStream(
        LocalAddress(address),
        methods.PUSH_PULL,
        peer="server 1",
        unavailable=errors.ServerUnavailable,
        timeout_ms=TIMEOUT_MS,
    )


def send(stream: LocalStream, offset: int) -> None:
    stream.send([Frame(b"", offset, b"x")])


def test_handler_is_carried_on_by_the_thread_that_ends_its_pause(gate: Gate, address: str) -> None:
    streams = [to(address) for _ in range(3)]
    for stream in streams:
        send(stream, PAUSES)
    wait_until(lambda: gate.pauses == 3)
    last = to(address)
    send(last, OPENS)
    assert [stream.receive(timeout_ms=TIMEOUT_MS).offset for stream in streams] == [PAUSES] * 3
    assert last.receive(timeout_ms=TIMEOUT_MS).offset == OPENS
    assert len(set(gate.answered_by)) == 1, "one thread has answered all"
    for stream in streams:  # their own threads receive the next
        send(stream, PAUSES)
        assert stream.receive(timeout_ms=TIMEOUT_MS).offset == PAUSES
    assert len(set(gate.answered_by)) == 4
    for stream in (*streams, last):
        stream.cancel()


def test_handler_goes_on_in_its_own_thread_when_its_time_is_over(gate: Gate, address: str) -> None:
    gate.lasts_s = SOON_S
    stream = to(address)
    for number in range(1, 4):
        send(stream, PAUSES)
        assert stream.receive(timeout_ms=TIMEOUT_MS).offset == PAUSES
        assert (gate.pauses, gate.awaited) == (number, {})
    gate.open()
    send(stream, PAUSES)
    assert stream.receive(timeout_ms=TIMEOUT_MS).offset == PAUSES
    assert gate.pauses == 3, "nothing was waited for"
    stream.cancel()


def test_woken_too_early_it_pauses_again(gate: Gate, address: str) -> None:
    stream = to(address)
    send(stream, PAUSES)
    wait_until(lambda: gate.pauses == 1)
    for number in (2, 3):
        for call in list(gate.awaited.values()):
            call()
        assert gate.pauses == number
    assert gate.answered_by == []
    gate.open()
    assert stream.receive(timeout_ms=TIMEOUT_MS).offset == PAUSES
    stream.cancel()


def test_error_after_a_pause_reaches_its_caller_and_no_other(gate: Gate, address: str) -> None:
    failing, last = to(address), to(address)
    send(failing, FAILS)
    wait_until(lambda: gate.pauses == 1)
    send(last, OPENS)
    assert last.receive(timeout_ms=TIMEOUT_MS).offset == OPENS
    with pytest.raises(errors.NotFound, match="nothing behind the gate"):
        failing.receive(timeout_ms=TIMEOUT_MS)
    last.cancel()


def test_caller_that_is_gone_ends_the_pause(gate: Gate, address: str) -> None:
    """Its thread notices it, and the thread that opens the gate answers nobody."""
    gone, impatient, last = to(address), to(address), to(address)
    send(gone, PAUSES)
    send(impatient, PAUSES)
    wait_until(lambda: gate.pauses == 2)
    gone.cancel()
    wait_until(lambda: len(gate.awaited) == 1)
    send(impatient, PAUSES)  # a second request before the answer
    wait_until(lambda: gate.awaited == {})
    with pytest.raises(errors.ServerUnavailable):
        impatient.receive(timeout_ms=TIMEOUT_MS)
    send(last, OPENS)
    assert last.receive(timeout_ms=TIMEOUT_MS).offset == OPENS
    assert gate.answered_by == []
    last.cancel()


def test_pauses_of_hundreds_of_steps_lose_no_answer(gate: Gate, address: str) -> None:
    """Two callers by turns: the one waits at the gate, which the other opens, closes and opens again."""
    waiting, opening = to(address), to(address)
    for _ in range(300):
        gate.opened.clear()
        send(waiting, PAUSES)
        send(opening, OPENS)
        assert waiting.receive(timeout_ms=TIMEOUT_MS).offset == PAUSES
        assert opening.receive(timeout_ms=TIMEOUT_MS).offset == OPENS
    waiting.cancel()
    opening.cancel()


def test_network_without_pauses_waits_in_the_thread(gate: Gate) -> None:
    network, service = InProcessNetwork(), Service("ParameterServer")
    service.on(methods.PUSH_PULL, handler_at(gate))
    network.listen("here:1", [service])
    gate.lasts_s = SOON_S
    stream = network.connect("here:1", name="server").open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)
    begun = time.monotonic()
    stream.send([Frame(b"", PAUSES, b"x")])
    assert stream.receive(timeout_ms=TIMEOUT_MS).offset == PAUSES
    assert time.monotonic() - begun >= SOON_S
    assert gate.pauses == 0
    stream.cancel()
