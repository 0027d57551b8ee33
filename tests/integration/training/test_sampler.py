"""`job.sampler`: a DataLoader that a script goes through by itself, in a yard in this process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import shardyard as sy
from shardyard.domain import errors
from tests.support.alone import SYNC, SYNC_2, Connect, Counted, local_yard
from tests.support.pulling import delivered

pytestmark = pytest.mark.usefixtures("alone")

SHARDS = {"job.data.batches_per_data_shard": 2}
LOCAL = {"job.consistency.mode": "local", "job.consistency.logical_ranks": 1}
READS: list[dict[str, Any]] = [
    {},
    {"num_workers": 1, "prefetch_factor": 1},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
]


def loader_of(job: sy.Job, data: Dataset[Any], **given: Any) -> DataLoader[Any]:
    sampling = {name: given.pop(name) for name in ("batch_size", "shuffle", "drop_last") if name in given}
    return DataLoader(data, batch_sampler=job.sampler(data, **sampling), **given)


def train(counted: Counted, loader: DataLoader[Any], epochs: int = 1, share: float = 1.0) -> list[list[int]]:
    """Returns the batches. `share`: 1, or, in a synchronous job, what makes a sample count 1 in the mean of a step."""
    seen = []
    for _ in range(epochs):
        for (index,) in loader:
            seen.append(index.tolist())
            counted.step(index, share)
    return seen


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("samples", [1, 7, 24, 25])
def test_promise_2_each_sample_counts_once_asynchronous(connect: Connect, reads: dict[str, Any], samples: int) -> None:
    counted = Counted(connect(settings=SHARDS), samples)
    seen = train(counted, loader_of(counted.job, counted.data, batch_size=4, **reads), epochs=3)
    assert counted.counts == [3.0] * samples
    assert len(seen) == 3 * -(-samples // 4)  # nobody else could leave work to this worker


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_promise_2_each_sample_counts_once_synchronous(connect: Connect, reads: dict[str, Any], ranks: int) -> None:
    counted = Counted(connect(settings=SYNC | {"job.consistency.logical_ranks": ranks}), 24)
    train(counted, loader_of(counted.job, counted.data, batch_size=4, **reads), 2, share=ranks)
    assert counted.job.step == 2 * 24 // (4 * ranks)
    assert counted.counts == [2.0] * 24


def test_batches_are_those_of_job_batches(connect: Connect) -> None:
    found = []
    for way in ("batches", "sampler"):
        counted = Counted(connect(settings=SHARDS), 25)
        numbers, seen = [], []
        for _ in range(2):
            batches: Any = (
                counted.job.batches(counted.data, batch_size=4)
                if way == "batches"
                else loader_of(counted.job, counted.data, batch_size=4, num_workers=2)
            )
            for (index,) in batches:
                seen.append(index.tolist())
                numbers.append(float(torch.rand(1)))  # as dropout would
                counted.step(index)
        found.append((seen, numbers))
        counted.job.close()
    assert found[0] == found[1]


def test_loader_that_was_looked_into_begins_again(connect: Connect) -> None:
    counted = Counted(connect(settings=SHARDS), 24)
    loader = loader_of(counted.job, counted.data, batch_size=4, num_workers=2)
    next(iter(loader))
    train(counted, loader, 2)
    assert counted.counts == [2.0] * 24


def test_break_and_another_epoch(connect: Connect) -> None:
    counted = Counted(connect(settings=SHARDS), 24)
    loader = loader_of(counted.job, counted.data, batch_size=4, num_workers=2)
    for (index,) in loader:
        counted.step(index)
        break
    train(counted, loader)
    for (index,) in counted.job.batches(counted.data, batch_size=4):
        counted.step(index)
    assert min(counted.counts) == 2
    assert sum(counted.counts) == 2 * 24 + 4


def test_skipped_step_is_that_of_the_batch_that_was_skipped(connect: Connect) -> None:
    counted = Counted(connect(settings=SYNC), 24)
    skipped: list[int] = []
    for number, (index,) in enumerate(loader_of(counted.job, counted.data, batch_size=4, num_workers=2)):
        if number == 2:
            skipped = index.tolist()
            continue
        counted.step(index)
    assert [sample for sample, count in enumerate(counted.counts) if count == 0] == sorted(skipped)
    assert counted.job.step == 6


def test_second_step_for_one_batch_is_refused(connect: Connect) -> None:
    counted = Counted(connect(settings=SHARDS), 24)
    batches = iter(loader_of(counted.job, counted.data, batch_size=4, num_workers=2))
    (index,) = next(batches)
    counted.step(index)
    with pytest.raises(errors.InvalidRequest, match="twice for one batch"):
        counted.step(index)


def test_evaluation_with_another_loader_between_batches(connect: Connect) -> None:
    counted = Counted(connect(settings=SHARDS), 24)
    for (index,) in loader_of(counted.job, counted.data, batch_size=4, num_workers=1):
        counted.step(index)
        assert sum(len(each) for (each,) in DataLoader(counted.data, batch_size=5)) == 24
    assert counted.counts == [1.0] * 24


def test_local_steps_are_refused_with_what_to_do(connect: Connect) -> None:
    with pytest.raises(errors.InvalidRequest, match="local steps") as caught:
        connect(settings=LOCAL).sampler(TensorDataset(torch.arange(4)))
    assert "job.batches(loader)" in caught.value.todo_text


def test_length_is_the_share_of_a_worker(connect: Connect) -> None:
    job = connect(settings={"job.workers_expected": 2})
    assert len(job.sampler(TensorDataset(torch.arange(50)), batch_size=4)) == 7
    job.close()


# ---- several workers


def work(job: sy.Job, ahead: int, epochs: int, share: float, found: list[Any]) -> None:
    counted = Counted(job, 40)
    sampler = job.sampler(counted.data, batch_size=2)
    for _ in range(epochs):
        for index in delivered(sampler, ahead):
            counted.step(index, share)
    found.append(counted.counts)
    job.close()


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("settings", [SHARDS, SYNC_2])
def test_two_workers_count_each_sample_once(settings: dict[str, Any], ahead: int) -> None:
    with local_yard({"job.workers_expected": 2, **settings}) as (_, join):
        found: list[Any] = []
        share = 1.0 if settings is SHARDS else 2.0
        threads = [threading.Thread(target=work, args=(join(), ahead, 2, share, found)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(found) == 2
    assert found[-1] == [2.0] * 40
