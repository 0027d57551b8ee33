"""The budget of restarts: how soon, how often, and when a process is given up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardyard.runtime.restart_policy import BACKOFF_MS, BACKOFF_MS_MAX, GivenUp, RestartAt, RestartPolicy

WINDOW_MS = 60_000


def policy(restarts_max: int, window_ms: int = WINDOW_MS) -> RestartPolicy:
    return RestartPolicy(restarts_max=restarts_max, window_ms=window_ms, setting="yard.restarts_max")


def test_pause_doubles_up_to_its_limit_and_then_the_process_is_given_up() -> None:
    core, now_ms, pauses = policy(7), 1_000, []
    for number in range(1, 8):
        decided = core.died("server-0", now_ms)
        assert isinstance(decided, RestartAt)
        assert decided.number == number
        pauses.append(decided.at_ms - now_ms)
        now_ms = decided.at_ms + 1
    assert pauses == [200, 400, 800, 1_600, 3_200, 5_000, 5_000]
    given_up = core.died("server-0", now_ms)
    assert given_up == GivenUp("it was restarted 7 times within 60 s (yard.restarts_max)")


def test_who_was_given_up_stays_given_up() -> None:
    core = policy(1)
    assert isinstance(core.died("agent", 0), RestartAt)
    assert isinstance(core.died("agent", 1), GivenUp)
    assert core.died("agent", 10 * WINDOW_MS) == GivenUp("it was restarted once within 60 s (yard.restarts_max)")


def test_each_process_has_a_budget_of_its_own() -> None:
    core = policy(1)
    assert core.died("server-0", 0) == RestartAt(BACKOFF_MS, 1)
    assert core.died("server-1", 0) == RestartAt(BACKOFF_MS, 1)
    assert isinstance(core.died("server-0", 1_000), GivenUp)


def test_window_that_has_passed_gives_the_budget_back() -> None:
    core = policy(2)
    assert core.died("server-0", 0) == RestartAt(BACKOFF_MS, 1)
    # counted from the restart, not from the death
    assert core.died("server-0", WINDOW_MS + BACKOFF_MS - 1) == RestartAt(WINDOW_MS + 3 * BACKOFF_MS - 1, 2)
    assert core.died("server-0", 2 * WINDOW_MS + 3 * BACKOFF_MS) == RestartAt(2 * WINDOW_MS + 4 * BACKOFF_MS, 1)


def test_budget_of_none_gives_up_at_the_first_death() -> None:
    decided = policy(0).died("coordinator", 5)
    assert decided == GivenUp("restarts are off (yard.restarts_max is 0)")


@given(
    st.integers(0, 6),
    st.integers(1_000, 60_000),
    st.lists(st.integers(0, 40_000), max_size=40),
)
def test_no_window_holds_more_restarts_than_allowed(restarts_max: int, window_ms: int, lives_ms: list[int]) -> None:
    core, now_ms, restarts = policy(restarts_max, window_ms), 0, []
    for life_ms in lives_ms:
        now_ms += life_ms
        decided = core.died("server-0", now_ms)
        if isinstance(decided, GivenUp):
            break
        assert now_ms + BACKOFF_MS <= decided.at_ms <= now_ms + BACKOFF_MS_MAX
        now_ms = decided.at_ms
        restarts.append(now_ms)
    for at_ms in restarts:
        assert sum(at_ms <= other < at_ms + window_ms for other in restarts) <= restarts_max
