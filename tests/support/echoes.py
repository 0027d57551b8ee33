"""Services that answer with what they were sent, for tests of networks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shardyard.domain import errors
from shardyard.transport.interfaces import Context, Network, Peer, Service, Stream, request_id
from shardyard.wire import methods
from shardyard.wire.frames import Frame
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server

DEADLINE_S = 10.0
TIMEOUT_MS = 10_000
# offsets at which the handler of PushPull does something else: ends the stream, waits, does not answer, answers often
END, HANG, SILENT, MORE = 99, 77, 55, 1_000
# offsets that a handler which offers to answer at once answers so, and at which that fails
QUICK, BAD = 500, 501


@dataclass
class Echo:
    """Services that say what they were told. `network` is where the coordinator's handler calls on."""

    network: Network
    failure: Exception | None = None
    closed: threading.Event = field(default_factory=threading.Event)
    hangs: threading.Event = field(default_factory=threading.Event)
    hang: threading.Event = field(default_factory=threading.Event)
    ids: list[str] = field(default_factory=list)
    address: str = ""
    read: int = 0
    ended: int = 0
    offers: bool = False
    asked_at_once: list[tuple[int, str, str]] = field(default_factory=list)

    def services(self) -> list[Service]:
        parameter_server = Service("ParameterServer")
        parameter_server.on(methods.PUSH, self.push)
        parameter_server.on(methods.PULL, self.pull)
        parameter_server.on(methods.PUSH_PULL, self.push_pull)
        parameter_server.on(methods.READ_LEDGER, self.note_id)
        yard = Service("Coordinator")
        yard.on(methods.STATUS, self.status)
        yard.on(methods.JOIN_JOB, self.join)
        return [parameter_server, yard]

    def status(self, _request: coordinator.StatusRequest, context: Context) -> coordinator.StatusReply:
        assert context.is_active()
        self.ids.append(request_id.get())
        peer = self.network.connect(self.address, name="server itself")
        try:
            peer.call(methods.READ_LEDGER, server.ReadLedgerRequest(), timeout_ms=TIMEOUT_MS)
        finally:
            peer.close()
        return coordinator.StatusReply(term=7)

    def note_id(self, _request: server.ReadLedgerRequest, _: Context) -> server.ReadLedgerReply:
        self.ids.append(request_id.get())
        return server.ReadLedgerReply()

    def join(self, request: coordinator.JoinJobRequest, _: Context) -> coordinator.JoinJobReply:
        if self.failure is not None:
            raise self.failure
        return coordinator.JoinJobReply(settings_json=request.name)

    def push(self, stream: Iterator[Frame], _: Context) -> server.PushReply:
        total = 0
        for frame in stream:
            total += len(frame.data)
            if frame.offset == 13:
                raise errors.SequenceGap("at 13", facts={"next": "12"})
        return server.PushReply(parts=[{"next": total}])

    def pull(self, request: server.PullRequest, _: Context) -> Iterator[Frame]:
        self.ids.append(request_id.get())
        try:
            for number in range(request.wait_ms):
                yield Frame(b"", number, bytes(request.server))
            if self.failure is not None:
                raise self.failure
        finally:
            self.closed.set()

    def answer_at_once(self, frame: Frame) -> Frame | None:
        self.asked_at_once.append((frame.offset, request_id.get(), threading.current_thread().name))
        if frame.offset == BAD:
            raise ValueError("a defect")
        if frame.offset == 13:
            raise errors.StaleToken("said elsewhere")
        return None if frame.offset != QUICK else Frame(b"", QUICK, bytes(frame.data))

    def push_pull(self, stream: Iterator[Frame], context: Context) -> Iterator[Frame | None]:
        self.ids.append(request_id.get())
        if self.offers:
            context.offer(self.answer_at_once)
        try:
            while True:
                yield None
                frame = next(stream, None)
                if frame is None:
                    return
                if frame.offset == 13:
                    raise errors.StaleToken("at 13", facts={"token": "3"})
                if frame.offset == END:
                    return
                if frame.offset == SILENT:
                    self.read += len(frame.data)
                    continue
                if frame.offset == HANG:
                    self.hangs.set()
                    self.hang.wait(DEADLINE_S)
                for more in range(frame.offset // MORE):
                    yield Frame(b"", more, b"more")
                yield Frame(bytes(frame.header), frame.offset + 1, bytes(frame.data)[::-1])
        finally:
            self.ended += 1
            self.closed.set()


@dataclass
class Stage:
    echo: Echo
    peer: Peer
    leave: Callable[[], None]


def frames_of(*offsets: int) -> Iterator[Frame]:
    return (Frame(b"", offset, b"ab") for offset in offsets)


def said(stream: Stream, *, timeout_ms: int = TIMEOUT_MS) -> tuple[int, bytes]:
    frame = stream.receive(timeout_ms=timeout_ms)
    return frame.offset, bytes(frame.data)


def ask(stream: Stream) -> Frame | None:
    stream.send(frames_of(1))
    found: Frame | None = stream.receive(timeout_ms=TIMEOUT_MS)
    return found
