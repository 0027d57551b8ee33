"""A synchronous job goes over to asynchronous updates while it trains, in yards inside this process: no step and no
sample is lost or counted twice, and the loop of the script goes on."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from shardyard.domain import errors
from shardyard.domain.consistency import UpdateMode
from tests.support.switches import (
    ASYNC,
    BOUNDED,
    DATA,
    SAMPLES,
    SYNC,
    Counting,
    modes_of_switched_workers,
    two_workers,
    yard,
)

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.long("False-1-2-given0", "True-1-2-given1")
@pytest.mark.parametrize(
    ("tables", "accumulate", "workers", "given"),
    [
        (False, 1, 2, {}),
        (True, 1, 2, {}),
        (False, 4, 2, {}),
        (False, 1, 3, {}),
        (False, 1, 2, {"worker.exchange": "delayed"}),
        (False, 1, 2, {"worker.exchange": "overlapped"}),
        (True, 1, 2, {"worker.exchange": "overlapped"}),
    ],
)
def test_each_sample_counts_once_an_epoch_where_a_step_is_the_last_one(
    tmp_path: Path, tables: bool, accumulate: int, workers: int, given: dict[str, object]
) -> None:
    for modes in modes_of_switched_workers(
        two_workers(tmp_path, "sync") | given, workers, BOUNDED, 2, tables=tables, accumulate=accumulate
    ):
        assert modes[-1] is UpdateMode.ASYNC
        assert modes in ([UpdateMode.SYNC, UpdateMode.ASYNC], [UpdateMode.ASYNC])


def test_worker_that_is_told_to_stay_goes_on_with_its_steps(tmp_path: Path) -> None:
    with yard(**two_workers(tmp_path, "sync") | {"job.workers_expected": 1}) as here, here.connect() as job:
        counting = Counting(job)
        for at, (chosen,) in enumerate(job.batches(DATA, batch_size=1)):
            if at == 4:
                assert here.switch(ASYNC).first
                assert here.job_status().HasField("consistency")
                assert here.switch(SYNC).first
                assert not here.job_status().HasField("consistency")
            counting.step(chosen)
        assert (job.mode, job.step) == (UpdateMode.SYNC, SAMPLES // 2)
        assert counting.counts == {1.0}


def test_script_between_two_loops_goes_over_with_the_next_one(tmp_path: Path) -> None:
    with yard(**two_workers(tmp_path, "sync") | {"job.workers_expected": 1}) as here, here.connect() as job:
        counting = Counting(job)
        for (chosen,) in job.batches(DATA, batch_size=1):
            counting.step(chosen)
        with pytest.raises(errors.InvalidRequest, match="has gone through its data"):
            here.switch(ASYNC)
        halves = job.batches(DATA, batch_size=1, epochs=2)
        for (chosen,) in itertools.islice(halves, SAMPLES // 2):
            counting.step(chosen)
        here.switch(ASYNC)
        for (chosen,) in halves:
            counting.step(chosen)
        assert job.mode is UpdateMode.ASYNC
        for (chosen,) in job.batches(DATA, batch_size=4):
            counting.step(chosen)
        counting.step(torch.tensor([0]))  # of the script's own
        assert counting.counts == {4.0, 5.0}


def test_worker_that_joins_afterwards_finds_an_asynchronous_job(tmp_path: Path) -> None:
    with yard(**two_workers(tmp_path, "sync") | {"job.workers_expected": 1}) as here, here.connect() as first:
        one = Counting(first)
        for (chosen,) in first.batches(DATA, batch_size=1, epochs=2):
            if first.step == 3 and first.mode is UpdateMode.SYNC and not here.job_status().HasField("consistency"):
                here.switch(ASYNC)
            one.step(chosen)
        assert first.mode is UpdateMode.ASYNC
        with here.connect() as second:
            assert (second.mode, Counting(second).counts) == (UpdateMode.ASYNC, {2.0})
