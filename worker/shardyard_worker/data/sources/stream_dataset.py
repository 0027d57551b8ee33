"""A stream as a data set that is read by index.

Owns: where the stream stands. Invariant: sample i is the i-th sample of the stream, in every process. Must not know:
leases, batches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar, cast

from torch.utils.data import Dataset

from shardyard.domain import limits
from shardyard.domain.errors import InvalidRequest, UnseekableDataset

T_co = TypeVar("T_co", covariant=True)


class StreamDataset(Dataset[T_co]):
    """The first `samples` samples of a stream, read by their index. For `job.batches`, `job.sampler`, and any
    DataLoader.

    `stream`: a torch IterableDataset, or anything else that can be iterated over again, with the same samples in the
    same order each time and in each process. `samples`: their number; not needed if the stream has `__len__`.

    Reading sample i reads all samples before it and drops those that were not asked for. Reading on goes on from
    there, and an index before it begins the stream anew. So give shuffle=False, and let the stream shuffle by itself
    with a seed that all workers share. Each process goes through the whole stream: a worker, or each of its
    `num_workers`. Raises UnseekableDataset, InvalidRequest.

    >>> class Squares(torch.utils.data.IterableDataset):
    ...     def __iter__(self):
    ...         return (torch.tensor([float(n * n)]) for n in range(6))
    >>> data = sy.StreamDataset(Squares(), samples=6)
    >>> with sy.connect() as job:
    ...     model = torch.nn.Linear(1, 1)
    ...     model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.001))
    ...     for x in job.batches(data, batch_size=2, shuffle=False):
    ...         optimizer.zero_grad()
    ...         model(x).mean().backward()
    ...         optimizer.step()
    ...     job.step
    3
    """

    def __init__(self, stream: Iterable[T_co], samples: int | None = None) -> None:
        kind = type(stream).__name__
        if isinstance(stream, Iterator):
            raise UnseekableDataset(
                f"{kind} can be iterated over only once",
                todo="give an object whose __iter__ begins anew each time, for example an IterableDataset",
            )
        if samples is None:
            if not hasattr(stream, "__len__"):
                raise UnseekableDataset(
                    f"{kind} has no length",
                    todo="say how many samples it has: StreamDataset(stream, samples=N)",
                )
            samples = len(cast(Sized, stream))
        if not 0 <= samples <= limits.SAMPLES_MAX:
            raise InvalidRequest(f"a stream of {samples} samples; expected 0 to {limits.SAMPLES_MAX}")
        self._stream = stream
        self._samples = samples
        self._iterator: Iterator[T_co] | None = None
        self._next = 0
        """The index of the sample that the iterator gives next."""
        self._process = 0

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> T_co:
        """Raises IndexError, InvalidRequest."""
        if not 0 <= index < self._samples:
            raise IndexError(index)
        process = os.getpid()
        # a copy of this process would read on in the files that the other one has open
        if self._iterator is None or index < self._next or self._process != process:
            self._iterator, self._next, self._process = iter(self._stream), 0, process
        for sample in self._iterator:
            self._next += 1
            if self._next > index:
                if self._next == self._samples:
                    self._iterator = None  # it may hold files open
                return sample
        self._iterator = None
        raise InvalidRequest(
            f"{type(self._stream).__name__} ended after {self._next} samples; it should have {self._samples}",
            why="each sample counts once an epoch, and those that are missing can be read nowhere",
            todo="give StreamDataset their number; a stream that gives each process or worker a part must give"
            " the whole here",
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_iterator": None}
