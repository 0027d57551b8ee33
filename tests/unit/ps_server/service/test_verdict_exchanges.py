"""Verdicts on the wire: what an exchange tells of steps that wait, what it brings, and what is refused at the door."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardyard.domain.consistency import NO_CLIPPING, Clipping, UpdateMode
from shardyard.domain.errors import InvalidRequest, MalformedPayload, ShardyardError, TooLarge
from shardyard.domain.ids import Rank, Term, Token
from shardyard.domain.limits import SEQUENCE_MAX
from shardyard.domain.pulls import PullHeader
from shardyard.domain.push_names import PushName, RankSource, SourceKey
from shardyard.domain.pushes import ExchangeReply, GatheredPart, Outcome, PushKind, StepVerdict
from shardyard.wire import common_messages, push_messages
from shardyard.wire.headers import HeaderReader, HeaderWriter
from shardyard.wire.v1 import parameter_server_pb2 as wire_messages
from shardyard_ps_server.hosting import orders, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.update_rules import UpdateRules
from tests.support.exchanges import (
    ELEMENTS,
    GENERATION,
    HERE,
    JOB,
    LAYOUT,
    OWNED,
    WHOLE,
    Wire,
    refused,
    values,
)

NORM = Clipping(norm=1.0)


def server(clipping: Clipping = NORM, mode: UpdateMode = UpdateMode.SYNC) -> Store:
    found = Store()
    found.become(HERE, Term(1))
    orders.create(found, CreateRequest(JOB, GENERATION, LAYOUT, list(OWNED), UpdateRules(mode, 2, clipping=clipping)))
    orders.open_partitions(found, JOB, GENERATION)
    keys = [SourceKey(RankSource(Rank(rank))) for rank in range(2)]
    pushes.open_sources(found.hosted()[0], [(key, Token(1)) for key in keys])
    return found


def exactly(wire: Wire, number: int, **more: object) -> PullHeader:
    return PullHeader(wire.caller, HERE, GENERATION, OWNED, number, exactly=True, **more)  # type: ignore[arg-type]


def contribute(wire: Wire, rank: int, step: int, value: float, **more: object) -> ExchangeReply:
    name = PushName(SourceKey(RankSource(Rank(rank))), Token(1), step, step)
    return wire.push(value, name=name, **more)[0]


def test_exchange_tells_what_waits_and_brings_the_verdict_with_the_next() -> None:
    store = server()
    wire = Wire(store)
    assert contribute(wire, 0, 0, 2.0, pull=exactly(wire, 1)).gathered == ()
    result = contribute(wire, 1, 0, 4.0, pull=exactly(wire, 1, wait_ms=1_000))
    assert [part.outcome for part in result.push] == [Outcome.RECORDED] * 2
    square_norm = ELEMENTS * 3.0**2
    assert result.gathered == tuple(GatheredPart(number, 0, square_norm) for number in OWNED)
    assert [missing.waiting_for for missing in result.missing] == ["the verdict on step 0"] * 2
    verdict = StepVerdict(0, 2 * square_norm)
    result, payload = wire.ask(wire.order(pull=exactly(wire, 1), verdict=verdict))
    assert [part.version.number for part in result.parts] == [1] * 2
    assert result.gathered == tuple(GatheredPart(number, 0, square_norm) for number in OWNED)
    scale = 1.0 / (math.sqrt(2 * square_norm) + 1e-6)
    assert set(np.frombuffer(payload, np.float64)) == {-3.0 * scale}


@pytest.mark.parametrize("how", ["shared", "coded"])
def test_shared_and_coded_answers_tell_too(how: str) -> None:
    store = server()
    wire = Wire(store)
    if how == "shared":
        assert wire.attach().attached
    contribute(wire, 0, 0, 1.0)
    contribute(wire, 1, 0, 1.0)
    wish = exactly(wire, 1, shared=how == "shared", coding="int8" if how == "coded" else "")
    told = wire.ask(wire.order(pull=wish))[0].gathered
    assert [each.partition for each in told] == list(OWNED)
    verdict = StepVerdict(0, sum(each.square_norm for each in told))
    wire.send(wire.order(pull=wish, verdict=verdict))
    result = push_messages.pulled_from_header(next(wire._answers).header, OWNED)
    assert (result.gathered, [part.version.number for part in result.parts]) == (told, [1, 1])


def test_verdict_is_looked_at_before_the_push_that_comes_with_it() -> None:
    wire = Wire(server())
    for rank in range(2):
        contribute(wire, rank, 0, 1.0)
    told = wire.ask(wire.order(pull=exactly(wire, 1)))[0].gathered
    verdict = StepVerdict(0, sum(each.square_norm for each in told))
    result = contribute(wire, 0, 1, 1.0, verdict=verdict)
    assert [(part.outcome, part.version.number) for part in result.push] == [(Outcome.RECORDED, 1)] * 2
    assert [part.outcome for part in contribute(wire, 1, 1, 1.0, verdict=verdict).push] == [Outcome.RECORDED] * 2
    assert values(wire.store) == {-1.0 / (math.sqrt(2 * ELEMENTS) + 1e-6)}


def test_wish_for_any_version_is_told_nothing() -> None:
    wire = Wire(server())
    for rank in range(2):
        contribute(wire, rank, 0, 1.0)
    assert wire.ask(wire.order(pull=wire.wish(1)))[0].gathered == ()


@pytest.mark.parametrize("clipping", [NO_CLIPPING, Clipping(value=0.5)])
def test_job_whose_steps_need_none_takes_no_verdict_and_tells_nothing(clipping: Clipping) -> None:
    wire = Wire(server(clipping))
    for rank in range(2):
        result = contribute(wire, rank, 0, 1.0, pull=exactly(wire, 1))
    assert (result.gathered, [part.version.number for part in result.parts]) == ((), [1, 1])
    error = refused(wire, wire.order(verdict=StepVerdict(0, 1e9)))
    assert isinstance(error, InvalidRequest)
    assert "whose steps need none" in error.what


def test_verdict_that_one_partition_refuses_changes_none() -> None:
    store = server()
    wire = Wire(store)
    for rank in range(2):
        name = PushName(SourceKey(RankSource(Rank(rank))), Token(1), 0, 0)
        wire.ask(wire.order(PushKind.GRADIENT, name=name, parts=WHOLE[:1]), np.ones(ELEMENTS).tobytes())
    told = wire.ask(wire.order(pull=exactly(wire, 1)))[0].gathered
    assert [each.partition for each in told] == [OWNED[0]]
    error = refused(wire, wire.order(verdict=StepVerdict(0, 1e9)))
    assert isinstance(error, InvalidRequest)
    assert "a verdict on step 0 of partition 1" in error.what
    assert values(store) == {0.0}


def test_servers_do_not_clip_what_is_an_update_by_itself() -> None:
    with pytest.raises(InvalidRequest, match="clipping by servers in job 1, which is async"):
        orders.create(
            Store(),
            CreateRequest(JOB, GENERATION, LAYOUT, list(OWNED), UpdateRules(UpdateMode.ASYNC, 0, clipping=NORM)),
        )


def test_job_is_not_given_again_with_other_clipping() -> None:
    store = server()
    orders.create(
        store, CreateRequest(JOB, GENERATION, LAYOUT, list(OWNED), UpdateRules(UpdateMode.SYNC, 2, clipping=NORM))
    )
    with pytest.raises(InvalidRequest, match="bound, rules for stale gradients, clipping, backup workers or rows"):
        orders.create(
            store,
            CreateRequest(
                JOB, GENERATION, LAYOUT, list(OWNED), UpdateRules(UpdateMode.SYNC, 2, clipping=Clipping(norm=2.0))
            ),
        )


# ---- the door


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (wire_messages.StepVerdict(step=SEQUENCE_MAX + 1), TooLarge),
        (wire_messages.StepVerdict(step=1, square_norm=-1e-300), InvalidRequest),
        (wire_messages.StepVerdict(step=1, square_norm=-math.inf), InvalidRequest),
    ],
)
def test_verdict_that_cannot_be_is_refused_at_the_door(
    message: wire_messages.StepVerdict, error: type[ShardyardError]
) -> None:
    with pytest.raises(error):
        push_messages.verdict_from_wire(message)


def test_norm_that_is_not_a_number_passes_the_door() -> None:
    found = push_messages.verdict_from_wire(wire_messages.StepVerdict(step=1, square_norm=math.nan))
    assert found.square_norm is not None
    assert math.isnan(found.square_norm)


@pytest.mark.parametrize(
    "gathered",
    [
        [wire_messages.Gathered(partition=0, step=1, square_norm=-1.0)],
        [wire_messages.Gathered(partition=0, step=SEQUENCE_MAX + 1, square_norm=1.0)],
        [wire_messages.Gathered(partition=0, step=1, square_norm=1.0)] * 2,
    ],
)
def test_answer_that_tells_what_cannot_be_is_malformed(gathered: list[wire_messages.Gathered]) -> None:
    missing = [wire_messages.Missing(partition=0, want=2)]
    header = wire_messages.PullHeader(not_yet=wire_messages.NotYet(missing=missing), gathered=gathered)
    with pytest.raises(MalformedPayload):
        push_messages.pulled_from_header(header.SerializeToString(), OWNED)


@pytest.mark.parametrize("limit", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["norm", "value"])
def test_clipping_to_what_is_no_limit_is_refused(name: str, limit: float) -> None:
    with pytest.raises(InvalidRequest, match=f"clipping by {name}"):
        common_messages.clipping_from_wire(wire_messages.Clipping(**{name: limit}))


def test_headers_that_differ_in_their_verdict_keep_it() -> None:
    wire = Wire(server())
    writer, reader = HeaderWriter(), HeaderReader()
    first, second = StepVerdict(0, 1.0), StepVerdict(0, 2.0)
    for sequence, verdict in enumerate([None, None, None, first, first, second, None, None]):
        name = PushName(SourceKey(RankSource(Rank(0))), Token(1), sequence, sequence)
        order = wire.order(PushKind.GRADIENT, name=name, verdict=verdict)
        assert reader.read(writer.write(order))[0] == order
