"""The table of a simulated job: which rows a coordinate has, how a worker looks up and pushes them, what they must be.

Owns: the ids, one for a coordinate in each partition that has a row of it; the model's end of the table, without
autograd, whose threads greenlets must not leave in the midst of a backward. Invariant: all that changes or reads rows
is the shipped worker's. Must not know: faults, processes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_ids import partition_of
from shardyard_worker.embedding import row_optimizers
from shardyard_worker.embedding.config import AdmitAfter, Expiry
from shardyard_worker.embedding.table import RowsNeeded, Table
from shardyard_worker.training.table_binding import TableBinding

Ids = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Doubles = npt.NDArray[np.float64]

NAME = "rows"
DIM = 2
SHARED = 5
"""How many coordinates have rows, if samples share rows."""
SHARED_COUNTED = 12
"""The same, for rows that count."""
CELLS = 1 << 16
"""Cells of a filter: so many for so few ids that no two ids collide."""
OPTIMIZERS: Mapping[str, row_optimizers.RowOptimizer] = {
    "sgd": row_optimizers.SGD(lr=1.0),
    "adagrad": row_optimizers.Adagrad(lr=0.1),
    "adam": row_optimizers.Adam(lr=0.1),
    # each step adds 1 where a sample counts, whatever its share of the mean
    "signs": row_optimizers.Adam(lr=1.0, betas=(0.0, 0.0), eps=0.0),
}


@functools.cache
def ids_of(coordinates: int, partitions: int) -> Ids:
    """Shape (coordinates, partitions): the id of each coordinate's row in each partition."""
    found: list[list[int]] = [[] for _ in range(partitions)]
    begin = -coordinates * partitions  # negative ones are ids as well
    while min(map(len, found)) < coordinates:
        ids = np.arange(begin, begin + 64, dtype=np.int64)
        for number, partition in zip(ids.tolist(), partition_of(ids, partitions).tolist(), strict=True):
            found[partition].append(number)
        begin += 64
    return np.array([each[:coordinates] for each in found], np.int64).T


@functools.cache
def has_row(coordinates: int, partitions: int) -> Bools:
    """Shape (coordinates, partitions). Some coordinates have rows in some partitions, some in none, the last in all."""
    coordinate, partition = np.indices((coordinates, partitions))
    found: Bools = (coordinate % 3 != 0) & ((coordinate + partition) % 4 != 0)
    found[-1] = True
    return found


def counted(counts: Doubles, partitions: int) -> bytes:
    """The rows if each coordinate has counted as often as `counts` says."""
    rows = np.where(has_row(counts.size, partitions), counts[:, None], 0.0)
    return np.repeat(rows[:, :, None], DIM, axis=2).tobytes()


def spread(ids: Ids, rows: npt.NDArray[np.float32], coordinates: int, partitions: int) -> bytes:
    """Shape (coordinates, partitions, DIM), float64, zeros where there is no row. Fails for rows of unknown ids."""
    every = ids_of(coordinates, partitions)
    found = np.zeros((coordinates, partitions, DIM))
    order = np.argsort(every, axis=None)
    at = order[np.searchsorted(every.reshape(-1), ids, sorter=order).clip(max=order.size - 1)]
    strange = ids[every.reshape(-1)[at] != ids]
    assert not strange.size, f"rows of ids that nobody has: {strange[:4]}"
    found.reshape(-1, DIM)[at] = rows
    return found.tobytes()


class Lives(NamedTuple):
    """Which ids have a row. `age`: a row expires after this many steps without a push; 0: never. `admitted`: a row is
    created at this push; `estimated`: a filter counts the pushes."""

    age: int = 0
    admitted: int = 1
    estimated: bool = False


ALL: Final = Lives()


class Rows:
    """One worker's end of the table. `coordinates`: how many there are, with one more at the end, in which each push
    may be counted."""

    def __init__(self, optimizer: str, coordinates: int, partitions: int, lives: Lives) -> None:
        self.table = Table(
            DIM,
            name=NAME,
            initial=InitialValues(InitialKind.ZEROS),
            optimizer=OPTIMIZERS[optimizer],
            admission=AdmitAfter(lives.admitted, CELLS if lives.estimated else None) if lives.admitted > 1 else None,
            expiry=Expiry(age_steps=lives.age) if lives.age else None,
            seed=7,
        )
        self.tables = TableBinding({NAME: self.table}, [{"params": [self.table.weight], "lr": 1.0}])
        self._coordinates, self._partitions = coordinates, partitions

    @property
    def last(self) -> Ids:
        """The ids of the last coordinate's rows, one in each partition."""
        return self.ids([self._coordinates - 1])

    def ids(self, coordinates: npt.ArrayLike) -> Ids:
        """The ids of these coordinates' rows."""
        chosen = np.unique(np.asarray(coordinates, np.int64))
        shape = self._coordinates, self._partitions
        return ids_of(*shape)[chosen][has_row(*shape)[chosen]]

    def look_up(self, ids: Ids) -> npt.NDArray[np.float32]:
        """Looks rows up as a forward does. Shape (n, DIM)."""
        source = self.table.source
        once = source.once(self.table, ids)
        (found,) = source.fetch([RowsNeeded(self.table, once)])
        return np.asarray(found)[once.places]

    def add(self, ids: Ids, gradients: npt.NDArray[np.float32] | float) -> None:
        """Adds gradients as a backward does. `ids`: each once; `gradients`: shape (n, DIM), or the same for all."""
        if ids.size:
            once = self.table.source.once(self.table, ids)
            sums = np.empty((ids.size, DIM), np.float32)
            sums[once.places] = gradients
            self.table.gradients.add(once, sums)

    def take(self) -> Any:
        return self.tables.take()

    def clear(self) -> None:
        self.tables.clear()

    def announced(self, ids: Ids) -> dict[torch.nn.Module, torch.Tensor]:
        return {self.table: torch.from_numpy(ids)}

    def everything(self) -> bytes:
        """All rows that the servers have."""
        found = self.table.everything()
        return spread(found.ids, found.rows, self._coordinates, self._partitions)
