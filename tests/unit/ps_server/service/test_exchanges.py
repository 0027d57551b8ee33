"""ExchangeStream on one stream: what is said once, memory that is offered and lent, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from shardyard.domain import limits
from shardyard.domain.consistency import StaleRule, UpdateMode
from shardyard.domain.errors import (
    InvalidRequest,
    MalformedPayload,
    NotFound,
    SequenceGap,
    ShapeMismatch,
    ShardyardError,
    StaleIncarnation,
    TooLarge,
)
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Rank, Term, Token, Version
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import PullHeader, ShmHandle
from shardyard.domain.push_names import NO_NAME, PushName, RankSource, SourceKey, WorkerSource
from shardyard.domain.pushes import ExchangeReply, Outcome, PushHeader, PushKind, PushPart
from shardyard.domain.variables import DType, VariableSpec
from shardyard.transport.shared_memory import AttachedMemory, SharedMemory, attach
from shardyard.wire import common_messages, frames, push_messages
from shardyard.wire.frames import FRAME_BYTES, Frame
from shardyard.wire.headers import HeaderReader, HeaderWriter
from shardyard.wire.v1 import parameter_server_pb2 as wire_v1
from shardyard_ps_server.hosting import orders, pulls, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest, HostedJob
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.staleness import Tally
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.service import exchange_stream as module
from shardyard_ps_server.service import payload_reader
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


class Wire:
    """A worker's end of one stream. What it sends and gets is encoded, as between processes."""

    def __init__(self, store: Store, *, worker: int = 10, job: JobId = JOB, private: bool = False) -> None:
        self.store = store
        self.caller = Caller(job, Incarnation(worker))
        self.sequence = 0
        self._private = private
        self._before: PushHeader | None = None
        self._waiting: list[Iterator[Frame]] = []
        self._answers = ExchangeStream(store).run(self._frames())
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
        header = push_messages.push_to_wire(order, self._before).SerializeToString()
        self._before = order
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
            self.regions[ticket.region] = attach(ticket, private=self._private)
        data = bytes(first.data)
        while order.pull is not None and not order.pull.shared and result.parts and len(data) < PART_BYTES * len(OWNED):
            data += next(self._answers).data
        return result, data

    def attach(self, nbytes: int = 4 * PART_BYTES) -> ExchangeReply:
        self.memory = SharedMemory(nbytes, read_only=True)
        return self.ask(self.order(attach=self.memory.ticket()))[0]

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


# ---- one after the other


def test_pushes_and_pulls_follow_each_other_on_one_stream() -> None:
    store = server()
    wire = Wire(store)
    for number in range(1, 5):
        result, payload = wire.push(1.0, pull=wire.wish(number))
        assert [(part.outcome, part.next) for part in result.push] == [(Outcome.APPLIED, number)] * 2
        assert [part.version.number for part in result.parts] == [number] * 2
        assert set(np.frombuffer(payload, np.float64)) == {-float(number)}
    result, payload = wire.push(1.0)
    assert (len(result.push), result.parts, payload) == (2, (), b"")
    assert set(np.frombuffer(wire.ask(wire.order(pull=wire.wish()))[1], np.float64)) == {-5.0}
    assert wire.ask(wire.order())[0] == ExchangeReply(attached=False)
    wire.end()
    assert store.counters.streams == 0


class Quick:
    """A worker whose exchanges are offered to `at_once` first, as a network may."""

    def __init__(self, store: Store, **more: Any) -> None:
        self.wire = Wire(store)
        self.exchanges = ExchangeStream(store)
        self._writer = HeaderWriter()
        self._waiting: list[Frame] = []
        self._answers = self.exchanges.run(iter(lambda: self._waiting.pop(0), None))
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
        return push_messages.pulled_from_header(answer.header, OWNED, OWNED)


def test_exchange_like_the_one_before_is_answered_at_once() -> None:
    quick = Quick(server())
    for number in range(1, 5):
        result = quick.push(1.0)
        assert [(part.outcome, part.next) for part in result.push] == [(Outcome.APPLIED, number)] * 2
        assert [part.version.number for part in result.parts] == [number] * 2
    quick.wire.sequence = 0
    assert [part.outcome for part in quick.push(1.0).push] == [Outcome.DUPLICATE] * 2
    assert quick.at_once == [False, False, True, True, True]  # the second leaves out more than the first
    assert values(quick.wire.store) == {-4.0}


