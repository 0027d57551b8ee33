"""`job.batches` with samples that other processes read, in a yard in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import shardyard as sy
from shardyard_worker.data.loader_processes import LoaderProcesses
from tests.support.alone import SYNC, SYNC_2, Connect, Counted

pytestmark = pytest.mark.usefixtures("alone")

LOCAL = {"job.consistency.mode": "local", "job.consistency.logical_ranks": 2, "job.consistency.steps": 2}
SHARDS = {"job.data.batches_per_data_shard": 2}
READS: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 2}


class Noisy(Dataset[Any]):
    """An augmented sample: its index and a random number."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(1)


def seen(connect: Connect, settings: dict[str, Any], **reads: Any) -> list[Any]:
    """What batches have: samples, random numbers of the data set, a random number of the model."""
    job = connect(settings=settings)
    model = torch.nn.Linear(1, 1)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for index, noise in job.batches(Noisy(), batch_size=3, epochs=2, **reads):
        found.append((index.tolist(), noise.tolist(), float(torch.rand(1))))
        optimizer.zero_grad()
        model(noise).sum().backward()
        optimizer.step()
    found.append(model.weight.tolist())
    job.close()
    return found


@pytest.mark.parametrize("settings", [SHARDS, SYNC, SYNC_2, LOCAL])
def test_batches_and_random_numbers_are_those_of_reading_here(connect: Connect, settings: dict[str, Any]) -> None:
    expected = seen(connect, settings)
    assert seen(connect, settings, **READS) == expected
    assert seen(connect, settings, num_workers=1, prefetch_factor=1) == expected


@pytest.mark.parametrize("settings", [SHARDS, SYNC_2])
def test_accumulated_batches_come_from_processes_too(connect: Connect, settings: dict[str, Any]) -> None:
    counted = Counted(connect(settings=settings), 26)
    seen: list[int] = []
    for (index,) in counted.job.batches(counted.data, batch_size=3, accumulate=2, **READS):
        seen += index.tolist()
        counted.compute(index)
        if counted.job.step_due:
            counted.optimizer.step()
            counted.optimizer.zero_grad()
    assert sorted(seen) == list(range(26))


def test_loader_of_ones_own_is_read_as_it_says(connect: Connect) -> None:
    counted = Counted(connect(settings=SHARDS), 25)
    loader = DataLoader(counted.data, batch_size=4, shuffle=True, drop_last=True, num_workers=2)
    sizes = []
    for (index,) in counted.job.batches(loader, epochs=2):
        sizes.append(len(index))
        counted.step(index)
    assert sizes == [4] * 12
    assert sum(counted.counts) == 48
    assert max(counted.counts) == 2


def test_processes_read_on_into_the_next_data_shards(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    take = LoaderProcesses.take

    def counted_take(self: LoaderProcesses, seed: Any, begin: Any) -> Any:
        def begins() -> Any:
            begun.append(1)
            return begin()

        return take(self, seed, begins)

    monkeypatch.setattr(LoaderProcesses, "take", counted_take)
    counted = Counted(connect(settings=SHARDS), 25)
    for (index,) in counted.job.batches(counted.data, batch_size=2, epochs=2, **READS):
        counted.step(index)
    assert counted.counts == [2.0] * 25
    assert len(begun) == 1


def test_break_and_another_loop_leave_no_process(connect: Connect) -> None:
    counted = Counted(connect(settings=SHARDS), 24)
    for (index,) in counted.job.batches(counted.data, batch_size=2, **READS):
        counted.step(index)
        break
    for (index,) in counted.job.batches(counted.data, batch_size=2, **READS):
        counted.step(index)
    counts = counted.counts
    assert min(counts) == 1
    assert sum(counts) == 26


def test_error_of_reading_counts_what_came_before(connect: Connect) -> None:
    counted = Counted(connect(settings=SHARDS), 12)

    class Failing(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            if index == 7 and torch.utils.data.get_worker_info() is not None:
                raise ValueError("no sample 7")
            return super().__getitem__(index)

        def __getitems__(self, indices: list[int]) -> Any:
            return [self[each] for each in indices]

    batches = counted.job.batches(Failing(torch.arange(12)), batch_size=2, shuffle=False, **READS)
    for _ in range(3):
        counted.step(next(batches)[0])
    with pytest.raises(ValueError, match="no sample 7"):
        next(batches)
    assert counted.counts == [1.0] * 6 + [0.0] * 6


@pytest.mark.parametrize("settings", [SHARDS, SYNC_2])
def test_look_ahead_reads_from_processes_too(connect: Connect, settings: dict[str, Any]) -> None:
    job = connect(settings=settings)
    table = sy.Embedding(4)
    model = torch.nn.ModuleDict({"words": table, "out": torch.nn.Linear(4, 1)})
    _, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[int] = []
    data = TensorDataset(torch.arange(24))
    for (index,) in job.batches(data, batch_size=2, look_ahead=lambda batch: {table: batch[0]}, **READS):
        seen += index.tolist()
        optimizer.zero_grad()
        model["out"](model["words"](index)).sum().backward()
        optimizer.step()
    assert sorted(seen) == list(range(24))
    rows = job._loop.rows
    assert rows is not None
    assert rows.came_ahead > 0
