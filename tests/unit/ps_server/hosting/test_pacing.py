"""A server's bound on staleness while the job is switched: which order is in force, whom it lets go."""

from __future__ import annotations

import threading
import time

import pytest

from shardyard.domain.consistency import SspPhase, SspReport
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Incarnation
from shardyard_ps_server.hosting.pacing import SspPacing

FAST, SLOW = Incarnation(3), Incarnation(4)


def pace(clock: int, stride: SspPhase = SspPhase.STEPS, ahead: int = 0) -> SspReport:
    return SspReport(stride, 0, clock, ahead)


def waits(pacing: SspPacing, clock: int, ahead: int = 0) -> str:
    """Whom the fast worker waits for now."""
    return pacing.await_others(FAST, pace(clock, ahead=ahead), time.monotonic())


def made(bound: int | None, fast: int, slow: int) -> SspPacing:
    pacing = SspPacing(bound)
    pacing.hear(FAST, pace(fast))
    pacing.hear(SLOW, pace(slow))
    return pacing


def test_without_a_bound_nobody_is_waited_for_and_paces_are_not_kept() -> None:
    pacing = made(None, 90, 2)
    pacing.expect([Incarnation(9)])
    assert waits(pacing, 90) == ""
    assert pacing.hear(FAST, pace(7, SspPhase.JOINS)) == 7
    pacing.switch(1, 1)
    assert waits(pacing, 90) == "", "what was said before there was a bound does not count"
    assert pacing.staleness_max == 0


def test_bound_that_ends_lets_go_whoever_waits() -> None:
    pacing = made(1, 9, 2)
    assert "worker 4" in waits(pacing, 9)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(pacing.await_others(FAST, pace(9), time.monotonic() + 30)))
    thread.start()
    pacing.switch(None, 1)
    thread.join(20)
    assert found == [""]
    assert pacing.bound is None


def test_another_bound_keeps_the_clocks() -> None:
    pacing = made(9, 9, 2)
    assert waits(pacing, 9) == ""
    assert pacing.staleness_max == 7
    pacing.switch(3, 1)
    assert "to have taken 6 (staleness 3)" in waits(pacing, 9)
    assert pacing.staleness_max == 0, "what was given under the bound before"
    pacing.switch(7, 2)
    assert waits(pacing, 9) == ""


def test_the_order_of_the_later_switch_is_in_force_whichever_comes_last() -> None:
    pacing = SspPacing(3, 4)
    pacing.switch(None, 3)
    assert pacing.bound == 3
    pacing.switch(None, 5)
    pacing.switch(3, 4)
    assert pacing.bound is None
    assert pacing.agrees(2, 4)
    assert pacing.agrees(None, 5)
    assert not pacing.agrees(3, 5)


def test_window_beyond_the_bound_is_refused_unless_the_job_was_switched_to_it() -> None:
    with pytest.raises(InvalidRequest, match="with a bound of 1"):
        waits(SspPacing(1), 5, ahead=2)
    pacing = made(3, 5, 5)
    pacing.switch(0, 1)
    assert waits(pacing, 5, ahead=2) == "", "it has not heard of this bound yet"
    assert "to have taken 6" in waits(pacing, 6, ahead=2)


def test_who_is_refused_is_waited_for_by_nobody_with_a_bound_or_without() -> None:
    pacing = made(1, 9, 2)
    pacing.forget([SLOW])
    assert waits(pacing, 9) == ""
    made(None, 9, 2).forget([SLOW])


def test_what_comes_late_of_a_turn_that_ended_counts_nothing_under_the_next_bound() -> None:
    pacing = made(1, 3, 2)
    pacing.switch(None, 1)
    pacing.hear(SLOW, pace(0, SspPhase.RESTS))  # as it goes over; it says no pace until there is a bound again
    pacing.switch(1, 2)
    pacing.hear(SLOW, pace(2))
    assert waits(pacing, 9) == "", "it would be waited for, and has no word to say"
    pacing.hear(SLOW, SspReport(SspPhase.JOINS, 1, 5))
    assert "to have taken 8" in waits(pacing, 9)
