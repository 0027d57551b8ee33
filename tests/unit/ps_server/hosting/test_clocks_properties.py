"""Bounded staleness over chance histories: nobody is given values from which more steps of another worker are missing
than the bound, and somebody can always go on (docs/internals/ledger.md, rule C3)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shardyard.domain.consistency import SspPhase, SspReport
from shardyard.domain.ids import Incarnation
from shardyard_ps_server.hosting.worker_clocks import UNREPORTED, WorkerClocks

PLACES = st.integers(1, 4)


def too_far_behind(clocks: WorkerClocks, worker: Incarnation, report: SspReport) -> tuple[Incarnation, int] | None:
    """Whom the worker must wait for now."""
    return None if clocks.bound is None else clocks._slowest_to_await(worker, report, clocks.bound)


class Histories(RuleBasedStateMachine):
    """Workers as they are, beside what the server knows of them: how many steps each has taken since it joined, from
    where it counted, and whether it waits for values."""

    @initialize(bound=st.integers(0, 3))
    def begin(self, bound: int) -> None:
        self.clocks = WorkerClocks(bound)
        self.bound = bound
        self.at: dict[Incarnation, int] = {}
        self.turns: dict[Incarnation, int] = {}
        self.waits: set[Incarnation] = set()
        self.deaths: dict[int, int] = {}
        self.said: list[tuple[Incarnation, SspReport]] = []

    def at_place(self, place: int) -> Incarnation:
        return Incarnation(place + 10 * self.deaths.get(place, 0))

    def say(self, worker: Incarnation, phase: SspPhase, clock: int) -> int:
        pace = SspReport(phase, self.turns.get(worker, 0), clock)
        self.said.append((worker, pace))
        self.clocks.report(worker, pace)
        return self.clocks._clocks.get(worker, clock)

    @rule(place=PLACES)
    def join(self, place: int) -> None:
        worker = self.at_place(place)
        if worker not in self.at:
            others = list(self.at.values())
            clock = self.say(worker, SspPhase.JOINS, 0)
            assert clock == min(others, default=0)
            self.at[worker] = clock
            self.look(place)

    @rule(place=PLACES)
    def step(self, place: int) -> None:
        worker = self.at_place(place)
        if worker in self.at and worker not in self.waits:
            self.at[worker] += 1
            self.say(worker, SspPhase.STEPS, self.at[worker])
            self.look(place)

    @rule(place=PLACES)
    def look(self, place: int) -> None:
        """Asks for values."""
        worker = self.at_place(place)
        if worker not in self.at:
            return
        others = [clock for other, clock in self.at.items() if other != worker]
        lacks = max((self.at[worker] - clock for clock in others), default=0)
        found = too_far_behind(
            self.clocks, worker, SspReport(SspPhase.STEPS, self.turns.get(worker, 0), self.at[worker])
        )
        assert (found is not None) == (lacks > self.bound)
        if found is None:
            self.waits.discard(worker)
        else:
            assert self.at[found[0]] == found[1] == min(others)
            self.waits.add(worker)

    @rule(place=PLACES)
    def rest(self, place: int) -> None:
        worker = self.at_place(place)
        if worker in self.at and worker not in self.waits:
            self.say(worker, SspPhase.RESTS, 0)
            self.turns[worker] = self.turns.get(worker, 0) + 1
            del self.at[worker]

    @rule(place=PLACES)
    def die(self, place: int) -> None:
        worker = self.at_place(place)
        if worker in self.at:
            self.clocks.forget([worker])
            del self.at[worker]
            self.waits.discard(worker)
            # who is fenced is not admitted any more: nothing of it comes late
            self.said = [each for each in self.said if each[0] != worker]
            self.deaths[place] = self.deaths.get(place, 0) + 1

    @rule(which=st.integers(0, 10_000))
    def hear_again(self, which: int) -> None:
        """What was said before comes once more, late."""
        if self.said:
            self.clocks.report(*self.said[which % len(self.said)])

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        if hasattr(self, "at") and self.at:
            slowest = min(self.at, key=lambda worker: self.at[worker])
            assert too_far_behind(self.clocks, slowest, SspReport(SspPhase.STEPS, 0, self.at[slowest])) is None

    @invariant()
    def most_is_within_the_bound(self) -> None:
        if hasattr(self, "clocks"):
            assert self.clocks.staleness_max <= self.bound


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

ONE, TWO, THREE = Incarnation(1), Incarnation(2), Incarnation(3)


def steps(clock: int, ahead: int = 0) -> SspReport:
    return SspReport(SspPhase.STEPS, 0, clock, ahead)


def test_who_is_expected_and_has_not_been_heard_is_waited_for() -> None:
    clocks = WorkerClocks(3)
    clocks.expect([ONE, TWO])
    clocks.report(ONE, steps(20))
    assert too_far_behind(clocks, ONE, steps(20)) == (TWO, UNREPORTED)
    clocks.report(TWO, steps(16))
    assert too_far_behind(clocks, ONE, steps(20)) == (TWO, 16)
    clocks.report(TWO, steps(17))
    assert too_far_behind(clocks, ONE, steps(20)) is None
    assert clocks.staleness_max == 3


def test_who_is_not_expected_any_more_is_not_waited_for_and_who_was_heard_is() -> None:
    clocks = WorkerClocks(0)
    clocks.expect([ONE, TWO])
    clocks.report(ONE, steps(5))
    clocks.expect([THREE])
    clocks.report(THREE, steps(5))
    assert too_far_behind(clocks, ONE, steps(5)) is None
    assert too_far_behind(clocks, THREE, steps(6)) == (ONE, 5)


def test_who_joins_beside_the_unheard_counts_from_the_slowest_that_was_heard() -> None:
    clocks = WorkerClocks(1)
    clocks.expect([ONE, TWO])
    clocks.report(ONE, steps(9))
    assert clocks.report(THREE, SspReport(SspPhase.JOINS, 0, 4)) == 9
    assert clocks.report(THREE, SspReport(SspPhase.JOINS, 0, 4)) == 9, "asked again"


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_values_that_are_used_later_wait_for_more(ahead: int) -> None:
    clocks = WorkerClocks(3)
    clocks.report(ONE, steps(10))
    clocks.report(TWO, steps(12))
    assert (too_far_behind(clocks, TWO, steps(12, ahead)) is None) == (2 + ahead <= 3)


def test_who_has_joined_and_is_heard_to_join_again_stands_where_it_stood() -> None:
    clocks = WorkerClocks(2)
    joins = SspReport(SspPhase.JOINS)
    assert [clocks.report(ONE, joins), clocks.report(TWO, joins)] == [0, 0]
    clocks.report(TWO, steps(2))
    assert clocks.report(ONE, joins) == 0, "a second copy of what it said"
    assert too_far_behind(clocks, TWO, steps(3)) == (ONE, 0)


def test_without_a_bound_nobody_is_behind_and_no_clock_is_kept_for_the_next_one() -> None:
    clocks = WorkerClocks(1)
    clocks.report(ONE, steps(2))
    clocks.set_bound(None, 1)
    clocks.expect([THREE])
    clocks.report(TWO, steps(4))
    assert too_far_behind(clocks, TWO, steps(90)) is None
    assert not clocks._clocks
    clocks.set_bound(1, 2)
    assert too_far_behind(clocks, TWO, steps(90)) is None
