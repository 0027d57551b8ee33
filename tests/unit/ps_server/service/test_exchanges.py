"""Exchanges on one stream: pushes, pulls, answers at once, and refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from shardyard.domain import limits
from shardyard.domain.consistency import UpdateMode
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
from shardyard.domain.ids import JobId, PartitionId, Rank, Token
from shardyard.domain.push_names import PushName, RankSource, SourceKey
from shardyard.domain.pushes import ExchangeReply, Outcome, PushKind, PushPart, StepVerdict
from shardyard.wire import frames, push_messages
from shardyard.wire.frames import Frame
from shardyard.wire.v1 import parameter_server_pb2 as wire_messages
from shardyard_ps_server.hosting import orders
from shardyard_ps_server.service import exchange_stream as module
from shardyard_ps_server.values import receive_memory
from tests.support.exchanges import (
    ELEMENTS,
    JOB,
    PART_BYTES,
    Quick,
    Wire,
    held,
    refused,
    server,
    values,
)


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


def test_exchange_like_the_one_before_is_answered_at_once() -> None:
    quick = Quick(server())
    for number in range(1, 5):
        result = quick.push(1.0)
        assert [(part.outcome, part.next) for part in result.push] == [(Outcome.APPLIED, number)] * 2
        assert [part.version.number for part in result.parts] == [number] * 2
    quick.wire.sequence = 0
    assert [part.outcome for part in quick.push(1.0).push] == [Outcome.DUPLICATE] * 2
    assert quick.at_once == [False, True, True, True, True]
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
    assert (quick.at_once, values(quick.wire.store)) == ([False, True, True, False], {-3.0})


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


def stepped(wire: Wire, **step: Any) -> Frame:
    """A frame of the reply to an exchange that names a plan."""
    header = wire_messages.PushHeader(step=wire_messages.Step(**step)).SerializeToString()
    wire._waiting.append(iter([Frame(header, 0, np.full(2 * ELEMENTS, 1.0).tobytes())]))
    return next(wire._answers)


def plan(wire: Wire, kind: PushKind = PushKind.GRADIENT, number: int = 1, **more: Any) -> None:
    """Sends a header as a plan."""
    order = wire.order(kind, **more)
    wire.sequence += kind is not PushKind.NOTHING
    header = push_messages.push_to_wire(order)
    header.plan = number
    payload = np.full(2 * ELEMENTS, 1.0).tobytes() if kind is PushKind.GRADIENT else b""
    wire._waiting.append(iter([Frame(header.SerializeToString(), 0, payload)]))
    next(wire._answers)


def test_step_of_a_plan_that_the_stream_does_not_have_is_malformed() -> None:
    for given in (0, 1, 2):
        wire = Wire(server())
        if given:
            plan(wire, number=2)
        with pytest.raises(MalformedPayload, match=f"names plan {given % 2}, which"):
            stepped(wire, plan=given % 2, first=1, last=1)


def test_step_is_like_its_plan_and_a_plan_replaces_another() -> None:
    wire = Wire(server())
    plan(wire)
    stepped(wire, plan=1, first=1, last=1)
    assert values(wire.store) == {-2.0}
    plan(wire, PushKind.NOTHING)
    wire._waiting.append(iter([Frame(wire_messages.PushHeader(step={"plan": 1}).SerializeToString(), 0, b"")]))
    next(wire._answers)
    assert values(wire.store) == {-2.0}


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        ({"first": 5, "last": 4}, MalformedPayload),
        ({"first": 1, "last": 1 << 63}, TooLarge),
        ({"first": 1, "last": 1, "number": 3}, MalformedPayload),
        ({"first": 1, "last": 1, "weight": -1.0}, InvalidRequest),
        ({"first": 1, "last": 1, "weight": math.inf}, InvalidRequest),
        ({"first": 1, "last": 1, "groups": [{"values": [1.0]}]}, InvalidRequest),
        ({"first": 1, "last": 1, "source": {"worker": 77}}, InvalidRequest),
        ({"first": 1, "last": 1, "bases": {"parts": [{}] * 3}}, MalformedPayload),
        ({"first": 9, "last": 9}, SequenceGap),
    ],
    ids=str,
)
def test_wrong_step_is_refused_and_changes_nothing(step: dict[str, Any], kind: type[ShardyardError]) -> None:
    wire = Wire(server())
    plan(wire)
    with pytest.raises(kind):
        stepped(wire, plan=1, **step)
    assert values(wire.store) == {-1.0}


@pytest.mark.parametrize("more", [{"detach": True}, {"verdict": StepVerdict(0, 1.0)}])
def test_header_that_stands_for_itself_is_no_plan(more: dict[str, Any]) -> None:
    wire = Wire(server())
    with pytest.raises(InvalidRequest, match="as plan 1"):
        plan(wire, PushKind.NOTHING, **more)
    with pytest.raises(InvalidRequest, match="as plan 9"):
        plan(Wire(server()), number=9)


def test_nothing_with_data_is_malformed() -> None:
    wire = Wire(server())
    assert type(refused(wire, wire.order(), b"x")) is MalformedPayload


def test_parts_that_were_admitted_for_one_kind_are_not_for_another() -> None:
    wire = Wire(server())
    wire.push(1.0)
    empty = wire.order(PushKind.EMPTY)  # whose parts have bytes
    assert type(refused(wire, empty, bytes(2 * PART_BYTES))) is MalformedPayload
    assert values(wire.store) == {-1.0}


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
    cut = list(frames.cut(push_messages.push_to_wire(order).SerializeToString(), [bytes(2 * PART_BYTES)], 64))
    wire._waiting.append(iter(cut[:-1]))
    with pytest.raises(MalformedPayload, match="ended after 192 of 256 bytes"):
        next(wire._answers)
    assert values(wire.store) == {-1.0}


def test_payload_is_bounded_by_the_layout_before_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(server())
    monkeypatch.setattr(receive_memory, "aligned_empty", lambda nbytes: pytest.fail(f"asked for {nbytes} bytes"))
    huge = wire.order(PushKind.GRADIENT, parts=(PushPart(PartitionId(0), limits.PUSH_BYTES_MAX),))
    assert type(refused(wire, huge, b"x")) is ShapeMismatch


def test_memory_for_a_payload_that_is_not_there_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(nbytes: int) -> Any:
        raise TooLarge(f"{nbytes} bytes, for which this server has no memory")

    wire = Wire(server())
    monkeypatch.setattr(receive_memory, "aligned_empty", none_left)
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
