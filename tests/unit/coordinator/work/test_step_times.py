"""How long the step under way is worth waiting out, for one who came late (docs/internals/ledger.md, rule B6)."""

from __future__ import annotations

import pytest

from shardyard_coordinator.work.step_times import LEFT_MS_MAX, LENGTHS_KEPT, StepTimes


def decided(*at_ms: int) -> StepTimes:
    """Step after step, at these times."""
    times = StepTimes()
    for step, now_ms in enumerate(at_ms):
        times.decide(step, now_ms)
    return times


@pytest.mark.parametrize(
    ("age_ms", "left_ms"),
    [(0, 0), (24, 0), (25, 100), (60, 65), (124, 1), (125, 0), (10_000, 0)],
    ids=["begun", "hardly begun", "a quarter", "in the midst", "late", "overdue", "stalled"],
)
def test_who_comes_in_the_midst_of_a_step_waits_for_the_next(age_ms: int, left_ms: int) -> None:
    times = decided(0, 100, 200)
    assert times.left_ms(3, 200 + age_ms) == left_ms


def test_one_step_that_stood_still_is_not_the_usual_one() -> None:
    assert decided(0, 100, 200, 9_000, 9_100, 9_200).left_ms(6, 9_250) == 75


def test_lengths_are_those_of_the_last_steps() -> None:
    long_ago = [1_000 * each for each in range(50)]
    lately = [long_ago[-1] + 10 * each for each in range(1, LENGTHS_KEPT + 1)]
    times = decided(*long_ago, *lately)
    assert times.left_ms(len(long_ago) + len(lately), lately[-1] + 5) == 8


def test_nothing_is_known_of_another_step_or_before_two_are_decided() -> None:
    assert StepTimes().left_ms(0, 50) == 0
    assert decided(0).left_ms(1, 50) == 0
    times = decided(0, 100)
    assert times.left_ms(2, 150) == 75
    assert [times.left_ms(step, 150) for step in (0, 1, 3)] == [0, 0, 0]


def test_a_step_that_was_not_heard_of_has_no_length() -> None:
    """The job went back, or the verdicts were another life's."""
    times = decided(0, 100)
    times.decide(7, 5_000)
    assert times.left_ms(8, 5_050) == 75
    times.decide(3, 6_000)
    assert times.left_ms(4, 6_050) == 75


def test_others_are_waited_for_from_when_enough_are_there() -> None:
    times = decided(0, 100, 200)
    asked = [(270, 10), (275, 5), (280, 0), (300, 0)]
    assert [times.patience_ms(3, 0.1, at_ms) for at_ms, _ in asked] == [left_ms for _, left_ms in asked]
    assert times.patience_ms(4, 0.1, 300) == 10, "of another step"
    times.decide(4, 310)
    assert times.patience_ms(5, 0.0, 400) == 0


def test_nobody_is_waited_for_where_no_length_is_known() -> None:
    assert StepTimes().patience_ms(0, 1.0, 50) == 0
    assert decided(0).patience_ms(1, 1.0, 50) == 0


def test_part_of_a_millisecond_is_one() -> None:
    assert decided(0, 15).patience_ms(2, 0.1, 20) == 2


def test_advice_is_bounded() -> None:
    year_ms = 31_536_000_000
    assert decided(0, year_ms).left_ms(2, year_ms + year_ms // 2) == LEFT_MS_MAX
    assert decided(0, year_ms).patience_ms(2, 1.0, year_ms) == LEFT_MS_MAX
