"""Map-style datasets, read by index: length, fingerprint, batches.

Invariant: any worker can read any sample again. Must not know: leases, pushes, in which order samples are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from shardyard.domain.epochs import Indices
from shardyard.domain.errors import UnseekableDataset
from shardyard_worker.data.record_files import FileRecords
from shardyard_worker.data.seeding import undisturbed


class Reader:
    """Batches of a dataset, on a device."""

    def __init__(
        self, dataset: Dataset[Any], device: torch.device, collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        _require_seekable(dataset)
        self._dataset: Any = dataset
        self._device = device
        self._collate = collate
        self.samples = len(cast(Sized, dataset))

    def fetch(self, indices: Indices) -> Any:
        """The samples at the indices, collated, with tensors moved to the device."""
        if type(self._dataset) is TensorDataset and self._collate is None:
            chosen = torch.from_numpy(indices)
            batch: Any = [tensor[chosen] for tensor in self._dataset.tensors]
        elif hasattr(self._dataset, "__getitems__"):
            batch = (self._collate or default_collate)(self._dataset.__getitems__(indices.tolist()))
        else:
            batch = (self._collate or default_collate)([self._dataset[index] for index in indices.tolist()])
        return _move(batch, self._device)

    def fingerprint(self) -> str:
        """A digest of the dataset's type and length, of the structure of three samples, and, for a TensorDataset, of
        their content (other datasets may transform samples at random). Lists of files: see FileRecords."""
        digest = hashlib.sha256(f"{type(self._dataset).__name__} {self.samples}".encode())
        if isinstance(self._dataset, FileRecords):
            digest.update(self._dataset.fingerprint().encode())
        with undisturbed():
            for index in sorted({0, self.samples // 2, self.samples - 1} if self.samples else ()):
                sample = self._dataset[index]
                digest.update(_structure(sample).encode())
                if type(self._dataset) is TensorDataset:
                    for tensor in sample:
                        digest.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:32]


def _require_seekable(dataset: object) -> None:
    """Raises UnseekableDataset, with what to do instead, for a dataset that cannot be read by index."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise UnseekableDataset(
            "a DataLoader, which gives batches in an order of its own",
            todo="give its data set: job.batches(loader.dataset, batch_size=..., collate_fn=...); or go through the "
            "loader itself, without job.batches: gradients count once then, samples are the script's matter",
        )
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


def _move(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_move(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_move(value, device) for value in batch)
    return batch
