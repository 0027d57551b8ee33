"""How many requests a second a caller may make."""

from __future__ import annotations

import pytest

from shardyard.domain import errors
from shardyard.security import request_rates
from shardyard.security.door import Door
from shardyard.security.identity import Identity, Role
from shardyard.security.passes import Speaker
from shardyard.security.request_rates import RequestRates


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_caller_has_a_second_of_requests_at_once_and_then_the_rate() -> None:
    clock = Clock()
    rates = RequestRates(50, now_s=clock)
    assert sum(rates.admits("a") for _ in range(200)) == 50
    admitted = 0
    for _ in range(1_000):
        clock.now_s += 0.01
        admitted += sum(rates.admits("a") for _ in range(5))
    assert admitted == pytest.approx(500, abs=1)
    clock.now_s += 3_600
    assert sum(rates.admits("a") for _ in range(200)) == 50


def test_callers_do_not_take_from_each_other() -> None:
    rates = RequestRates(10, now_s=Clock())
    assert [sum(rates.admits(caller) for _ in range(30)) for caller in ("a", "b")] == [10, 10]


def test_requests_that_wait_are_due_one_after_the_other() -> None:
    clock = Clock()
    rates = RequestRates(4, now_s=clock)
    assert [rates.due_s("a") - clock.now_s for _ in range(7)] == pytest.approx([0, 0, 0, 0, 0.25, 0.5, 0.75])
    assert not rates.admits("a")
    clock.now_s += 1.0
    assert rates.admits("a")


def test_log_says_once_a_minute_that_a_caller_makes_too_many(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    rates = RequestRates(5, now_s=clock)
    for _ in range(120):
        clock.now_s += 1.0
        for _ in range(10):
            rates.admits("job 1.1")
        rates.admits("job 1.2")
    told = [record.getMessage() for record in caplog.records]
    assert told == ["job 1.1 is held to 5 requests a second (quotas.requests_per_s_max)"] * 2


def test_callers_that_are_quiet_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_rates, "_KNOWN_MAX", 10)
    clock = Clock()
    rates = RequestRates(1_000, now_s=clock)
    for number in range(100):
        clock.now_s += 1.0
        assert rates.admits(f"worker {number}")
    assert len(rates._next_s) <= 10


def test_door_counts_the_calls_of_a_job_together_and_others_by_certificate() -> None:
    door = Door(rates=RequestRates(2, now_s=Clock()))
    for name in ("w-1", "w-2"):
        caller = Speaker(Identity("yard-1", Role.WORKER, name), None)
        for _ in range(2):
            with door.call_of(caller):
                pass
        with (
            pytest.raises(errors.NotReady, match=rf"worker {name} makes more than 2 requests a second"),
            door.call_of(caller),
        ):
            pass