@pytest.mark.parametrize("why", ["waits", "coded", "sync", "large"])
def test_exchange_that_may_take_longer_is_not_answered_at_once(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Quick(server(mode=UpdateMode.SYNC if why == "sync" else UpdateMode.ASYNC))
    if why == "large":
        monkeypatch.setattr(module, "IMMEDIATE_BYTES_MAX", 2 * PART_BYTES - 1)
    wish = quick.wire.wish(1 if why == "waits" else 0, coding="int8" if why == "coded" else "")
    name = {} if why != "sync" else {"name": PushName(SourceKey(RankSource(Rank(0))), Token(1), 0, 0)}
    for _ in range(4):
        quick.wire.sequence = 0  # the same again, so that the version stays
        quick.push(1.0, pull=wish, **name)
    assert quick.at_once == [False] * 4


def test_payload_in_several_frames_is_not_taken_at_once_and_counts_once() -> None:
    quick = Quick(server())
    for _ in range(4):
        quick.push(1.0, frame_bytes=100)
    assert (any(quick.at_once), values(quick.wire.store)) == (False, {-4.0})


def test_payload_that_came_ahead_is_not_taken_at_once_and_counts_once() -> None:
    quick = Quick(server())
    payload = np.ones(2 * ELEMENTS).tobytes()
    half = len(payload) // 2
    quick.push(1.0)
    for _ in range(3):
        order = quick.wire.order(PushKind.GRADIENT, rest=half, pull=quick.wire.wish())
        quick.wire.sequence += 1
        header = Frame(quick._writer.write(order), half, payload[half:])
        ahead = Frame(b"", 0, payload[:half])
        assert quick.exchanges.answer_at_once(ahead) is None
        quick._waiting += [ahead, header]
        assert quick.exchanges.answer_at_once(header) is None
        next(quick._answers)
    assert values(quick.wire.store) == {-4.0}


def test_what_is_refused_at_once_is_refused_and_has_changed_nothing() -> None:
    quick = Quick(server())
    for _ in range(3):
        quick.push(1.0)
    quick.wire.sequence = 9
    with pytest.raises(SequenceGap):
        quick.push(1.0)
    assert (quick.at_once, values(quick.wire.store)) == ([False, False, True, False], {-3.0})


def test_same_name_again_on_the_stream_is_a_duplicate() -> None:
    wire = Wire(server())
    wire.push(1.0)
    wire.sequence = 0
    result, _ = wire.push(1.0)
    assert [part.outcome for part in result.push] == [Outcome.DUPLICATE] * 2
    assert values(wire.store) == {-1.0}


def test_what_is_not_there_in_time_is_said_and_the_push_counts() -> None:
    wire = Wire(server())
    result, payload = wire.push(1.0, pull=wire.wish(9))
    assert [part.outcome for part in result.push] == [Outcome.APPLIED] * 2
    assert [(m.partition, m.have.number, m.want) for m in result.missing] == [(0, 1, 9), (1, 1, 9)]
    assert payload == b""


def test_again_at_first_is_malformed() -> None:
    wire = Wire(server())
    wire._before = wire.order()
    assert type(refused(wire, wire.order(pull=wire.wish()))) is MalformedPayload


def test_nothing_with_data_is_malformed() -> None:
    wire = Wire(server())
    assert type(refused(wire, wire.order(), b"x")) is MalformedPayload


def test_parts_that_were_admitted_for_one_kind_are_not_for_another() -> None:
    wire = Wire(server())
    wire.push(1.0)
    empty = wire.order(PushKind.EMPTY)  # whose parts have bytes
    assert type(refused(wire, empty, bytes(2 * PART_BYTES))) is ShapeMismatch
    assert values(wire.store) == {-1.0}


@pytest.mark.parametrize("first", [PushKind.NOTHING, PushKind.EMPTY])
def test_parts_are_checked_before_they_are_inherited(first: PushKind) -> None:
    wire = Wire(server())
    bad = (PushPart(PartitionId(0), 0, (7,)), PushPart(PartitionId(1), 0))
    header = push_messages.push_to_wire(wire.order(PushKind.EMPTY, parts=bad))
    header.kind = {PushKind.NOTHING: 4, PushKind.EMPTY: 2}[first]  # type: ignore[assignment]
    wire._waiting.append(iter([Frame(header.SerializeToString(), 0, b"")]))
    next(wire._answers)
    wire._before = wire.order(PushKind.GRADIENT, parts=bad)
    wire.sequence = 1 if first is PushKind.EMPTY else 0
    assert isinstance(refused(wire, wire.order(PushKind.GRADIENT, parts=bad)), InvalidRequest)
    assert values(wire.store) == {0.0}


def test_who_was_fenced_between_two_exchanges_is_refused_in_the_next() -> None:
    wire = Wire(server())
    wire.push(1.0)
    orders.fence(wire.store, [wire.caller.incarnation])
    assert type(refused(wire, wire.order(pull=wire.wish()))) is StaleIncarnation


def test_job_that_was_dropped_between_two_exchanges_is_not_found() -> None:
    wire = Wire(server())
    wire.push(1.0)
    orders.drop(wire.store, JOB)
    assert type(refused(wire, wire.order(pull=wire.wish()))) is NotFound


def test_stream_is_about_one_job() -> None:
    store = server(jobs=(JOB, JobId(2)))
    wire, other = Wire(store), Wire(store, job=JobId(2))
    wire.push(1.0)
    assert "job 2 on a stream of job 1" in refused(wire, other.order(pull=other.wish())).what
    assert [len(other.push(1.0)[0].push), values(store)] == [2, {-1.0}]


def test_refused_exchange_ends_the_stream_and_changes_nothing_and_those_before_count() -> None:
    wire = Wire(server())
    wire.push(1.0)
    wire.sequence = 7
    assert type(refused(wire, wire.order(PushKind.GRADIENT), np.ones(2 * ELEMENTS).tobytes())) is SequenceGap
    wire.end()
    assert values(wire.store) == {-1.0}
    assert wire.store.counters.streams == 0


def test_payload_that_breaks_off_leaves_nothing_behind() -> None:
    wire = Wire(server())
    wire.push(1.0)
    order = wire.order(PushKind.GRADIENT)
    cut = list(
        frames.cut(push_messages.push_to_wire(order, wire._before).SerializeToString(), [bytes(2 * PART_BYTES)], 64)
    )
    wire._waiting.append(iter(cut[:-1]))
    with pytest.raises(MalformedPayload, match="ended after 192 of 256 bytes"):
        next(wire._answers)
    assert values(wire.store) == {-1.0}


def test_payload_is_bounded_by_the_layout_before_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(server())
    monkeypatch.setattr(payload_reader, "aligned_empty", lambda nbytes: pytest.fail(f"asked for {nbytes} bytes"))
    huge = wire.order(PushKind.GRADIENT, parts=(PushPart(PartitionId(0), limits.PUSH_BYTES_MAX),))
    assert type(refused(wire, huge, b"x")) is ShapeMismatch


def test_memory_for_a_payload_that_is_not_there_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(nbytes: int) -> Any:
        raise TooLarge(f"{nbytes} bytes, for which this server has no memory")

    wire = Wire(server())
    monkeypatch.setattr(payload_reader, "aligned_empty", none_left)
    order = wire.order(PushKind.GRADIENT)
    assert "256 bytes, for which this server has no memory" in refused(wire, order, bytes(2 * PART_BYTES)).what


def test_synchronous_contribution_outlives_the_exchange_that_brought_it() -> None:
    """The next exchange writes its payload into the same memory, before the step is complete."""
    store = server(mode=UpdateMode.SYNC)
    wires = [Wire(store, worker=10 + rank) for rank in range(2)]
    shared = Wire(store, worker=20)
    shared.attach()
    for rank, (wire, value) in enumerate(zip((wires[0], shared), (2.0, 4.0), strict=True)):
        name = PushName(SourceKey(RankSource(Rank(rank))), Token(1), 0, 0)
        wire.push(value, name=name)
        if rank == 0:
            again, _ = wire.push(100.0, name=name)
            assert [part.outcome for part in again.push] == [Outcome.DUPLICATE] * 2
    assert values(store) == {-3.0}
    # and the other way round, from memory
    shared.push(2.0, name=PushName(SourceKey(RankSource(Rank(1))), Token(1), 1, 1))
    assert shared.memory is not None
    shared.memory.bytes[:] = 255
    wires[1].push(4.0, name=PushName(SourceKey(RankSource(Rank(0))), Token(1), 1, 1))
    assert values(store) == {-6.0}


def test_streams_beyond_the_limit_end_after_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EXCHANGE_STREAMS_MAX", 1)
    store = server()
    first, second = Wire(store), Wire(store, worker=11)
    first.push(1.0)
    second.push(1.0)
    second.send(second.order(PushKind.GRADIENT), np.ones(2 * ELEMENTS).tobytes())
    assert list(second._answers) == []
    first.push(1.0)
    assert values(store) == {-3.0}
    assert store.counters.streams == 1
    first.end()
    third = Wire(store, worker=12)
    third.push(1.0)
    third.push(1.0)


# ---- attaching


def test_offer_that_is_taken_is_said_with_the_servers_own_memory() -> None:
    wire = Wire(server())
    said = wire.attach()
    assert said.attached
    assert not said.not_attached
    assert [ticket.region for ticket in said.regions] == [0]
    assert said.regions[0].pid == os.getpid()
    assert (wire.store.counters.streams, wire.store.counters.streams_attached) == (1, 1)
    wire.end()
    assert (wire.store.counters.streams, wire.store.counters.streams_attached) == (0, 0)


def test_offer_that_cannot_be_taken_is_no_error_and_the_stream_goes_on() -> None:
    wire = Wire(server())
    memory = SharedMemory(64, read_only=True)
    said, _ = wire.ask(wire.order(attach=dataclasses.replace(memory.ticket(), nonce=bytes(limits.NONCE_BYTES))))
    assert said.attached is False
    assert "other memory than was announced" in said.not_attached
    assert said.regions == ()
    assert wire.store.counters.streams_attached == 0
    wire.push(1.0)
    assert values(wire.store) == {-1.0}


def test_server_whose_values_cannot_be_shared_does_not_attach() -> None:
    wire = Wire(server(shareable=False))
    said = wire.attach()
    assert said.attached is False
    assert said.not_attached


def test_regions_are_told_once_on_a_stream_and_again_on_another() -> None:
    wire = Wire(server())
    wire.attach()
    known = set(wire.regions)
    for number in range(40):
        wire.push(1.0)
        _, view = wire.look(number)  # raises where a region is told twice, or not at all
        assert set(view) == {-float(number + 1)}
    other = Wire(wire.store, worker=11)
    other.attach()
    assert known <= set(other.regions) == set(wire.regions)


def test_another_offer_replaces_the_first() -> None:
    wire = Wire(server())
    wire.attach()
    wire.push(1.0)
    first = weakref.ref(wire.memory)  # type: ignore[arg-type]
    assert wire.attach().attached
    wire.push(2.0)
    gc.collect()
    assert first() is None
    assert values(wire.store) == {-3.0}
    assert wire.store.counters.streams_attached == 1


# ---- payloads in memory


def test_payload_is_read_where_it_lies() -> None:
    wire = Wire(server())
    wire.attach(1024)
    assert wire.memory is not None
    wire.memory.bytes[512 : 512 + 256] = np.full(2 * ELEMENTS, 3.0).view(np.uint8)
    result, _ = wire.ask(wire.order(PushKind.GRADIENT, shared_at=512))
    assert [part.outcome for part in result.push] == [Outcome.APPLIED] * 2
    assert values(wire.store) == {-3.0}


@pytest.mark.parametrize("at", [832, 1024, 1 << 40, (1 << 64) - 256, (1 << 64) - 64, 1, 32, 63, 511])
def test_place_beyond_the_memory_or_misaligned_is_malformed(at: int) -> None:
    wire = Wire(server())
    wire.attach(1024)
    assert type(refused(wire, wire.order(PushKind.GRADIENT, shared_at=at))) is MalformedPayload
    assert values(wire.store) == {0.0}


def test_last_place_in_the_memory_is_taken() -> None:
    wire = Wire(server())
    wire.attach(1024)
    wire.ask(wire.order(PushKind.GRADIENT, shared_at=1024 - 256))


def test_place_without_attached_memory_is_refused() -> None:
    wire = Wire(server())
    error = refused(wire, wire.order(PushKind.GRADIENT, shared_at=0))
    assert (type(error), "none was attached" in error.what) == (InvalidRequest, True)


def test_place_with_data_beside_it_is_malformed() -> None:
    wire = Wire(server())
    wire.attach()
    order = wire.order(PushKind.GRADIENT, shared_at=0)
    assert type(refused(wire, order, np.ones(2 * ELEMENTS).tobytes())) is MalformedPayload


def test_absent_blocks_are_left_where_they_are_in_memory_and_left_out_of_a_stream() -> None:
    store = server()
    through_memory, over_a_stream = Wire(store), Wire(store, worker=11)
    through_memory.attach()
    in_place = (PushPart(PartitionId(0), PART_BYTES, (0,)), PushPart(PartitionId(1), PART_BYTES, (0, 1)))
    through_memory.push(1.0, parts=in_place)
    _, payload = over_a_stream.ask(over_a_stream.order(pull=over_a_stream.wish()))
    found = np.frombuffer(payload, np.float64)
    assert found.tolist() == [0.0] * 8 + [-1.0] * 8 + [0.0] * 16
    left_out = (PushPart(PartitionId(0), 64, (0,)), PushPart(PartitionId(1), 0))
    order = over_a_stream.order(PushKind.GRADIENT, parts=left_out)
    over_a_stream.ask(order, np.ones(8).tobytes())
    _, payload = over_a_stream.ask(over_a_stream.order(pull=over_a_stream.wish()))
    assert np.frombuffer(payload, np.float64).tolist() == [0.0] * 8 + [-2.0] * 8 + [0.0] * 16


def test_part_in_memory_is_in_full_layout() -> None:
    wire = Wire(server())
    wire.attach()
    short = (PushPart(PartitionId(0), 64, (0,)), PushPart(PartitionId(1), 0))
    assert type(refused(wire, wire.order(PushKind.GRADIENT, parts=short, shared_at=0))) is ShapeMismatch
    wire = Wire(wire.store)
    wire.attach()
    bad = (PushPart(PartitionId(0), PART_BYTES, (2,)),)
    assert type(refused(wire, wire.order(PushKind.GRADIENT, parts=bad, shared_at=0))) is MalformedPayload
    assert values(wire.store) == {0.0}


# ---- values in memory


def test_shared_pull_says_where_the_values_lie() -> None:
    wire = Wire(server())
    wire.attach()
    result, payload = wire.push(1.0, pull=wire.wish(1, shared=True))
    assert payload == b""
    assert [set(view) for view in wire.at(result)] == [{-1.0}] * 2
    assert [part.version.number for part in result.parts] == [1, 1]


def test_shared_pull_without_attached_memory_is_refused() -> None:
    wire = Wire(server())
    error = refused(wire, wire.order(pull=wire.wish(shared=True)))
    assert (type(error), "without attached memory" in error.what) == (InvalidRequest, True)
    assert held(wire.store.hosted()[0]) == 0


def test_shared_pull_that_is_not_there_yet_lends_nothing() -> None:
    wire = Wire(server())
    wire.attach()
    result, _ = wire.ask(wire.order(pull=wire.wish(1, shared=True)))
    assert len(result.missing) == 2
    assert result.places == ()
    assert held(wire.store.hosted()[0]) == 0


def test_values_of_a_partition_without_any_need_no_place() -> None:
    layout = dataclasses.replace(LAYOUT, partitions=(*LAYOUT.partitions, PartitionLayout(PartitionId(2), 0, ())))
    store = Store()
    store.become(HERE, Term(1))
    orders.create(
        store,
        CreateRequest(JOB, GENERATION, layout, [PartitionId(0), PartitionId(2)], UpdateRules(UpdateMode.ASYNC, 0)),
    )
    orders.open_partitions(store, JOB, GENERATION)
    wire = Wire(store)
    wire.attach()
    wanted = (PartitionId(2), PartitionId(0))
    result, _ = wire.ask(wire.order(pull=dataclasses.replace(wire.wish(shared=True), partitions=wanted)))
    assert tuple(result.places[0]) == (0, 0)
    assert result.places[1].region in wire.regions


def others_push(store: Store, times: int) -> None:
    other = Wire(store, worker=50)
    ((_, marks),) = pushes.read_ledger(store.hosted()[0], [(SourceKey(WorkerSource(Incarnation(50))), Token(0))])
    other.sequence = marks[0].next
    for _ in range(times):
        other.push(1.0)
    other.end()


def test_what_was_lent_is_not_written_before_the_exchange_after_the_next() -> None:
    wire = Wire(server())
    wire.attach()
    first = wire.look()
    others_push(wire.store, 8)
    assert [set(view) for view in first] == [{0.0}] * 2
    second = wire.look()  # the next exchange: the first may still be read, while the answer is on its way
    others_push(wire.store, 8)
    assert [set(view) for view in first] == [{0.0}] * 2
    assert [set(view) for view in second] == [{-8.0}] * 2
    wire.look()  # the one after: now the first may be written
    others_push(wire.store, 8)
    assert [set(view) for view in first] != [{0.0}] * 2
    assert [set(view) for view in second] == [{-8.0}] * 2


@pytest.mark.parametrize("between", ["push", "nothing"])
def test_what_was_lent_stays_while_nothing_else_was(between: str) -> None:
    wire = Wire(server())
    wire.attach()
    first = wire.look()
    for _ in range(4):
        if between == "push":
            wire.push(1.0)
        else:
            wire.ask(wire.order())
    others_push(wire.store, 8)
    assert [set(view) for view in first] == [{0.0}] * 2


def test_what_was_lent_stays_when_the_next_answer_is_lost_and_the_worker_asks_anew() -> None:
    """The answer names a version that the worker never heard of; it still reads the one before."""
    store = server()
    wire = Wire(store)
    wire.attach()
    first = wire.look()
    others_push(store, 3)
    wire.look()
    wire.break_off()
    again = Wire(store)
    again.attach()
    others_push(store, 8)
    assert [set(view) for view in first] == [{0.0}] * 2
    again.look()
    others_push(store, 8)  # as while that exchange is under way
    assert [set(view) for view in first] == [{0.0}] * 2


def test_number_of_buffers_does_not_grow_with_exchanges() -> None:
    wire = Wire(server())
    wire.attach()
    for number in range(50):
        wire.push(1.0, pull=wire.wish(number + 1, shared=True))
    assert held(wire.store.hosted()[0]) <= 2 * 2
    assert len(wire.store.hosted()[0].regions.tickets()) <= 2


@pytest.mark.parametrize("how", ["detach", "fence"])
def test_what_was_lent_is_taken_back_from_who_detaches_or_is_dead(how: str) -> None:
    wire = Wire(server())
    wire.attach()
    wire.look()
    wire.look()
    hosted = wire.store.hosted()[0]
    assert held(hosted) > 0
    if how == "detach":
        wire.ask(wire.order(detach=True))
    else:
        orders.fence(wire.store, [wire.caller.incarnation])
    assert held(hosted) == 0
    assert hosted.lent == {}


def test_stream_that_breaks_off_does_not_take_back_what_was_lent() -> None:
    """The worker may still be reading; it is alive until it is declared dead."""
    wire = Wire(server())
    wire.attach()
    first = wire.look()
    wire.break_off()
    others_push(wire.store, 8)
    assert [set(view) for view in first] == [{0.0}] * 2
    assert wire.store.counters.streams == wire.store.counters.streams_attached == 0


@pytest.mark.parametrize("after", [0, 1])
def test_values_on_their_way_are_held_until_the_receiver_has_them_or_is_gone(after: int) -> None:
    wire = Wire(server())
    hosted = wire.store.hosted()[0]
    wire.send(wire.order(pull=wire.wish()))
    frame = next(wire._answers)
    assert len(frame.data) == 2 * PART_BYTES
    assert held(hosted) == 2
    wire.break_off()
    assert held(hosted) == 0
    assert wire.store.counters.streams == 0


def test_one_worker_does_not_take_back_what_was_lent_to_another() -> None:
    store = server()
    wires = [Wire(store, worker=10 + number) for number in range(3)]
    for wire in wires:
        wire.attach()
    first = wires[0].look()
    others_push(store, 2)
    for _ in range(3):
        wires[1].look()
    wires[2].ask(wires[2].order(detach=True))
    others_push(store, 8)
    assert [set(view) for view in first] == [{0.0}] * 2


REFUSED_TICKETS: list[Callable[[ShmHandle], ShmHandle]] = [
    lambda ticket: dataclasses.replace(ticket, pid=2**32 - 1),
    lambda ticket: dataclasses.replace(ticket, fd=0),
    lambda ticket: dataclasses.replace(ticket, nbytes=1 << 40),
    lambda ticket: dataclasses.replace(ticket, nonce=bytes(limits.NONCE_BYTES)),
]


@pytest.mark.parametrize("spoil", REFUSED_TICKETS)
def test_ticket_that_lies_is_refused_without_harm(spoil: Callable[[ShmHandle], ShmHandle]) -> None:
    wire, memory = Wire(server()), SharedMemory(1024, read_only=True)
    assert wire.ask(wire.order(attach=spoil(memory.ticket())))[0].attached is False
    assert type(refused(wire, wire.order(PushKind.GRADIENT, shared_at=0))) is InvalidRequest


def test_bytes_that_lie_in_shared_memory_are_not_counted_as_moved() -> None:
    store = server()
    wire = Wire(store)
    wire.attach()
    wire.look()
    assert store.counters.bytes_sent == 0
    plain = Wire(store)
    _, payload = plain.ask(plain.order(pull=plain.wish()))
    assert store.counters.bytes_sent == len(payload) > 0


def test_values_come_in_the_order_asked_for_each_frame_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRAME_BYTES", 0)
    monkeypatch.setattr(module, "IMMEDIATE_BYTES_MAX", 0)
    wire = Wire(server())
    payload = np.arange(2 * ELEMENTS, dtype=np.float64).tobytes()
    _, plain = wire.ask(wire.order(PushKind.GRADIENT, pull=wire.wish()), payload)
    wire.send(wire.order(pull=wire.wish(order=(2, 1))))
    came: dict[int, bytes] = {}
    while sum(map(len, came.values())) < len(plain):
        frame = next(wire._answers)
        came[frame.offset] = bytes(frame.data)
    assert list(came) == [128, 64, 0, 192]
    assert b"".join(came[offset] for offset in sorted(came)) == plain


@pytest.mark.parametrize(
    ("more", "complaint"),
    [({"order": (4,)}, "variable 4"), ({"order": (1,), "coding": "bf16"}, "coded"), ({"order": (1, 1)}, "twice")],
    ids=str,
)
def test_order_that_makes_no_sense_is_refused_before_the_push_counts(more: dict[str, Any], complaint: str) -> None:
    store = server()
    wire = Wire(store)
    with pytest.raises(InvalidRequest, match=complaint):
        wire.ask(wire.order(PushKind.GRADIENT, pull=wire.wish(**more)), bytes(2 * PART_BYTES))
    assert store.counters.pushes_applied == 0


# ---- gradients of older versions

COMPENSATED = StaleRule(divides_rate=True, compensation=0.5)


def kept(*wires: Wire) -> int:
    """Versions that are kept for workers, of both partitions, when their last answers are complete."""
    for wire in wires:
        wire.ask(wire.order())
    return held(wires[0].store.hosted()[0])


def at(*numbers: int, life: int = 1) -> tuple[Version, ...]:
    return tuple(Version(life, number) for number in numbers)


@pytest.mark.parametrize("shared", [False, True])
def test_stale_gradient_is_compensated_with_what_its_worker_was_given(shared: bool) -> None:
    store = server(stale=COMPENSATED)
    slow, fast = Wire(store), Wire(store, worker=11)
    if shared:
        for wire in (slow, fast):
            wire.attach()
    slow.ask(slow.order(pull=slow.wish(shared=shared)))
    for number in range(3):
        fast.push(1.0, bases=at(number, number), pull=fast.wish(shared=shared))
    slow.push(2.0, bases=at(0, 0))
    # the values fell by 3 while it was computed; three updates late, it has a third of the rate
    compensated = 2.0 + 0.5 * 2.0 * 2.0 * (-3.0 - 0.0)
    assert values(store) == {-3.0 - compensated * (1.0 / 3)}
    tallies = [each.tally for each in store.hosted()[0].partitions.values()]
    assert tallies == [Tally(gradients=4, total=3, most=3)] * 2


def test_versions_are_kept_for_no_longer_than_their_worker_computes_on_them() -> None:
    store = server(stale=COMPENSATED)
    wires = [Wire(store, worker=10 + number) for number in range(4)]
    given = dict.fromkeys(wires, 0)
    for wire in wires:
        wire.ask(wire.order(pull=wire.wish()))
    for _ in range(10):
        for wire in wires:
            result, _ = wire.push(0.5, bases=at(given[wire], given[wire]), pull=wire.wish())
            given[wire] = result.parts[0].version.number
    assert kept(*wires) == 2 * len(wires) * len(OWNED)
    assert all(each.tally is not None and each.tally.most == 3 for each in store.hosted()[0].partitions.values())
    assert len(store.hosted()[0].regions.tickets()) <= 4


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("how", ["detach", "fence"])
def test_nothing_is_kept_for_a_worker_that_has_left_or_is_dead(how: str, shared: bool) -> None:
    store = server(stale=COMPENSATED)
    wire, other = Wire(store), Wire(store, worker=11)
    if shared:
        wire.attach()
    other.ask(other.order(pull=other.wish()))
    theirs = kept(other)
    assert theirs == len(OWNED)
    for _ in range(9):
        wire.ask(wire.order(pull=wire.wish(shared=shared)))
        others_push(store, 1)
    assert kept(other, wire) > theirs
    if how == "detach":
        wire.ask(wire.order(detach=True))
    else:
        orders.fence(store, [wire.caller.incarnation])
    assert kept(other) == theirs


def test_worker_that_is_fenced_while_it_is_answered_has_nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    store = server(stale=COMPENSATED)
    wire = Wire(store)
    real = pulls.hold

    def hold(*arguments: Any) -> Any:
        found = real(*arguments)
        orders.fence(store, [wire.caller.incarnation])
        return found

    monkeypatch.setattr(pulls, "hold", hold)
    wire.ask(wire.order(pull=wire.wish()))
    wire.end()
    assert held(store.hosted()[0]) == 0


def test_nothing_is_kept_where_only_rates_are_divided_or_nothing_is_asked() -> None:
    for stale in (None, StaleRule(divides_rate=True)):
        store = server(stale=stale)
        wire = Wire(store)
        wire.ask(wire.order(pull=wire.wish()))
        assert kept(wire) == 0


def test_what_a_gradient_was_computed_on_is_refused_where_nobody_asks_and_where_it_is_a_lie() -> None:
    plain = Wire(server())
    error = refused(plain, plain.order(PushKind.GRADIENT, bases=at(0, 0)), bytes(2 * PART_BYTES))
    assert (type(error), "no rule" in error.what) == (InvalidRequest, True)
    asked = Wire(server(stale=COMPENSATED))
    error = refused(asked, asked.order(PushKind.GRADIENT, bases=at(0, 1)), bytes(2 * PART_BYTES))
    assert (type(error), "version 1 of partition 1" in error.what) == (InvalidRequest, True)
    assert [each.describe()[0].number for each in asked.store.hosted()[0].partitions.values()] == [0, 0]


def test_push_that_says_nothing_is_taken_as_it_is_and_a_push_that_came_before_is_not_judged() -> None:
    store = server(stale=COMPENSATED)
    wire = Wire(store)
    for _ in range(3):
        wire.push(1.0)
    assert values(store) == {-3.0}
    wire.sequence = 0
    result, _ = wire.push(1.0, bases=at(900, 900))
    assert {part.outcome for part in result.push} == {Outcome.DUPLICATE}


def test_headers_that_differ_in_names_and_bases_alone_are_not_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Quick(server(stale=COMPENSATED))
    for number in range(4):
        quick.push(1.0, bases=at(number, number))
    reads: list[bytes] = []
    real = push_messages.push_from_header
    monkeypatch.setattr(push_messages, "push_from_header", lambda *given: reads.append(given[0]) or real(*given))
    for number in range(4, 8):
        quick.push(1.0, bases=at(number, number - 1))
    assert reads == []
    assert quick.at_once[-4:] == [True] * 4
    assert [each.tally for each in quick.wire.store.hosted()[0].partitions.values()] == [
        Tally(gradients=8),
        Tally(gradients=8, total=4, most=1, uncompensated=0),
    ]


@pytest.mark.parametrize("place", ["after the name", "at the end", "both"])
def test_bases_are_read_wherever_they_stand(place: str) -> None:
    """Other clients write their fields in other orders; what is said is the same."""
    order = Wire(server()).order(PushKind.GRADIENT)
    reader, before = HeaderReader(), None
    for number in range(1, 5):
        named = dataclasses.replace(order, name=dataclasses.replace(order.name, first=number, last=number))
        bases = at(number // 3, 7)
        name = wire_v1.PushHeader(name=common_messages.name_to_wire(named.name)).SerializeToString()
        rest = push_messages.push_to_wire(named, before, named=False).SerializeToString()
        first = wire_v1.PushHeader(bases=push_messages.bases_to_wire(bases[:1])).SerializeToString()
        second = wire_v1.PushHeader(bases=push_messages.bases_to_wire(bases[1:])).SerializeToString()
        header = {
            "after the name": name
            + wire_v1.PushHeader(bases=push_messages.bases_to_wire(bases)).SerializeToString()
            + rest,
            "at the end": name
            + rest
            + wire_v1.PushHeader(bases=push_messages.bases_to_wire(bases)).SerializeToString(),
            "both": name + first + rest + second,
        }[place]
        found = reader.read(header)
        assert found == push_messages.push_from_header(header, before)
        assert found.bases == bases
        before = found
