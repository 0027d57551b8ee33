"""`job.batches` in a yard in this process.

Each sample owns a coordinate and adds 1 to it, so what is lost or doubled shows as a whole number.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from shardyard.domain import errors
from tests.support.alone import SYNC, SYNC_2, Connect, Counted, local_yard, status

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("samples", [1, 7, 24, 25])
@pytest.mark.parametrize("drop_last", [False, True])
def test_promise_2_each_sample_counts_once_asynchronous(connect: Connect, samples: int, drop_last: bool) -> None:
    counted = Counted(connect(settings={"job.data.batches_per_data_shard": 2}), samples)
    if drop_last and samples < 4:
        with pytest.raises(errors.InvalidRequest, match="drop_last"):
            counted.job.batches(counted.data, batch_size=4, drop_last=True)
        return
    sizes = []
    for (index,) in counted.job.batches(counted.data, batch_size=4, epochs=3, drop_last=drop_last):
        counted.step(index)
        sizes.append(len(index))
    if drop_last:
        assert set(sizes) == {4}
        assert sum(counted.counts) == 3 * (samples // 4 * 4)
        assert max(counted.counts) <= 3
    else:
        assert counted.counts == [3.0] * samples
        assert len(sizes) == 3 * -(-samples // 4)


@pytest.mark.parametrize("samples", [1, 7, 24, 25])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_promise_2_each_sample_counts_once_synchronous(connect: Connect, samples: int, ranks: int) -> None:
    job = connect(settings=SYNC | {"job.consistency.logical_ranks": ranks})
    counted = Counted(job, samples)
    sizes: list[int] = []
    steps: list[list[int]] = []
    for (index,) in job.batches(counted.data, batch_size=4, epochs=2):
        if len(steps) == job.step:
            steps.append([])
        steps[job.step] += index.tolist()
        sizes.append(len(index))
        # sum over the samples / samples of the step, weighted: the share of a sample is 1 / (its batch), times
        # (its batch) / (the step); so each adds 1 / (samples of its step)
        counted.step(index, 1 / len(index))
    assert sum(sizes) == 2 * samples
    per_epoch = -(-samples // (4 * ranks))
    assert len(steps) == job.step == 2 * per_epoch
    for epoch in range(2):
        seen = [sample for step in steps[epoch * per_epoch : (epoch + 1) * per_epoch] for sample in step]
        assert sorted(seen) == list(range(samples))
    expected = [0.0] * samples
    for step in steps:
        for sample in step:
            expected[sample] += 1 / len(step)
    assert counted.counts == [round(value, 9) for value in expected]


def test_drop_last_in_a_synchronous_job_leaves_whole_steps(connect: Connect) -> None:
    counted = Counted(connect(settings=SYNC_2), 21)
    sizes = []
    for (index,) in counted.job.batches(counted.data, batch_size=4, drop_last=True):
        sizes.append(len(index))
        counted.step(index)
    assert sizes == [4] * 4
    assert counted.job.step == 2


@pytest.mark.parametrize("settings", [{}, SYNC_2])
def test_no_epochs_are_no_batches(connect: Connect, settings: dict[str, Any]) -> None:
    counted = Counted(connect(settings=settings), 6)
    assert list(counted.job.batches(counted.data, epochs=0)) == []
    for (index,) in counted.job.batches(counted.data, batch_size=1):
        counted.step(index)
    assert sum(counted.counts) == (6 if not settings else 3)


@pytest.mark.parametrize("settings", [{}, SYNC_2])
def test_two_data_sets_one_after_the_other(connect: Connect, settings: dict[str, Any]) -> None:
    counted = Counted(connect(settings=settings), 10)
    seen: list[int] = []
    for length in (10, 5):
        for (index,) in counted.job.batches(TensorDataset(torch.arange(length)), batch_size=3):
            seen += index.tolist()
            counted.step(index, 1.0 if not settings else 1 / len(index))
    assert sorted(seen) == sorted([*range(10), *range(5)])
    if not settings:
        assert counted.counts == [2.0] * 5 + [1.0] * 5
    else:
        assert sum(counted.counts) == pytest.approx(counted.job.step)


def test_batches_without_a_step_are_accumulated_within_a_data_shard(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    counted = Counted(connect(settings={"job.data.batches_per_data_shard": 6}), 24)
    counted.optimizer.zero_grad()
    with caplog.at_level("WARNING"):
        for at, (index,) in enumerate(counted.job.batches(counted.data, batch_size=2)):
            counted.compute(index)
            if at % 3 == 2:
                counted.optimizer.step()
                counted.optimizer.zero_grad()
    assert counted.counts == [1.0] * 24
    assert counted.job.step == 4
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_batches_without_a_step_at_the_end_of_a_data_shard_do_not_count_and_are_warned_of(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    counted = Counted(connect(settings={"job.data.batches_per_data_shard": 4}), 16)
    dropped: list[int] = []
    with caplog.at_level("WARNING"):
        for at, (index,) in enumerate(counted.job.batches(counted.data, batch_size=2)):
            if at % 4 < 2:
                counted.step(index)
            else:
                dropped += index.tolist()
    assert counted.counts == [0.0 if sample in dropped else 1.0 for sample in range(16)]
    (record,) = (record for record in caplog.records if "empty push" in record.getMessage())
    assert "data shard 0.0.0 #2-3" in record.getMessage()


def test_a_synchronous_batch_without_a_step_does_not_count_and_is_warned_of(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    counted = Counted(connect(settings=SYNC_2), 16)
    dropped: list[int] = []
    with caplog.at_level("WARNING"):
        for at, (index,) in enumerate(counted.job.batches(counted.data, batch_size=2)):
            if at in (2, 4, 5):
                dropped += index.tolist()
            else:
                counted.step(index, 1 / 2)
    # step 1 has one rank left, step 2 none
    assert counted.job.step == 4
    assert sum(counted.counts) == pytest.approx(3)
    assert [sample for sample, count in enumerate(counted.counts) if count == 0] == sorted(dropped)
    assert sum("empty push" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("settings", [{}, SYNC_2])
def test_two_steps_for_one_batch_are_refused(connect: Connect, settings: dict[str, Any]) -> None:
    counted = Counted(connect(settings=settings), 8)
    batches = counted.job.batches(counted.data, batch_size=2)
    (index,) = next(batches)
    counted.step(index, 1.0)
    with pytest.raises(errors.InvalidRequest, match="twice") as caught:
        counted.optimizer.step()
    assert "once for each batch" in caught.value.todo_text
    for (index,) in batches:
        counted.step(index, 1.0)
    if not settings:
        assert counted.counts == [1.0] * 8


def test_a_loop_that_was_left_leaves_the_job_usable(connect: Connect) -> None:
    counted = Counted(connect(), 12)
    first: list[int] = []
    for (index,) in counted.job.batches(counted.data, batch_size=2):
        counted.step(index)
        first += index.tolist()
        if len(first) == 4:
            break
    for (index,) in counted.job.batches(counted.data, batch_size=2):
        counted.step(index)
    assert counted.counts == [2.0 if sample in first else 1.0 for sample in range(12)]


def test_a_loop_that_was_left_in_a_synchronous_job_is_told_of(connect: Connect) -> None:
    counted = Counted(connect(settings=SYNC), 12)
    for (index,) in counted.job.batches(counted.data, batch_size=2):
        counted.step(index)
        break
    with pytest.raises(errors.InvalidRequest, match="before the first step of this data set") as caught:
        next(counted.job.batches(counted.data, batch_size=2))
    assert "to its end" in caught.value.todo_text


def test_batches_need_a_prepared_model(connect: Connect) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"job\.prepare"):
        connect().batches(TensorDataset(torch.zeros(3)))


def test_nested_batches_are_refused(connect: Connect) -> None:
    counted = Counted(connect(), 12)
    first, second = counted.job.batches(counted.data), counted.job.batches(counted.data)
    next(first)
    with pytest.raises(errors.InvalidRequest, match="inside"):
        counted.job.batches(counted.data)
    with pytest.raises(errors.InvalidRequest, match="inside"):
        next(second)


def test_steps_of_ones_own_before_batches_are_refused_in_a_synchronous_job(connect: Connect) -> None:
    counted = Counted(connect(settings=SYNC), 4)
    counted.step(torch.arange(4))
    with pytest.raises(errors.InvalidRequest, match="after steps without it") as caught:
        counted.job.batches(counted.data)
    assert "job.batches for all steps" in caught.value.todo_text


def test_steps_of_ones_own_and_batches_go_together_in_an_asynchronous_job(connect: Connect) -> None:
    counted = Counted(connect(), 4)
    counted.step(torch.arange(4))
    for (index,) in counted.job.batches(counted.data, batch_size=2):
        counted.step(index)
    counted.step(torch.arange(4))
    assert counted.counts == [3.0] * 4


@pytest.mark.parametrize("settings", [{}, SYNC_2])
def test_a_batch_sees_the_same_random_numbers_in_every_run(connect: Connect, settings: dict[str, Any]) -> None:
    def run(disturbance: int) -> list[float]:
        with connect(settings=settings | {"job.seed": 5}) as job:
            counted = Counted(job, 12)
            drawn = []
            for (index,) in job.batches(counted.data, batch_size=2):
                drawn.append(torch.rand(1).item())
                torch.rand(disturbance)
                counted.step(index)
            return drawn

    first = run(0)
    assert run(3) == first
    assert len(set(first)) == len(first) == 6


def test_what_is_left_of_a_data_shard_whose_loop_was_left_is_given_back() -> None:
    with (
        local_yard({"job.workers_expected": 2, "job.data.batches_per_data_shard": 4}) as (yard, connect),
        connect() as first,
        connect() as second,
    ):
        leaving, staying = Counted(first, 24), Counted(second, 24)
        for taken, (index,) in enumerate(first.batches(leaving.data, batch_size=2)):
            if taken == 1:
                break
            leaving.step(index)
        assert [(feed.leased, feed.done) for feed in status(yard).feeds] == [(0, 0)]
        for (index,) in second.batches(staying.data, batch_size=2):
            staying.step(index)
        assert staying.counts == [1.0] * 24
