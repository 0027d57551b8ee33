"""Workers' ends of exchange streams, which encode what they send and get as between processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from shardyard.domain.consistency import StaleRule, UpdateMode
from shardyard.domain.errors import (
    ShardyardError,
)
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Rank, Term, Token
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import PullHeader
from shardyard.domain.push_names import NO_NAME, PushName, RankSource, SourceKey, WorkerSource
from shardyard.domain.pushes import ExchangeReply, PushHeader, PushKind, PushPart
from shardyard.domain.variables import DType, VariableSpec
from shardyard.transport.in_process import InProcessDescriptors
from shardyard.transport.interfaces import Pause
from shardyard.transport.shared_memory import AttachedMemory, SharedMemory, attach_received
from shardyard.wire import frames, push_messages
from shardyard.wire.frames import FRAME_BYTES, Frame
from shardyard.wire.headers import HeaderWriter, reply_from_header
from shardyard_ps_server.hosting import orders, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest, HostedJob
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.service.exchange_stream import ExchangeStream

JOB, HERE, GENERATION = JobId(1), Incarnation(3), Generation(4)
RATE = (make_group("sgd", {"lr": 1.0}),)
ELEMENTS = 16
PART_BYTES = 8 * ELEMENTS
OWNED = (PartitionId(0), PartitionId(1))
LAYOUT = JobLayout(
    tuple(VariableSpec(name, DType.FLOAT64, (8,)) for name in "abcd"),
    OptimizerSpec("sgd", RATE),
    tuple(PartitionLayout(p, PART_BYTES, (Block(2 * p, 0, 8, 0), Block(2 * p + 1, 0, 8, 64))) for p in OWNED),
)
WHOLE = tuple(PushPart(p, PART_BYTES) for p in OWNED)


def server(
    *,
    mode: UpdateMode = UpdateMode.ASYNC,
    shareable: bool = True,
    jobs: Sequence[JobId] = (JOB,),
    stale: StaleRule | None = None,
) -> Store:
    found = Store(shareable=shareable)
    found.become(HERE, Term(1))
    for job in jobs:
        orders.create(found, CreateRequest(job, GENERATION, LAYOUT, list(OWNED), UpdateRules(mode, 2, stale=stale)))
        orders.open_partitions(found, job, GENERATION)
        if mode is UpdateMode.SYNC:
            keys = [SourceKey(RankSource(Rank(rank))) for rank in range(2)]
            pushes.open_sources(found.hosted()[0], [(key, Token(1)) for key in keys])
    return found


def replies_of(exchanges: ExchangeStream, sent: Iterator[Frame]) -> Iterator[Frame]:
    """The frames of the replies to what is sent on one stream. Pauses in this thread."""
    for item in exchanges.run(sent):
        if isinstance(item, Pause):
            item.wait()
        elif item is not None:
            yield item


class Wire:
    """A worker's end of one stream. What it sends and gets is encoded, as between processes."""

    def __init__(self, store: Store, *, worker: int = 10, job: JobId = JOB, private: bool = False) -> None:
        self.store = store
        self.caller = Caller(job, Incarnation(worker))
        self.sequence = 0
        self._private = private
        self._waiting: list[Iterator[Frame]] = []
        self.descriptors, there = InProcessDescriptors.pair()
        self._answers = replies_of(ExchangeStream(store, there), self._frames())
        self.memory: SharedMemory | None = None
        self.regions: dict[int, AttachedMemory] = {}

    def _frames(self) -> Iterator[Frame]:
        while self._waiting:
            for frame in self._waiting.pop(0):
                yield frames.decode(frames.encode(frame))

    def order(self, kind: PushKind = PushKind.NOTHING, **more: Any) -> PushHeader:
        order = PushHeader(self.caller, HERE, GENERATION, NO_NAME, kind, (), 0.0, ())
        if kind is not PushKind.NOTHING:
            name = PushName(SourceKey(WorkerSource(self.caller.incarnation)), Token(0), self.sequence, self.sequence)
            order = dataclasses.replace(order, name=name, parts=WHOLE)
        if kind is PushKind.GRADIENT:
            order = dataclasses.replace(order, weight=1.0, groups=RATE)
        return dataclasses.replace(order, **more)

    def wish(self, number: int = 0, **more: Any) -> PullHeader:
        return PullHeader(self.caller, HERE, GENERATION, OWNED, number, exactly=False, **more)

    def send(self, order: PushHeader, payload: bytes = b"", *, frame_bytes: int = 100) -> None:
        header = push_messages.push_to_wire(order).SerializeToString()
        self._waiting.append(frames.cut(header, [payload], frame_bytes))

    def ask(self, order: PushHeader, payload: bytes = b"") -> tuple[ExchangeReply, bytes]:
        """An exchange: the answer's head, and its payload."""
        self.send(order, payload)
        first = next(self._answers)
        pulled = order.pull.partitions if order.pull is not None else ()
        pushed = () if order.kind is PushKind.NOTHING else [part.partition for part in order.parts]
        result = push_messages.pulled_from_header(first.header, pulled, pushed)
        for ticket in result.regions:
            assert ticket.region not in self.regions
            self.regions[ticket.region] = attach_received(ticket, self.descriptors, private=self._private)
        data = bytes(first.data)
        while order.pull is not None and not order.pull.shared and result.parts and len(data) < PART_BYTES * len(OWNED):
            data += next(self._answers).data
        return result, data

    def attach(self, nbytes: int = 4 * PART_BYTES) -> ExchangeReply:
        self.memory = SharedMemory(nbytes, read_only=True)
        return self.offer(self.memory)

    def offer(self, memory: SharedMemory, **lie: Any) -> ExchangeReply:
        """Offers memory. `lie`: what its ticket says instead."""
        self.descriptors.pass_descriptors([memory.descriptor()])
        return self.ask(self.order(attach=dataclasses.replace(memory.ticket(), **lie)))[0]

    def push(self, value: float, **more: Any) -> tuple[ExchangeReply, bytes]:
        """A gradient that lowers all by `value`; through memory if there is some."""
        payload = np.full(2 * ELEMENTS, value).tobytes()
        order = self.order(PushKind.GRADIENT, **more)
        self.sequence += 1
        if self.memory is None:
            return self.ask(order, payload)
        self.memory.bytes[: len(payload)] = np.frombuffer(payload, np.uint8)
        return self.ask(dataclasses.replace(order, shared_at=0))

    def look(self, number: int = 0) -> list[np.ndarray[Any, Any]]:
        """A shared pull: the values, where they lie."""
        return self.at(self.ask(self.order(pull=self.wish(number, shared=True)))[0])

    def at(self, result: ExchangeReply) -> list[np.ndarray[Any, Any]]:
        assert len(result.places) == len(result.parts) == len(OWNED)
        return [self.regions[place.region].bytes[place.at :][:PART_BYTES].view(np.float64) for place in result.places]

    def end(self) -> None:
        assert list(self._answers) == []

    def break_off(self) -> None:
        self._answers.close()  # type: ignore[attr-defined]


