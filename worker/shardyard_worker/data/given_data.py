"""What a script gives to `job.batches`: a data set and how to read it, or a torch DataLoader that says both; and how
many steps that makes.

Must not know: feeds, leases.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from shardyard.domain.epochs import EpochPlan
from shardyard.domain.errors import InvalidRequest
from shardyard_worker.data.dataset import Reader
from shardyard_worker.data.feed import FeedSettings
from shardyard_worker.data.loader_processes import Collate, LoaderSettings

BATCH_SIZE = 32


@dataclass(frozen=True)
class DataArguments:
    """Arguments of `job.batches`. None: not given."""

    batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    collate_fn: Collate | None = None
    num_workers: int | None = None
    pin_memory: bool | None = None
    prefetch_factor: int | None = None

    def feed_settings(self, *, epochs: int, accumulate: int) -> FeedSettings:
        return FeedSettings(
            batch_size=BATCH_SIZE if self.batch_size is None else self.batch_size,
            epochs=epochs,
            shuffle=True if self.shuffle is None else self.shuffle,
            drop_last=bool(self.drop_last),
            accumulate=accumulate,
        )


def reader_of(
    data: Dataset[Any] | DataLoader[Any], given: DataArguments, device: torch.device
) -> tuple[Reader, DataArguments]:
    """What reads the data, and the arguments, those of a loader included. Raises UnseekableDataset, InvalidRequest."""
    if isinstance(data, DataLoader):
        reader = Reader(data.dataset, device, _settings_of(data))
        return reader, _arguments_of(data, given)
    settings = LoaderSettings(
        given.collate_fn, given.num_workers or 0, bool(given.pin_memory), prefetch_factor=given.prefetch_factor
    )
    return Reader(data, device, settings), given


def steps_of(
    data: Dataset[Any] | DataLoader[Any] | int, given: DataArguments, ranks: int, *, epochs: int, accumulate: int
) -> int:
    """The steps that the data makes in a job with so many logical ranks; 0: an asynchronous job. Raises
    InvalidRequest."""
    if isinstance(data, DataLoader):
        given, data = _arguments_of(data, given), data.dataset
    if not isinstance(data, int | Sized):
        raise InvalidRequest(
            f"the steps of a {type(data).__name__}, which has no length",
            todo="give the number of its samples instead: job.steps_total(samples, batch_size=...)",
        )
    settings = given.feed_settings(epochs=epochs, accumulate=accumulate)
    settings.check()
    samples = data if isinstance(data, int) else len(data)
    # without ranks, a step has the batches of one push; a data shard has whole pushes
    if ranks or not settings.drop_last:
        plan = EpochPlan(samples, settings.batch_size, ranks or 1, settings.drop_last, accumulate)
        return plan.steps_per_epoch * epochs
    return -(-(samples // settings.batch_size) // accumulate) * epochs


def _settings_of(loader: DataLoader[Any]) -> LoaderSettings:
    own_collate = loader.collate_fn is not default_collate
    return LoaderSettings(
        collate_fn=loader.collate_fn if own_collate else None,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _arguments_of(loader: DataLoader[Any], given: DataArguments) -> DataArguments:
    twice = [field.name for field in fields(given) if getattr(given, field.name) is not None]
    if twice:
        raise InvalidRequest(
            f"job.batches with a DataLoader and with {', '.join(twice)}",
            why="the loader says so already",
            todo="say it to the loader alone, or give loader.dataset instead of the loader",
        )
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        what = "batch_size=None" if batches is None else f"the batch_sampler {type(batches).__name__}"
        raise InvalidRequest(
            f"a DataLoader with {what}",
            why="job.batches decides which samples are a batch, so that each counts once an epoch over all workers",
            todo="give the DataLoader a batch_size; or give job.batches its data set, with a batch_size",
        )
    return DataArguments(
        batch_size=batches.batch_size, shuffle=_shuffles(loader, batches.sampler), drop_last=batches.drop_last
    )


def _shuffles(loader: DataLoader[Any], sampler: object) -> bool:
    if type(sampler) is SequentialSampler:
        return False
    samples = len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == samples:
        return True
    raise InvalidRequest(
        f"a DataLoader with the sampler {type(sampler).__name__}",
        why="job.batches decides the order, so that each sample counts once an epoch over all workers",
        todo=_instead_of(sampler),
    )


def _instead_of(sampler: object) -> str:
    if isinstance(sampler, DistributedSampler):
        return "give the DataLoader shuffle=True instead of the sampler: job.batches gives each worker its part"
    if isinstance(sampler, SubsetRandomSampler):
        return "give the DataLoader torch.utils.data.Subset(dataset, indices) and shuffle=True instead of the sampler"
    if isinstance(sampler, WeightedRandomSampler | RandomSampler):
        return (
            "give the DataLoader shuffle=True instead of the sampler; where samples are to be drawn more than once, go"
            " through the loader itself, without job.batches"
        )
    return "give the DataLoader shuffle=True or shuffle=False instead of the sampler"
