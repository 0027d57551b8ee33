"""Trying again, under a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardyard.domain import errors
from shardyard_worker.session import retry as patience
from shardyard_worker.session.retry import PAUSE_MS, PAUSE_MS_MAX, RetryPolicy


class Time:
    """A stand-in for the module `time`: sleeping is what makes it pass."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.slept_ms: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.slept_ms.append(duration_s * 1000)
        assert len(self.slept_ms) < 10_000, "endless"
        self.now_s += duration_s


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(patience, "time", fake)
    return fake


def nothing() -> None:
    pass


def failing(*failures: Exception, then: str = "answer", calls: list[int] | None = None) -> Callable[[], str]:
    left = list(failures)

    def attempt() -> str:
        if calls is not None:
            calls.append(1)
        if left:
            raise left.pop(0)
        return then

    return attempt


def test_an_answer_costs_no_time(time: Time) -> None:
    assert RetryPolicy(1_000, nothing, "x").call(failing()) == "answer"
    assert time.slept_ms == []


def test_a_silent_peer_is_asked_again_with_growing_pauses(time: Time) -> None:
    silences = [errors.ServerUnavailable("silent") for _ in range(12)]
    assert RetryPolicy(60_000, nothing, "x").call(failing(*silences)) == "answer"
    bounds = [min(PAUSE_MS * 2**n, PAUSE_MS_MAX) for n in range(12)]
    assert len(time.slept_ms) == 12
    assert all(bound / 2 <= slept <= bound for slept, bound in zip(time.slept_ms, bounds, strict=True))


def test_a_peer_silent_for_the_whole_budget_is_given_up(time: Time) -> None:
    def attempt() -> str:
        raise errors.ServerUnavailable("silent")

    with pytest.raises(errors.ServerUnavailable):
        RetryPolicy(2_000, nothing, "x").call(attempt)
    assert 2_000 <= sum(time.slept_ms) <= 2_000 + PAUSE_MS_MAX


def test_a_budget_of_zero_asks_once(time: Time) -> None:
    calls: list[int] = []
    with pytest.raises(errors.DeadlineExceeded):
        RetryPolicy(0, nothing, "x").call(failing(errors.DeadlineExceeded("late"), calls=calls))
    assert len(calls) == 1


def test_one_who_is_not_ready_is_waited_for_beyond_the_budget(time: Time) -> None:
    waits = [errors.NotReady("step 3") for _ in range(100)]
    assert RetryPolicy(1_000, nothing, "x").call(failing(*waits)) == "answer"
    assert sum(time.slept_ms) > 10_000


def test_an_answer_begins_the_budget_anew(time: Time) -> None:
    silence, answer = errors.ServerUnavailable("silent"), errors.NotReady("soon")
    # each pair lasts up to a second; all of them far longer than the budget
    assert RetryPolicy(2_000, nothing, "x").call(failing(*[silence, answer] * 20)) == "answer"
    assert sum(time.slept_ms) > 4_000


@pytest.mark.parametrize("error", [errors.ServerUnavailable("silent"), errors.NotReady("soon")])
def test_a_failed_job_ends_the_wait(time: Time, error: errors.ShardyardError) -> None:
    def check() -> None:
        if len(time.slept_ms) >= 3:
            raise errors.ServerLost("server 2")

    def attempt() -> str:
        raise error

    with pytest.raises(errors.ServerLost):
        RetryPolicy(60_000, check, "x").call(attempt)
    assert len(time.slept_ms) == 3


def test_the_jobs_failure_goes_before_the_silence_that_it_caused(time: Time) -> None:
    failed = False

    def check() -> None:
        if failed:
            raise errors.ServerLost("server 2")

    def attempt() -> str:
        nonlocal failed
        failed = True
        raise errors.ServerUnavailable("the channel is closed")

    with pytest.raises(errors.ServerLost):
        RetryPolicy(0, check, "x").call(attempt)


def test_a_refusal_is_not_repeated(time: Time) -> None:
    calls: list[int] = []
    with pytest.raises(errors.StaleToken):
        RetryPolicy(60_000, nothing, "x").call(failing(errors.StaleToken("old"), calls=calls))
    assert len(calls) == 1


def test_what_is_waited_for_is_told_while_it_lasts_and_why() -> None:
    told: list[str] = []
    patience = RetryPolicy(1_000, lambda: told.append(patience.explanation), "push logical rank 1 #3 on server 2")
    patience.call(failing(errors.NotReady("step 3 in partition 5")))
    assert told == ["push logical rank 1 #3 on server 2", "push logical rank 1 #3 on server 2 (step 3 in partition 5)"]


def test_silence_is_borne_and_explained_for_as_long_as_there_is_something_to_hope_for(time: Time) -> None:
    hopes = ["partitions wait to be restored"] * 40
    told: list[str] = []

    def check() -> None:
        told.append(waiting.explanation)

    waiting = RetryPolicy(1_000, check, "rows to come", worthwhile=lambda: hopes.pop() if hopes else "")
    with pytest.raises(errors.Unavailable):
        waiting.call(failing(*[errors.ServerUnavailable("server 1 does not answer")] * 500))
    assert "rows to come; partitions wait to be restored" in told
    assert "rows to come (server 1 does not answer); partitions wait to be restored" in told
    assert told[-1] == "rows to come (server 1 does not answer)"
    assert time.now_s - 1_000 > 2
