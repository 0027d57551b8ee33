"""A worker that is told to leave, in a yard inside this process: what it hands back, and what the job makes of it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

import shardyard as sy
from shardyard.config import configuration
from shardyard.runtime.restart_policy import LEFT_IN_ORDER
from shardyard_worker.session import departure as departure_module
from shardyard_worker.session.departure import Departure
from shardyard_worker.session.drain import Drain, Drained
from tests.support.alone import SYNC, Counted, local_yard, status
from tests.support.waiting import wait_until

SAMPLES, BATCH = 24, 2
QUICK: Mapping[str, object] = {"membership.heartbeat_ms": 20, "job.workers_expected": 2, "job.rank_grace_ms": 600_000}
LOCAL = SYNC | {"job.consistency.mode": "local", "job.consistency.steps": 3}


def train(job: sy.Job, *, accumulate: int, leave_at: int = 0) -> tuple[int, list[float]]:
    """Returns how many batches were computed, and the counts that this worker has seen. `leave_at`: the batch during
    which it is told to leave."""
    computed = 0
    counted = Counted(job, SAMPLES)
    with contextlib.suppress(Drained):
        with job:
            for (index,) in job.batches(counted.data, batch_size=BATCH, accumulate=accumulate):
                counted.compute(index)
                computed += 1
                if computed == leave_at:
                    job.drain()
                if job.step_due:
                    counted.optimizer.step()
                    counted.optimizer.zero_grad()
            assert not leave_at, "the script goes on after its loop"
            return computed, counted.counts
    return computed, []


@pytest.mark.parametrize(
    ("given", "accumulate", "leave_at", "pushed"),
    [
        pytest.param({}, 1, 3, 3, id="async"),
        pytest.param({}, 2, 3, 2, id="async, accumulated"),
        pytest.param(SYNC, 1, 3, 3, id="sync"),
        pytest.param(SYNC, 2, 3, 2, id="sync, accumulated"),
        pytest.param(LOCAL, 1, 3, 3, id="local, after a round"),
        pytest.param(LOCAL, 1, 4, 3, id="local, within a round"),
    ],
)
def test_what_is_not_pushed_is_handed_back_and_computed_by_another(
    alone: None, given: Mapping[str, object], accumulate: int, leave_at: int, pushed: int
) -> None:
    with local_yard({**QUICK, **given}) as (_, connect):
        assert train(connect(), accumulate=accumulate, leave_at=leave_at) == (leave_at, [])
        computed, counts = train(connect(), accumulate=accumulate)
    with local_yard({**QUICK, **given}) as (_, connect):
        _, undisturbed = train(connect(), accumulate=accumulate)
    assert counts == undisturbed
    assert computed == SAMPLES // BATCH - pushed


@pytest.mark.parametrize("given", [{}, SYNC], ids=["async", "sync"])
def test_another_worker_becomes_chief_and_the_job_goes_on(alone: None, given: Mapping[str, object]) -> None:
    with local_yard({**QUICK, **given}) as (yard, connect):
        first, second = connect(), connect()
        assert first.chief
        first.drain()
        assert (first.chief, first.should_stop, first.stopping) == (False, True, None)
        with pytest.raises(Drained) as ended:
            first.close()
        assert ended.value.code == LEFT_IN_ORDER, "as at the end of a `with` block"
        first.close()
        wait_until(lambda: second.chief)
        assert (second.should_stop, status(yard).workers) == (False, 1)
        second.close("the end")


def test_step_after_should_stop_ends_a_script_with_a_loop_of_its_own_and_counts(alone: None) -> None:
    with local_yard(QUICK) as (_, connect):
        job = connect()
        counted = Counted(job, SAMPLES)
        job.drain()
        counted.step(counted.data.tensors[0])
        with pytest.raises(Drained) as ended:
            counted.step(counted.data.tensors[0])
        assert (ended.value.code, job.step) == (LEFT_IN_ORDER, 2)
        job.close()


def test_close_hides_no_error_of_the_script(alone: None) -> None:
    with local_yard(QUICK) as (_, connect):
        job = connect()
        job.drain()
        assert job.should_stop
        with pytest.raises(ValueError, match="the script's own"), contextlib.closing(job):
            raise ValueError("the script's own")


def test_script_that_ends_without_leaving_is_told_that_its_exit_code_is_wrong(
    alone: None, caplog: pytest.LogCaptureFixture
) -> None:
    with local_yard(QUICK) as (_, connect):
        job = connect()
        job.drain()
        assert job.should_stop
        with caplog.at_level("WARNING", "shardyard.worker"):
            job._close_at_exit()
        assert "end it with job.close()" in caplog.text


class Leaver:
    """What Departure needs of a session."""

    def __init__(self, notice: str = "never") -> None:
        self.settings = configuration.load(None, {}, {"membership.preemption_notice": notice}).settings
        self.drain = Drain()
        self.told = 0

    def report_drain(self) -> int:
        self.told += 1
        return 60_000


def test_signal_tells_the_worker_and_the_coordinator_once_and_the_handler_goes_with_the_worker() -> None:
    before = signal.getsignal(signal.SIGTERM)
    leaver = Leaver()
    departure = Departure(leaver)  # type: ignore[arg-type]
    for _ in range(3):
        signal.raise_signal(signal.SIGTERM)
    wait_until(lambda: leaver.told == 1)
    assert leaver.drain.reason == "SIGTERM"
    departure.close()
    assert leaver.told == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_signal_that_comes_later_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(departure_module.os, "_exit", ended.append)
    departure = Departure(Leaver())  # type: ignore[arg-type]
    try:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert ended == [], "they are one request"
        monkeypatch.setattr(departure_module, "TOGETHER_S", 0.0)
        signal.raise_signal(signal.SIGTERM)
        assert ended == [LEFT_IN_ORDER]
    finally:
        departure.close()


def test_handler_of_the_script_is_left_alone() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    leaver = Leaver()
    departure = Departure(leaver)  # type: ignore[arg-type]
    try:
        signal.raise_signal(signal.SIGTERM)
        assert (heard, leaver.drain.asked) == ([signal.SIGTERM], False)
    finally:
        departure.close()
        signal.signal(signal.SIGTERM, before)


def test_notice_of_preemption_tells_the_worker(tmp_path: Path) -> None:
    notice = tmp_path / "preempted"
    leaver = Leaver(str(notice))
    departure = Departure(leaver)  # type: ignore[arg-type]
    notice.touch()
    wait_until(lambda: leaver.told == 1)
    assert leaver.drain.reason == f"a preemption notice at {notice}"
    departure.close()
    assert "preemption" not in [thread.name for thread in threading.enumerate()]


def test_process_that_the_script_forks_ends_by_the_signal() -> None:
    departure = Departure(Leaver())  # type: ignore[arg-type]
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
        os._exit(3)
    departure.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
