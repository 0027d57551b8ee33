"""Batches that processes of a torch DataLoader read ahead, in the order in which they are expected.

Owns: the processes, and which batches they were asked for. Invariants: a batch is read with the random numbers of its
name, whichever process reads it (docs/internals/ledger.md, rule B5); what is delivered is the batch that was asked for.
When another batch is due than was expected, what was read for others is dropped, and reading begins again there. Must
not know: leases, steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from shardyard.domain.errors import InvalidRequest
from shardyard_worker.data.seeding import GeneratorStates, PackedStates, is_same, restore, seed_everything, states

Seed = tuple[int, ...]
"""The seed of a batch's random numbers, which is also its name."""
Collate = Callable[[list[Any]], Any]


class Reading(NamedTuple):
    """A batch to read."""

    seed: Seed
    indices: list[int]


@dataclass(frozen=True)
class ReadBatch:
    """A batch that was read before its turn, or the error of reading it. `states`: the generators' states after it;
    None if reading drew no number."""

    batch: Any
    error: Exception | None
    states: GeneratorStates | None

    def take(self) -> Any:
        """Call it in the batch's turn, after seeding."""
        if self.states is not None:
            restore(self.states)
        if self.error is not None:
            raise self.error
        return self.batch


@dataclass(frozen=True)
class LoaderSettings:
    """How data is read; the arguments of a torch DataLoader of the same names."""

    collate_fn: Collate | None = None
    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None

    def check(self) -> None:
        """Raises InvalidRequest."""
        if self.num_workers < 0 or (self.prefetch_factor is not None and self.prefetch_factor < 1):
            got = f"num_workers {self.num_workers}, prefetch_factor {self.prefetch_factor}"
            raise InvalidRequest(f"{got}; expected at least 0 and 1")
        if self.prefetch_factor is not None and not self.num_workers:
            raise InvalidRequest(
                f"prefetch_factor {self.prefetch_factor} without num_workers",
                why="it is the number of batches that each loader process reads ahead",
                todo="give num_workers too, or leave out prefetch_factor",
            )


def read(dataset: Any, collate: Collate | None, indices: list[int]) -> Any:
    """The samples at the indices, collated."""
    if hasattr(dataset, "__getitems__"):
        return (collate or default_collate)(dataset.__getitems__(indices))
    return (collate or default_collate)([dataset[index] for index in indices])


class LoaderProcesses:
    """Processes that read one data set, from the first batch until `close`."""

    def __init__(self, dataset: Dataset[Any], settings: LoaderSettings, *, pin_memory: bool) -> None:
        self._plan: Iterator[Reading] = iter(())
        self._asked: deque[Seed] = deque()
        """The batches that the processes read, in the order of their delivery."""
        self._loader: DataLoader[Any] = DataLoader(
            _Seeded(dataset, settings.collate_fn),
            batch_size=None,
            sampler=_Planned(self._next_readings),
            collate_fn=_as_it_is,
            num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor,
            pin_memory=pin_memory,
            timeout=settings.timeout,
            worker_init_fn=settings.worker_init_fn,
            multiprocessing_context=settings.multiprocessing_context,
            generator=torch.Generator(),  # it would draw a number from this process's own
            persistent_workers=True,
        )
        self._delivered: Any = None

    def take(self, seed: Seed, begin: Callable[[], Iterator[Reading]]) -> ReadBatch:
        """Waits for a batch. `begin` returns the batches that are expected from this one on; it is asked if another one
        was expected."""
        if self._delivered is None or not self._asked or self._asked[0] != seed:
            self._plan = begin()
            self._asked.clear()
            self._delivered = iter(self._loader)
            assert self._asked[0] == seed
        self._asked.popleft()
        try:
            batch, states = next(self._delivered)
        except Exception as error:  # noqa: BLE001 - raised in its turn, when the batches before it are counted
            return ReadBatch(None, error, None)
        return ReadBatch(batch, None, None if states is None else states.unpacked())

    def close(self) -> None:
        """Ends the processes. A later `take` starts others."""
        self._asked.clear()
        delivered, self._delivered, self._loader._iterator = self._delivered, None, None
        if delivered is not None:
            # as its end does, which comes late where an error's traceback keeps it
            delivered._shutdown_workers()

    def _next_readings(self) -> Iterator[Reading]:
        for reading in self._plan:
            self._asked.append(reading.seed)
            yield reading


class _Planned:
    """The sampler: each pass over it goes through the plan at that time."""

    def __init__(self, readings: Callable[[], Iterator[Reading]]) -> None:
        self._readings = readings

    def __iter__(self) -> Iterator[Reading]:
        return self._readings()


class _Seeded(Dataset[Any]):
    """In a loader process: reads a batch as its turn would."""

    def __init__(self, dataset: Dataset[Any], collate: Collate | None) -> None:
        self._dataset = dataset
        self._collate = collate

    def __getitem__(self, reading: Reading) -> tuple[Any, PackedStates | None]:
        """The batch, and the generators' states after it if they have changed."""
        seed_everything(*reading.seed, devices=False)
        before = states()
        batch = read(self._dataset, self._collate, reading.indices)
        after = states()
        return batch, None if is_same(before, after) else PackedStates.of(after)


def _as_it_is(read: Any) -> Any:
    return read
