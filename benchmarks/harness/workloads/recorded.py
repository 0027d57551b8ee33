"""Exchanges of a real worker, recorded, and sent again by many clients under names of their own.

Owns: the recording, and the clients' loop: one thread of asyncio with a gRPC channel for each client, so a few
processes make the load of hundreds of workers. Must not know: what is in a gradient.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc

from shardyard.domain import errors
from shardyard.domain.ids import Caller, Incarnation, JobId, Term, Token
from shardyard.domain.limits import PROTOCOL
from shardyard.domain.push_names import PushName, SourceKey, WorkerSource
from shardyard.transport.grpc_client import OPTIONS
from shardyard.transport.interfaces import Descriptors, LocalAddress, Network, Peer, Stream
from shardyard.wire import common_messages, frames, methods, push_messages
from shardyard.wire.frames import Frame
from shardyard.wire.headers import HeaderWriter
from shardyard.wire.method import Method
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server

CALL_MS = 30_000


class NoValues(Exception):
    """A server has answered a push without the values after it."""


class Recorder:
    """A network that keeps the first exchange with a push, and the address of its server."""

    job_pass = b""

    def __init__(self, inner: Network) -> None:
        self._inner = inner
        self.exchange: Frame | None = None
        self.address = ""

    def connect(
        self, address: str, *, name: str, unavailable: type[errors.Unavailable] = errors.ServerUnavailable
    ) -> Peer:
        return _RecordedPeer(self, self._inner.connect(address, name=name, unavailable=unavailable), address)

    def note(self, address: str, frame: Frame) -> None:
        header = server.PushHeader.FromString(frame.header)
        if self.exchange is None and header.HasField("pull") and header.parts:
            self.exchange, self.address = Frame(frame.header, 0, bytes(frame.data)), address


class _RecordedPeer:
    def __init__(self, recorder: Recorder, inner: Peer, address: str) -> None:
        self._recorder, self._inner, self._address = recorder, inner, address
        self.name, self.close, self.credentials = inner.name, inner.close, inner.credentials
        self.call, self.send, self.receive = inner.call, inner.send, inner.receive

    def open(self, method: Method[Any, Any], *, timeout_ms: int, socket: LocalAddress | None = None) -> Stream:
        return _RecordedStream(self, self._inner.open(method, timeout_ms=timeout_ms, socket=socket))

    def note(self, frame: Frame) -> None:
        self._recorder.note(self._address, frame)


class _RecordedStream:
    def __init__(self, peer: _RecordedPeer, inner: Stream) -> None:
        self._peer, self._inner = peer, inner
        self.receive, self.cancel = inner.receive, inner.cancel

    @property
    def descriptors(self) -> Descriptors | None:
        return self._inner.descriptors

    def send(self, requests: Iterable[Any], *, answered: bool = True) -> None:
        self._inner.send(self._noted(requests), answered=answered)

    def _noted(self, requests: Iterable[Frame]) -> Iterator[Frame]:
        for frame in requests:
            self._peer.note(frame)
            yield frame


class Client:
    """A worker of a job, without a model: it registers, joins, and sends the recorded exchange again and again."""

    def __init__(self, coordinator_: Peer, job: str, recorded: Frame, settings_json: str) -> None:
        request = coordinator.RegisterRequest(role=coordinator.ROLE_WORKER, protocol=PROTOCOL)
        registered = coordinator_.call(methods.REGISTER, request, timeout_ms=CALL_MS)
        self.heartbeat_s = registered.heartbeat_ms / 1_000
        incarnation = Incarnation(registered.incarnation)
        joins = coordinator.JoinJobRequest(name=job, settings_json=settings_json)
        joins.caller.incarnation, joins.caller.term = incarnation, registered.term
        joined = coordinator_.call(methods.JOIN_JOB, joins, timeout_ms=CALL_MS)
        self._caller = Caller(JobId(joined.job), incarnation, Term(registered.term))
        self._coordinator = coordinator_
        header = push_messages.push_from_wire(server.PushHeader.FromString(recorded.header))
        assert header.pull is not None
        pull = replace(header.pull, caller=self._caller)
        self._header = replace(header, caller=self._caller, pull=pull)
        self._key = SourceKey(WorkerSource(incarnation))
        self._data = recorded.data
        self._headers = HeaderWriter()
        self._stream: Any = None
        self.pushes = 0

    def beat(self) -> None:
        request = coordinator.HeartbeatRequest(caller=common_messages.caller_to_wire(self._caller), pushed=self.pushes)
        self._coordinator.call(methods.HEARTBEAT, request, timeout_ms=CALL_MS)

    def leave(self) -> None:
        request = coordinator.LeaveRequest(caller=common_messages.caller_to_wire(self._caller), pushed=self.pushes)
        self._coordinator.call(methods.LEAVE, request, timeout_ms=CALL_MS)

    async def step(self, address: str) -> float:
        """Sends a push and waits for the values after it. Returns the seconds that it took."""
        if self._stream is None:
            channel = grpc.aio.insecure_channel(address, options=OPTIONS)
            await channel.channel_ready()
            self._stream = channel.stream_stream(methods.PUSH_PULL.path, None, None)()
        name = PushName(self._key, Token(0), self.pushes, self.pushes)
        frame = Frame(self._headers.write(replace(self._header, name=name)), 0, self._data)
        begin = time.perf_counter()
        await self._stream.write(frames.encode(frame))
        answer = frames.decode(await self._stream.read())
        took = time.perf_counter() - begin
        if len(answer.data) != len(self._data):
            raise NoValues(f"{len(answer.data)} bytes of values for a gradient of {len(self._data)}")
        self.pushes += 1
        return took


async def train(clients: Sequence[Client], address: str, seconds: float) -> list[float]:
    """Lets all clients take steps at the same time. Returns how long each step took."""
    until = time.perf_counter() + seconds
    each_s: list[float] = []

    async def steps(client: Client) -> None:
        while time.perf_counter() < until:
            each_s.append(await client.step(address))

    await asyncio.gather(*map(steps, clients))
    return each_s
