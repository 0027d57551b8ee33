"""Map-style datasets, read by index: length, fingerprint, batches.

Invariant: any worker can read any sample again. Must not know: leases, pushes, in which order samples are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from shardyard.domain.epochs import Indices
from shardyard.domain.errors import UnseekableDataset
from shardyard_worker.data.loader_processes import LoaderProcesses, LoaderSettings, ReadBatch, Reading, Seed, read
from shardyard_worker.data.seeding import seed_everything, states, undisturbed
from shardyard_worker.data.sources.record_files import FileRecords
from shardyard_worker.data.sources.stream_dataset import StreamDataset

READ_HERE = LoaderSettings()


class Reader:
    """Batches of a dataset, on a device: read in this process, or ahead in others."""

    def __init__(self, dataset: Dataset[Any], device: torch.device, settings: LoaderSettings = READ_HERE) -> None:
        """Raises UnseekableDataset, InvalidRequest."""
        _require_seekable(dataset)
        settings.check()
        self._dataset: Any = dataset
        self._device = device
        self._collate = settings.collate_fn
        self._pins = settings.pin_memory and device.type != "cpu"
        self.samples = len(cast(Sized, dataset))
        self._processes = LoaderProcesses(dataset, settings, pin_memory=self._pins) if settings.num_workers else None

    @property
    def in_order(self) -> bool:
        """Whether samples can only be read in rising order without beginning anew."""
        return isinstance(self._dataset, StreamDataset)

    @property
    def reads_ahead(self) -> bool:
        """Whether other processes read, so that each batch should be asked for by `read`."""
        return self._processes is not None

    def fetch(self, indices: Indices) -> Any:
        """The samples at the indices, collated, with tensors moved to the device. Reads in this process."""
        if type(self._dataset) is TensorDataset and self._collate is None:
            chosen = torch.from_numpy(indices)
            batch: Any = [tensor[chosen] for tensor in self._dataset.tensors]
        else:
            batch = read(self._dataset, self._collate, indices.tolist())
        return _move(batch, self._device, pins=self._pins)

    def read(self, seed: Seed, indices: Indices, begin: Callable[[], Iterator[Reading]]) -> ReadBatch:
        """As `fetch`, with the random numbers of the batch's turn. The generators of this process stay as they are.
        `begin` returns the batches that are expected from this one on."""
        if self._processes is not None:
            found = self._processes.take(seed, begin)
            return replace(found, batch=_move(found.batch, self._device))
        with undisturbed():
            seed_everything(*seed, devices=False)
            batch, error = None, None
            try:
                batch = self.fetch(indices)
            except Exception as raised:  # noqa: BLE001 - raised in its turn, when the batches before it are counted
                error = raised
            return ReadBatch(batch, error, states())

    def close(self) -> None:
        """Ends the processes that read. A later `read` starts others."""
        if self._processes is not None:
            self._processes.close()

    def fingerprint(self) -> str:
        """A digest of the dataset's type and length, of the structure of three samples (of a stream: of the first),
        and, for a TensorDataset, of their content (other datasets may transform samples at random). Lists of files: see
        FileRecords."""
        digest = hashlib.sha256(f"{type(self._dataset).__name__} {self.samples}".encode())
        if isinstance(self._dataset, FileRecords):
            digest.update(self._dataset.fingerprint().encode())
        with undisturbed():
            # a copy of a stream's data set: it does not stay open
            dataset, last = (copy(self._dataset), 0) if self.in_order else (self._dataset, self.samples - 1)
            for index in sorted({0, last // 2, last} if self.samples else ()):
                sample = dataset[index]
                digest.update(_structure(sample).encode())
                if type(self._dataset) is TensorDataset:
                    for tensor in sample:
                        digest.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:32]


class IndexReader(Reader):
    """Gives indices instead of samples, to those who read by themselves."""

    def fetch(self, indices: Indices) -> Any:
        return indices.tolist()


def _require_seekable(dataset: object) -> None:
    """Raises UnseekableDataset, with what to do instead, for a dataset that cannot be read by index."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset | Iterator) or not hasattr(dataset, "__getitem__"):
        raise UnseekableDataset(f"{kind} can only be iterated over")
    if isinstance(dataset, Mapping):
        raise UnseekableDataset(f"{kind} is read by keys, not by index")
    if type(dataset).__getitem__ is Dataset.__getitem__:
        raise UnseekableDataset(f"{kind} has no __getitem__ of its own")
    if not hasattr(dataset, "__len__"):
        raise UnseekableDataset(f"{kind} has no length")


def _structure(sample: Any) -> str:
    if isinstance(sample, torch.Tensor):
        return f"tensor{tuple(sample.shape)}{sample.dtype}"
    if isinstance(sample, np.ndarray):
        return f"array{sample.shape}{sample.dtype}"
    if isinstance(sample, dict):
        return "{" + ",".join(f"{key}:{_structure(sample[key])}" for key in sorted(sample, key=str)) + "}"
    if isinstance(sample, Sequence) and not isinstance(sample, str | bytes):
        return "(" + ",".join(_structure(item) for item in sample) + ")"
    return type(sample).__name__


def _move(batch: Any, device: torch.device, *, pins: bool = False) -> Any:
    """`pins`: by way of memory that a device can copy from by itself."""
    move = partial(_move, device=device, pins=pins)
    if isinstance(batch, torch.Tensor):
        return (batch.pin_memory() if pins else batch).to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: move(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(move, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(move, batch))
    return batch
