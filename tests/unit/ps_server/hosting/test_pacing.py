"""A server's bound on staleness while the job is switched: which order is in force, whom it lets go."""

from __future__ import annotations

import threading
import time

import pytest

from shardyard.domain.consistency import SspPhase, SspReport
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Incarnation
from shardyard_ps_server.hosting.worker_clocks import WorkerClocks

FAST, SLOW = Incarnation(3), Incarnation(4)


def pace(clock: int, phase: SspPhase = SspPhase.STEPS, ahead: int = 0) -> SspReport:
    return SspReport(phase, 0, clock, ahead)


def waits(clocks: WorkerClocks, clock: int, ahead: int = 0) -> str:
    """Whom the fast worker waits for now."""
    return clocks.await_slower(FAST, pace(clock, ahead=ahead), time.monotonic())


def made(bound: int | None, fast: int, slow: int) -> WorkerClocks:
    clock = WorkerClocks(bound)
    clock.report(FAST, pace(fast))
    clock.report(SLOW, pace(slow))
    return clock


def test_without_a_bound_nobody_is_waited_for_and_paces_are_not_kept() -> None:
    clock = made(None, 90, 2)
    clock.expect([Incarnation(9)])
    assert waits(clock, 90) == ""
    assert clock.report(FAST, pace(7, SspPhase.JOINS)) == 7
    clock.set_bound(1, 1)
    assert waits(clock, 90) == "", "what was said before there was a bound does not count"
    assert clock.staleness_max == 0


def test_bound_that_ends_lets_go_whoever_waits() -> None:
    clock = made(1, 9, 2)
    assert "worker 4" in waits(clock, 9)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(clock.await_slower(FAST, pace(9), time.monotonic() + 30)))
    thread.start()
    clock.set_bound(None, 1)
    thread.join(20)
    assert found == [""]
    assert clock.bound is None


def test_another_bound_keeps_the_clocks() -> None:
    clock = made(9, 9, 2)
    assert waits(clock, 9) == ""
    assert clock.staleness_max == 7
    clock.set_bound(3, 1)
    assert "to reach clock 6 (staleness 3)" in waits(clock, 9)
    assert clock.staleness_max == 0, "what was given under the bound before"
    clock.set_bound(7, 2)
    assert waits(clock, 9) == ""


def test_the_order_of_the_later_switch_is_in_force_whichever_comes_last() -> None:
    clock = WorkerClocks(3, 4)
    clock.set_bound(None, 3)
    assert clock.bound == 3
    clock.set_bound(None, 5)
    clock.set_bound(3, 4)
    assert clock.bound is None
    assert clock.agrees(2, 4)
    assert clock.agrees(None, 5)
    assert not clock.agrees(3, 5)


def test_window_beyond_the_bound_is_refused_unless_the_job_was_switched_to_it() -> None:
    with pytest.raises(InvalidRequest, match="with a bound of 1"):
        waits(WorkerClocks(1), 5, ahead=2)
    clock = made(3, 5, 5)
    clock.set_bound(0, 1)
    assert waits(clock, 5, ahead=2) == "", "it has not heard of this bound yet"
    assert "to reach clock 6" in waits(clock, 6, ahead=2)


def test_who_is_refused_is_waited_for_by_nobody_with_a_bound_or_without() -> None:
    clock = made(1, 9, 2)
    clock.forget([SLOW])
    assert waits(clock, 9) == ""
    made(None, 9, 2).forget([SLOW])


def test_what_comes_late_of_a_turn_that_ended_counts_nothing_under_the_next_bound() -> None:
    clock = made(1, 3, 2)
    clock.set_bound(None, 1)
    clock.report(SLOW, pace(0, SspPhase.RESTS))  # as it goes over; it says no pace until there is a bound again
    clock.set_bound(1, 2)
    clock.report(SLOW, pace(2))
    assert waits(clock, 9) == "", "it would be waited for, and has no word to say"
    clock.report(SLOW, SspReport(SspPhase.JOINS, 1, 5))
    assert "to reach clock 8" in waits(clock, 9)
