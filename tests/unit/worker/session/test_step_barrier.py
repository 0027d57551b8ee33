"""How far a worker goes when its job is told to stop."""

from __future__ import annotations

from shardyard.domain.consistency import Stop, SwitchPoint
from shardyard.domain.ids import Incarnation
from shardyard_worker.session.step_barrier import StepBarrier

ASKED = Stop("enough", Incarnation(3))


def test_without_a_stop_every_step_begins_and_nobody_waits() -> None:
    brake = StepBarrier()
    assert [brake.may_begin(step) for step in (0, 0, 1, 7)] == [True] * 4
    assert (brake.stop, brake.end, brake.heard) == (None, None, None)


def test_from_the_news_of_a_stop_no_further_step_begins_until_it_is_settled() -> None:
    brake = StepBarrier()
    brake.may_begin(4)
    brake.take(ASKED)
    assert (brake.heard, brake.end) == (5, None)
    assert [brake.permits(step) for step in (3, 4, 5)] == [None] * 3
    assert brake.heard == 5
    brake.take(Stop("enough", Incarnation(3), True, 6))
    assert [brake.may_begin(step) for step in (4, 5, 6, 7)] == [True, True, False, False]
    assert (brake.heard, brake.end) == (None, 6)


def test_step_that_is_begun_when_the_news_comes_is_in_what_the_worker_says() -> None:
    brake = StepBarrier()
    brake.may_begin(4)
    brake.take(ASKED)
    assert brake.may_begin(5) is None
    assert brake.heard == 6


def test_what_is_only_asked_about_is_not_begun() -> None:
    brake = StepBarrier()
    assert brake.permits(4) is True
    brake.take(ASKED)
    assert (brake.heard, brake.permits(0)) == (0, None)
    brake.take(Stop("enough", None, True, 6))
    assert [brake.permits(step) for step in (5, 6)] == [True, False]


def test_what_is_settled_stays_so() -> None:
    brake = StepBarrier()
    settled = Stop("enough", None, True, 6)
    brake.take(settled)
    brake.take(ASKED)
    brake.take(Stop("", None, True, 9))
    assert brake.stop == settled


def test_worker_that_has_begun_nothing_says_so() -> None:
    brake = StepBarrier()
    brake.take(ASKED)
    assert (brake.heard, brake.permits(0)) == (0, None)


def test_without_a_halt_the_steps_go_on_and_with_one_they_wait_where_it_is_settled() -> None:
    brake = StepBarrier()
    assert (brake.halted, brake.halts) == (None, False)
    brake.may_begin(4)
    brake.take_halt(SwitchPoint(2))
    assert (brake.halted, brake.halts) == ((2, 5), False)
    assert [brake.permits(step) for step in (3, 4, 5)] == [None] * 3
    brake.take_halt(SwitchPoint(2, True, 6))
    assert (brake.halted, brake.halts) == (None, True)
    assert [brake.may_begin(step) for step in (4, 5, 6, 7)] == [True, True, None, None]
    brake.take_halt(None)
    assert brake.may_begin(6) is True


def test_stop_ends_steps_that_a_halt_would_hold() -> None:
    brake = StepBarrier()
    brake.take_halt(SwitchPoint(1, True, 6))
    brake.take(ASKED)
    assert brake.permits(6) is None
    brake.take(Stop("enough", Incarnation(3), True, 6))
    assert [brake.permits(step) for step in (5, 6)] == [True, False]


def test_halt_that_drains_lets_no_push_of_the_workers_own_begin_and_steps_go_on() -> None:
    brake = StepBarrier()
    assert brake.begin_own()
    brake.take_halt(SwitchPoint(2, drains=True))
    assert (brake.halted, brake.drains, brake.begin_own()) == ((2, 1), True, False)
    assert brake.permits(5), "where there are steps it is over"
    brake.take_halt(SwitchPoint(2, True, 9, drains=True))
    assert (brake.halted, brake.begin_own()) == (None, False)
    brake.take_halt(None)
    assert brake.begin_own()


def test_steps_that_a_worker_has_taken_are_no_pushes_of_its_own() -> None:
    brake = StepBarrier()
    brake.may_begin(41)
    brake.take_halt(SwitchPoint(1, drains=True))
    assert brake.halted == (1, 0)
    brake.take_halt(SwitchPoint(2))
    assert brake.halted == (2, 42)
