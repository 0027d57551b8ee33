"""An asynchronous job goes over to synchronous steps while it trains, in yards inside this process: no gradient and no
sample is lost or counted twice, and the loop of the script goes on; there and back again too."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from shardyard.domain import errors
from shardyard.domain.consistency import UpdateMode
from tests.support.switches import (
    ASYNC,
    BOUNDED,
    DATA,
    DEADLINE_S,
    SAMPLES,
    SYNC,
    Counting,
    Seen,
    errors_of,
    modes_of_switched_workers,
    train,
    two_workers,
    until,
    yard,
)

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.long("False-1-2-given0", "True-1-2-given8")
@pytest.mark.parametrize(
    ("tables", "accumulate", "workers", "given"),
    [
        (False, 1, 2, {}),
        (True, 1, 2, {}),
        (False, 4, 2, {}),
        (False, 1, 3, {}),
        (False, 1, 2, {"job.consistency.mode": "bounded", "job.consistency.staleness": 1}),
        (False, 1, 2, {"worker.exchange": "delayed"}),
        (False, 1, 2, {"worker.exchange": "overlapped"}),
        (True, 1, 2, {"worker.exchange": "overlapped"}),
        (True, 1, 2, {"worker.cached_rows_bytes": 1 << 20, "worker.cached_rows_steps": 1_000}),
    ],
)
def test_each_sample_counts_once_an_epoch_where_a_data_shard_is_the_last_one(
    tmp_path: Path, tables: bool, accumulate: int, workers: int, given: dict[str, object]
) -> None:
    for modes in modes_of_switched_workers(
        two_workers(tmp_path, "async") | given, workers, SYNC, tables=tables, accumulate=accumulate
    ):
        assert modes[-1] is UpdateMode.SYNC or workers > 2  # the third one may have had no rank to compute
        assert modes in ([UpdateMode.ASYNC, UpdateMode.SYNC], [UpdateMode.SYNC], [UpdateMode.ASYNC])


@pytest.mark.long
def test_job_goes_there_and_back_again_and_each_sample_counts_once_an_epoch(tmp_path: Path) -> None:
    epochs = 6
    seen: list[Seen] = [[], []]
    with yard(**two_workers(tmp_path, "async")) as here, ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(train, here, each, epochs=epochs, tables=True, accumulate=1) for each in seen]
        for mode, staleness in ((SYNC, None), (BOUNDED, 2), (SYNC, None), (ASYNC, None)):
            before = sum(map(len, seen))
            until(lambda before=before: sum(map(len, seen)) >= before + 30, errors_of(runs))  # type: ignore[misc]
            here.change_mode(mode, staleness)
        assert [run.result(DEADLINE_S) for run in runs] == [{float(epochs)}] * 2
    modes = [mode for mode, _ in itertools.groupby(seen[0], key=lambda one: one[0])]
    assert modes == [UpdateMode.ASYNC, UpdateMode.SYNC] * 2 + [UpdateMode.ASYNC]


def test_worker_that_is_told_to_stay_goes_on_with_its_data_shards(tmp_path: Path) -> None:
    with yard(**two_workers(tmp_path, "async") | {"job.workers_expected": 1}) as here, here.connect() as job:
        counting = Counting(job)
        for at, (chosen,) in enumerate(job.batches(DATA, batch_size=1)):
            if at == 4:
                assert here.switch(SYNC).first
                assert here.job_status().consistency.consistency.mode == SYNC
                with pytest.raises(errors.NotReady, match="is switching to sync"):
                    here.switch(BOUNDED, 3)
                assert here.switch(ASYNC).first
                assert not here.job_status().HasField("consistency")
            counting.step(chosen)
        assert (job.mode, job.step) == (UpdateMode.ASYNC, SAMPLES)
        assert counting.counts == {1.0}


def test_script_between_two_loops_goes_over_with_the_next_one(tmp_path: Path) -> None:
    with yard(**two_workers(tmp_path, "async") | {"job.workers_expected": 1}) as here, here.connect() as job:
        counting = Counting(job)
        for (chosen,) in job.batches(DATA, batch_size=1):
            counting.step(chosen)
        here.change_mode(SYNC)
        for (chosen,) in job.batches(DATA, batch_size=1):
            counting.step(chosen)
        assert (job.mode, job.step) == (UpdateMode.SYNC, SAMPLES + SAMPLES // 2)
        assert counting.counts == {2.0}


def test_step_of_the_script_itself_waits_for_the_halt_and_does_not_count_where_there_are_steps(tmp_path: Path) -> None:
    with yard(**two_workers(tmp_path, "async") | {"job.workers_expected": 1}) as here, here.connect() as job:
        counting = Counting(job)
        for (chosen,) in job.batches(DATA, batch_size=1):
            counting.step(chosen)
        assert here.switch(SYNC).first
        until(lambda: job._session.step_barrier.to_steps)
        counting.step(torch.tensor([0]))
        assert job.mode is UpdateMode.SYNC
        for (chosen,) in job.batches(DATA, batch_size=1):
            counting.step(chosen)
        assert counting.counts == {2.0}


def test_job_whose_workers_take_steps_of_their_own_stays_as_it_is(tmp_path: Path) -> None:
    with yard(**two_workers(tmp_path, "async") | {"job.workers_expected": 1}) as here, here.connect() as job:
        counting = Counting(job)
        for at, (chosen,) in enumerate(job.batches(DATA, batch_size=1)):
            counting.step(chosen)
            if at == SAMPLES // 2:
                break
        counting.step(torch.tensor([0]))
        job._session.learn()
        with pytest.raises(errors.InvalidRequest, match=r"takes steps outside of job\.batches"):
            here.switch(SYNC)


def test_worker_that_joins_meanwhile_waits_and_says_for_what(tmp_path: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    with yard(**two_workers(tmp_path, "async")) as here, ThreadPoolExecutor(2) as threads:

        def first() -> set[float]:
            with here.connect() as job:
                counting = Counting(job)
                for (chosen,) in job.batches(DATA, batch_size=1, epochs=2):
                    begun.set()
                    assert goes_on.wait(DEADLINE_S)
                    counting.step(chosen)
                return counting.counts

        def second() -> set[float]:
            with here.connect() as job:
                counting = Counting(job)
                for (chosen,) in job.batches(DATA, batch_size=1, epochs=2):
                    assert job.mode is UpdateMode.SYNC
                    counting.step(chosen)
                return counting.counts

        runs = [threads.submit(first)]
        assert begun.wait(DEADLINE_S)
        assert here.switch(SYNC).first
        runs.append(threads.submit(second))
        text = "to switch to sync; until then no new data shard is leased"
        until(lambda: any(text in each.waiting_for for each in here.members()), errors_of(runs))
        assert "0.0.0 (worker 1.3)" in here.job_status().consistency.unfinished
        goes_on.set()
        assert [run.result(DEADLINE_S) for run in runs] == [{2.0}] * 2
