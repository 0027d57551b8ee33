"""A synchronous job goes over to asynchronous updates while it trains, in yards inside this process: no step and no
sample is lost or counted twice, and the loop of the script goes on."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from switches import BOUNDED, DATA, DEADLINE_S, SAMPLES, Counting, Yard, yard

from shardyard.ground.types import UpdateMode

pytestmark = pytest.mark.usefixtures("alone")


def sync(folder: Path) -> dict[str, object]:
    return {
        "job.consistency.mode": "sync",
        "job.consistency.logical_ranks": 2,
        "job.workers_expected": 2,
        "job.checkpoint.url": str(folder),
    }


def train(here: Yard, seen: list[tuple[UpdateMode, int]], *, epochs: int, tables: bool, accumulate: int) -> set[float]:
    with here.connect() as job:
        counting = Counting(job, tables=tables)
        counting.optimizer.zero_grad()
        for (chosen,) in job.batches(DATA, batch_size=1, epochs=epochs, accumulate=accumulate):
            counting.add(chosen)
            if job.step_due:
                counting.optimizer.step()
                counting.optimizer.zero_grad()
            seen.append((job.mode, job.step))
            time.sleep(0.005)
        return counting.counts


@pytest.mark.parametrize(
    ("tables", "accumulate", "workers"), [(False, 1, 2), (True, 1, 2), (False, 4, 2), (False, 1, 3)]
)
def test_each_sample_counts_once_an_epoch_where_a_step_is_the_last_one(
    tmp_path: Path, tables: bool, accumulate: int, workers: int
) -> None:
    epochs = 3
    seen: list[list[tuple[UpdateMode, int]]] = [[] for _ in range(workers)]
    with yard(**sync(tmp_path)) as here, ThreadPoolExecutor(workers) as threads:
        runs = [threads.submit(train, here, each, epochs=epochs, tables=tables, accumulate=accumulate) for each in seen]
        until = time.monotonic() + DEADLINE_S
        while len(seen[0]) + len(seen[1]) < SAMPLES // 3:
            assert time.monotonic() < until, [run.exception() for run in runs if run.done()]
            time.sleep(0.01)
        here.go_over(BOUNDED, 2)
        assert [run.result(DEADLINE_S) for run in runs] == [{float(epochs)}] * workers
    for each in seen:
        modes = [mode for mode, _ in itertools.groupby(each, key=lambda one: one[0])]
        assert modes[-1] is UpdateMode.ASYNC
        assert modes in ([UpdateMode.SYNC, UpdateMode.ASYNC], [UpdateMode.ASYNC])
        assert [step for _, step in each] == sorted(step for _, step in each)
