"""Look-ups that are under way while steps before theirs are computed: each is taken once, at its step, or never."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from shardyard.ground.errors import ServerUnavailable, StaleGeneration
from shardyard.runtime.waiting import Vigil
from shardyard_worker.distinct import distinct
from shardyard_worker.router import MapChanged
from shardyard_worker.rows_ahead import Asked, RowsAhead
from shardyard_worker.rows_in_flight import RowsInFlight

DEADLINE_S = 30.0


def rows() -> RowsAhead:
    return RowsAhead([Asked(0, distinct(np.array([3, 5])), 2)])


def assert_came(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)


def nothing() -> None:
    """Everything has come."""


@pytest.fixture
def flights() -> Iterator[RowsInFlight]:
    vigil = Vigil()
    made = RowsInFlight(2, vigil)
    yield made
    made.close()
    vigil.close()


def test_rows_are_taken_at_their_step_once_they_have_come(flights: RowsInFlight) -> None:
    come, ahead = threading.Event(), rows()

    def ask() -> None:
        assert_came(come)
        ahead.rows[0][:] = 7.0

    flights.begin(4, ahead, ask)
    assert 4 in flights
    threading.Timer(0.05, come.set).start()
    assert flights.take(4) is ahead
    assert (ahead.rows[0] == 7.0).all()
    assert flights.take(4) is None


def test_what_was_asked_for_steps_before_is_not_taken_and_what_comes_later_stays(flights: RowsInFlight) -> None:
    before, later = rows(), rows()
    flights.begin(3, before, nothing)
    flights.begin(5, later, nothing)
    assert flights.take(4) is None
    assert 3 not in flights
    assert flights.take(5) is later


def test_who_goes_over_to_another_map_takes_nothing_of_before(flights: RowsInFlight) -> None:
    flights.begin(3, rows(), nothing)
    flights.clear()
    assert flights.take(3) is None


@pytest.mark.parametrize(
    "error", [ServerUnavailable("it is gone"), StaleGeneration("an old map"), MapChanged(), RuntimeError("closed")]
)
def test_a_look_up_that_fails_is_as_one_that_was_never_made(flights: RowsInFlight, error: Exception) -> None:
    def fail() -> None:
        raise error

    flights.begin(3, rows(), fail)
    assert flights.take(3) is None


def test_an_error_of_ones_own_is_raised(flights: RowsInFlight) -> None:
    def fail() -> None:
        raise AssertionError("a mistake")

    flights.begin(3, rows(), fail)
    with pytest.raises(AssertionError, match="a mistake"):
        flights.take(3)


def test_a_wait_says_what_it_waits_for(flights: RowsInFlight) -> None:
    come = threading.Event()
    flights.begin(3, rows(), lambda: assert_came(come))
    found: list[str] = []

    def look() -> None:
        vigil = flights._vigil
        while not found:
            found.extend(wait.describe() for wait in list(vigil._waits))
        come.set()

    looking = threading.Thread(target=look)
    looking.start()
    assert flights.take(3) is not None
    looking.join(DEADLINE_S)
    assert found[0].startswith("rows of step 3, which are looked up ahead")


def test_no_thread_is_left() -> None:
    vigil = Vigil()
    made = RowsInFlight(2, vigil)
    made.begin(3, rows(), nothing)
    made.close()
    vigil.close()
    assert not [each.name for each in threading.enumerate() if each.name.startswith("rows ahead")]
