"""Gradients of older versions: a server keeps the versions on which workers compute, and compensates."""

from __future__ import annotations

from typing import Any

import pytest

from shardyard.domain.consistency import StaleRule
from shardyard.domain.errors import (
    InvalidRequest,
)
from shardyard.domain.ids import Version
from shardyard.domain.pushes import Outcome, PushKind
from shardyard.wire import push_messages
from shardyard_ps_server.hosting import orders, pulls
from shardyard_ps_server.partition.staleness import Tally
from tests.support.exchanges import (
    OWNED,
    PART_BYTES,
    Quick,
    Wire,
    held,
    others_push,
    refused,
    server,
    values,
)

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
    real = push_messages.push_from_wire
    monkeypatch.setattr(push_messages, "push_from_wire", lambda *given: reads.append(given[0]) or real(*given))
    for number in range(4, 8):
        quick.push(1.0, bases=at(number, number - 1))
    assert reads == []
    assert quick.at_once[-4:] == [True] * 4
    assert [each.tally for each in quick.wire.store.hosted()[0].partitions.values()] == [
        Tally(gradients=8),
        Tally(gradients=8, total=4, most=1, uncompensated=0),
    ]
