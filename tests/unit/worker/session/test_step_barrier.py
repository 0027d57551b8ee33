"""How far a worker goes when its job is told to stop."""

from __future__ import annotations

from shardyard.domain.consistency import Stop, SwitchPoint
from shardyard.domain.ids import Incarnation
from shardyard_worker.session.step_barrier import StepBarrier

ASKED = Stop("enough", Incarnation(3))


def test_without_a_stop_every_step_begins_and_nobody_waits() -> None:
    barrier = StepBarrier()
    assert [barrier.may_begin(step) for step in (0, 0, 1, 7)] == [True] * 4
    assert (barrier.stop, barrier.end, barrier.stop_report) == (None, None, None)


def test_from_the_news_of_a_stop_no_further_step_begins_until_it_is_settled() -> None:
    barrier = StepBarrier()
    barrier.may_begin(4)
    barrier.take_stop(ASKED)
    assert (barrier.stop_report, barrier.end) == (5, None)
    assert [barrier.permits(step) for step in (3, 4, 5)] == [None] * 3
    assert barrier.stop_report == 5
    barrier.take_stop(Stop("enough", Incarnation(3), True, 6))
    assert [barrier.may_begin(step) for step in (4, 5, 6, 7)] == [True, True, False, False]
    assert (barrier.stop_report, barrier.end) == (None, 6)


def test_step_that_is_begun_when_the_news_comes_is_in_what_the_worker_says() -> None:
    barrier = StepBarrier()
    barrier.may_begin(4)
    barrier.take_stop(ASKED)
    assert barrier.may_begin(5) is None
    assert barrier.stop_report == 6


def test_workers_stop_together_at_the_step_of_a_switch_once_it_is_fixed() -> None:
    barrier = StepBarrier()
    assert not barrier.is_at_switch(7)
    barrier.take_switch_point(SwitchPoint(1))
    assert not barrier.is_at_switch(7)
    barrier.take_switch_point(SwitchPoint(1, True, 7))
    assert [barrier.is_at_switch(step) for step in (6, 7, 8)] == [False, True, True]
    barrier.take_switch_point(SwitchPoint(1, True, 7, to_steps=True))
    assert not barrier.is_at_switch(7)


def test_what_is_only_asked_about_is_not_begun() -> None:
    barrier = StepBarrier()
    assert barrier.permits(4) is True
    barrier.take_stop(ASKED)
    assert (barrier.stop_report, barrier.permits(0)) == (0, None)
    barrier.take_stop(Stop("enough", None, True, 6))
    assert [barrier.permits(step) for step in (5, 6)] == [True, False]


def test_what_is_settled_stays_so() -> None:
    barrier = StepBarrier()
    settled = Stop("enough", None, True, 6)
    barrier.take_stop(settled)
    barrier.take_stop(ASKED)
    barrier.take_stop(Stop("", None, True, 9))
    assert barrier.stop == settled


def test_worker_that_has_begun_nothing_says_so() -> None:
    barrier = StepBarrier()
    barrier.take_stop(ASKED)
    assert (barrier.stop_report, barrier.permits(0)) == (0, None)


def test_without_a_halt_the_steps_go_on_and_with_one_they_wait_where_it_is_settled() -> None:
    barrier = StepBarrier()
    assert (barrier.switch_report, barrier.switches) == (None, False)
    barrier.may_begin(4)
    barrier.take_switch_point(SwitchPoint(2))
    assert (barrier.switch_report, barrier.switches) == ((2, 5), False)
    assert [barrier.permits(step) for step in (3, 4, 5)] == [None] * 3
    barrier.take_switch_point(SwitchPoint(2, True, 6))
    assert (barrier.switch_report, barrier.switches) == (None, True)
    assert [barrier.may_begin(step) for step in (4, 5, 6, 7)] == [True, True, None, None]
    barrier.take_switch_point(None)
    assert barrier.may_begin(6) is True


def test_stop_ends_steps_that_a_halt_would_hold() -> None:
    barrier = StepBarrier()
    barrier.take_switch_point(SwitchPoint(1, True, 6))
    barrier.take_stop(ASKED)
    assert barrier.permits(6) is None
    barrier.take_stop(Stop("enough", Incarnation(3), True, 6))
    assert [barrier.permits(step) for step in (5, 6)] == [True, False]


def test_halt_that_drains_lets_no_push_of_the_workers_own_begin_and_steps_go_on() -> None:
    barrier = StepBarrier()
    assert barrier.begin_own()
    barrier.take_switch_point(SwitchPoint(2, to_steps=True))
    assert (barrier.switch_report, barrier.to_steps, barrier.begin_own()) == ((2, 1), True, False)
    assert barrier.permits(5), "where there are steps it is over"
    barrier.take_switch_point(SwitchPoint(2, True, 9, to_steps=True))
    assert (barrier.switch_report, barrier.begin_own()) == (None, False)
    barrier.take_switch_point(None)
    assert barrier.begin_own()


def test_steps_that_a_worker_has_taken_are_no_pushes_of_its_own() -> None:
    barrier = StepBarrier()
    barrier.may_begin(41)
    barrier.take_switch_point(SwitchPoint(1, to_steps=True))
    assert barrier.switch_report == (1, 0)
    barrier.take_switch_point(SwitchPoint(2))
    assert barrier.switch_report == (2, 42)
