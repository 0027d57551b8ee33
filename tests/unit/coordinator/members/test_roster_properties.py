"""The numbers of workers: each the lowest that was free when it joined, whoever comes and goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardyard.domain.ids import Incarnation
from shardyard_coordinator.members.roster import Roster


@given(st.lists(st.integers(0, 8), max_size=60))
def test_a_worker_gets_the_lowest_free_number(steps: list[int]) -> None:
    """A step of 0 lets a worker join, another one lets the worker at that place leave."""
    roster, numbers, came = Roster(0), dict[Incarnation, int](), 0
    for step in steps:
        if step == 0 or not numbers:
            came += 1
            worker = Incarnation(came)
            roster.enter(worker)
            numbers[worker] = min(set(range(len(numbers) + 1)) - set(numbers.values()))
        else:
            worker = list(numbers)[step % len(numbers)]
            roster.leave(worker, "left", 0, goodbye=False)
            del numbers[worker]
        assert roster.numbers == numbers
        assert roster.living == sorted(numbers)
        assert roster.numbers_end == max(numbers.values(), default=-1) + 1
        assert [roster.has(number) for number in range(9)] == [number in numbers.values() for number in range(9)]


@given(st.lists(st.integers(0, 20), unique=True, max_size=12))
def test_numbers_that_are_restored_in_any_order_leave_the_others_free(given_numbers: list[int]) -> None:
    roster = Roster(0)
    for place, number in enumerate(given_numbers, 1):
        roster.enter_as(Incarnation(place), number)
    free = sorted(set(range(40)) - set(given_numbers))
    for place in range(5):
        roster.enter(Incarnation(100 + place))
        assert roster.numbers[Incarnation(100 + place)] == free[place]