def attached(nbytes: int = 4 * PART_BYTES) -> Wire:
    """A stream to a server of its own, with attached memory."""
    wire = Wire(server())
    assert wire.attach(nbytes).attached
    return wire


def refused(wire: Wire, order: PushHeader, payload: bytes = b"") -> ShardyardError:
    with pytest.raises(ShardyardError) as raised:
        wire.ask(order, payload)
    return raised.value


def values(store: Store) -> set[float]:
    """Those of both partitions, which all are alike."""
    wire = Wire(store, worker=99)
    _, payload = wire.ask(wire.order(pull=wire.wish()))
    wire.end()
    return set(np.frombuffer(payload, np.float64).tolist())


def held(hosted: HostedJob) -> int:
    return sum(sum(partition.versions._readers.values()) for partition in hosted.partitions.values())


class Quick:
    """A worker whose exchanges are offered to `at_once` first, as a network may."""

    def __init__(self, store: Store, **more: Any) -> None:
        self.wire = Wire(store)
        self.exchanges = ExchangeStream(store)
        self._writer = HeaderWriter()
        self._waiting: list[Frame] = []
        self._answers = replies_of(self.exchanges, iter(lambda: self._waiting.pop(0), None))
        self._more = more
        self.at_once: list[bool] = []

    def push(self, value: float, *, frame_bytes: int = FRAME_BYTES, **more: Any) -> ExchangeReply:
        given = {"pull": self.wire.wish()} | self._more | more
        order = self.wire.order(PushKind.GRADIENT, **given)
        self.wire.sequence += 1
        cut = list(frames.cut(self._writer.write(order), [np.full(2 * ELEMENTS, value).tobytes()], frame_bytes))
        answer = None
        with contextlib.suppress(ShardyardError):
            answer = self.exchanges.answer_at_once(cut[0])
        self.at_once.append(answer is not None)
        if answer is None:
            self._waiting += cut
            answer = next(self._answers)
        return reply_from_header(answer.header, OWNED, OWNED, shared=False)


def others_push(store: Store, times: int) -> None:
    other = Wire(store, worker=50)
    ((_, marks),) = pushes.read_ledger(store.hosted()[0], [(SourceKey(WorkerSource(Incarnation(50))), Token(0))])
    other.sequence = marks[0].next
    for _ in range(times):
        other.push(1.0)
    other.end()
