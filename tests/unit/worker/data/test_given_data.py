"""A torch DataLoader given to `job.batches` says how its data is read."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from shardyard.domain.errors import InvalidRequest, UnseekableDataset
from shardyard_worker.data.given_data import DataArguments, _settings_of, reader_of
from shardyard_worker.data.loader_processes import LoaderSettings

DATA = TensorDataset(torch.arange(10))
CPU = torch.device("cpu")


def arguments(loader: Any, **given: Any) -> DataArguments:
    return reader_of(loader, DataArguments(**given), CPU)[1]


def collate(samples: list[Any]) -> Any:
    return samples


def init(_: int) -> None: ...


@pytest.mark.parametrize("shuffle", [False, True])
def test_batch_size_order_and_drop_last_come_from_the_loader(shuffle: bool) -> None:
    found = arguments(DataLoader(DATA, batch_size=3, shuffle=shuffle, drop_last=True))
    settings = found.feed_settings(epochs=2, accumulate=4)
    assert (settings.batch_size, settings.shuffle, settings.drop_last) == (3, shuffle, True)
    assert (settings.epochs, settings.accumulate) == (2, 4)


def test_batch_sampler_of_torch_says_the_same() -> None:
    found = arguments(DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 5, drop_last=True)))
    assert (found.batch_size, found.shuffle, found.drop_last) == (5, True, True)


def test_how_samples_are_read_comes_from_the_loader() -> None:
    context = multiprocessing.get_context("spawn")
    loader = DataLoader(
        DATA,
        num_workers=2,
        collate_fn=collate,
        pin_memory=True,
        prefetch_factor=3,
        timeout=5,
        worker_init_fn=init,
        multiprocessing_context=context,
    )
    assert _settings_of(loader) == LoaderSettings(collate, 2, True, 3, 5, init, context)
    assert _settings_of(DataLoader(DATA)) == LoaderSettings()


def test_defaults_are_those_of_job_batches() -> None:
    settings = arguments(DATA).feed_settings(epochs=1, accumulate=1)
    assert (settings.batch_size, settings.shuffle, settings.drop_last) == (32, True, False)


def test_what_the_loader_says_is_not_given_again() -> None:
    with pytest.raises(InvalidRequest, match="a DataLoader and with batch_size, num_workers"):
        arguments(DataLoader(DATA), batch_size=4, num_workers=0)


@pytest.mark.parametrize(
    ("sampler", "todo"),
    [
        (DistributedSampler(DATA, num_replicas=2, rank=0), "shuffle=True instead of the sampler: job.batches gives"),
        (SubsetRandomSampler([1, 2]), "Subset"),
        (WeightedRandomSampler([1.0] * 10, 10), "more than once"),
        (RandomSampler(DATA, replacement=True), "more than once"),
        (RandomSampler(DATA, num_samples=5), "more than once"),
        ([1, 2, 3], "shuffle=True or shuffle=False"),
    ],
)
def test_another_order_is_refused_with_what_to_do(sampler: Any, todo: str) -> None:
    with pytest.raises(InvalidRequest, match="with the sampler") as caught:
        arguments(DataLoader(DATA, sampler=sampler))
    assert todo in caught.value.todo_text


class OwnBatches(BatchSampler): ...


@pytest.mark.parametrize(
    "loader",
    [DataLoader(DATA, batch_size=None), DataLoader(DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 2, False))],
)
def test_batches_of_a_samplers_own_are_refused(loader: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"batch_size=None|OwnBatches"):
        arguments(loader)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_loader_of_a_stream_is_refused() -> None:
    with pytest.raises(UnseekableDataset, match="Endless"):
        arguments(DataLoader(Endless()))
