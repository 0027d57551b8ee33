"""The rows of a table in this process, for tables that belong to no job.

Owns: rows by id, the optimizer state of each, their growth, and when a walk for expired rows is due. Invariants: a
look-up changes nothing; an id without a row reads as its initial value, a function of seed, table and id, or as zeros;
the first update that the table admits makes the row, or a `put`; a call that raises has changed nothing. Must not know:
modules, files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardyard.domain.tables.initial_values import InitialValues
from shardyard.domain.tables.row_values import initial_rows
from shardyard_worker.embedding.local_entries import LifetimeRules, LocalEntries, SavedEntries
from shardyard_worker.rows.dedup import Float32s, IdNumbering, Int64s

Update = Callable[[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor], torch.Tensor], None]
"""Updates rows in place: (rows, gradients, state, which rows are new)."""


@dataclass(frozen=True, slots=True)
class RowSet:
    """`ids`: shape (n,), ascending, each once. `rows`: shape (n, dim). Copies."""

    ids: Int64s
    rows: Float32s


ALL_LIVE = LifetimeRules()


class LocalRows:
    """A store that grows, on the CPU. One thread at a time."""

    partitions = 1

    def __init__(self, dim: int, initial: InitialValues, key: int, lives: LifetimeRules = ALL_LIVE) -> None:
        self.dim, self.initial, self.key, self.lives = dim, initial, key, lives
        self._entries = LocalEntries(lives, key) if lives.are_kept else None
        self._time = 0
        """The time of the last update: a step, or milliseconds, as the table counts ages."""
        self._pushed = 0
        """Ids pushed since the last walk for expired rows."""
        self._numbers = IdNumbering()
        self._rows = np.empty((0, dim), np.float32)
        self._fresh: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        self._state: dict[str, Float32s] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def look_up(self, ids: Int64s) -> Float32s:
        """Shape (n, dim): the rows of `ids`, shape (n,), which may repeat."""
        numbers = self._numbers.find(ids)
        absent = numbers < 0
        if not absent.any():
            return self._rows[numbers]
        found = np.empty((ids.size, self.dim), np.float32)
        found[~absent] = self._rows[numbers[~absent]]
        found[absent] = 0 if self.lives.admission.zeros else self._initial(ids[absent])
        return found

    def update(
        self,
        ids: Int64s,
        gradients: Float32s,
        widths: Mapping[str, int],
        change: Update,
        step: int,
        now_ms: int = 0,
    ) -> None:
        """Takes update number `step` of the table, at `now_ms` of its clock: changes the rows of `ids`, each once, by
        their gradients, shape (n, dim), except rows that are not admitted. `widths`: the state of a row."""
        self._keep(widths)
        self._time = max(self._time, self.lives.expiry.time(step, now_ms))
        if self._entries is None:
            self._change(ids, gradients, widths, change)
            return
        admitted = self._entries.push(ids, step, self._time)
        self._change(ids[admitted], gradients[admitted], widths, change)
        self._pushed += ids.size

    def tend(self) -> None:
        """Removes what has expired by the last update, if a walk is due."""
        # so a walk costs the same for each pushed id, whatever the number of rows
        if self._entries is not None and self.lives.expires and self._pushed >= len(self._entries):
            self._pushed = 0
            self.drop(self.expired())

    def expired(self) -> Int64s:
        """The ids that have expired by the last update, those that are only counted too."""
        if self._entries is None:
            return np.empty(0, np.int64)
        return self._entries.expired(self._time, self._square_norms)

    def drop(self, ids: Int64s) -> None:
        """Removes the rows of `ids`, if there are any."""
        if not ids.size:
            return
        if self._entries is not None:
            self._entries.drop(ids)
        found = self._numbers.find(ids)
        count = len(self._numbers)
        stays = np.ones(count, np.bool_)
        stays[found[found >= 0]] = False
        kept = self._numbers.ids[stays]
        self._numbers = IdNumbering(kept.size)
        self._numbers.add(kept)
        self._rows, self._fresh = self._rows[:count][stays], self._fresh[:count][stays]
        self._state = {name: values[:count][stays] for name, values in self._state.items()}

    def _change(self, ids: Int64s, gradients: Float32s, widths: Mapping[str, int], change: Update) -> None:
        numbers = self._add(ids)
        rows, fresh = torch.from_numpy(self._rows[numbers]), torch.from_numpy(self._fresh[numbers])
        state = {name: torch.from_numpy(self._state[name][numbers]) for name in widths}
        change(rows, torch.from_numpy(gradients), state, fresh)
        self._rows[numbers] = rows.numpy()
        self._fresh[numbers] = False
        for name, values in state.items():
            self._state[name][numbers] = values.numpy()

    def put(self, ids: Int64s, rows: Float32s) -> None:
        """Sets the rows of `ids`, each once. Optimizer state of rows that were here stays."""
        numbers = self._add(ids)
        self._rows[numbers] = rows
        if self._entries is not None:
            self._entries.put(ids, self._time)

    def with_rows(self, ids: Int64s, rows: Float32s, key: int) -> LocalRows:
        """Another store, with another key and these rows. Rows that are here take their optimizer state along."""
        made = LocalRows(self.dim, self.initial, key, self.lives)
        made.put(ids, rows)
        kept, state = self.kept()
        there = made._numbers.find(kept) >= 0
        made.keep(kept[there], {name: values[there] for name, values in state.items()}, self._time)
        if made._entries is not None and self._entries is not None:
            made._entries.adopt(self._entries)
        return made

    def everything(self) -> RowSet:
        ids = self._numbers.ids
        order = np.argsort(ids)
        return RowSet(ids[order], self._rows[order])

    def kept(self) -> tuple[Int64s, dict[str, Float32s]]:
        """The ids of the rows that were updated, ascending, and their optimizer state."""
        ids = self._numbers.ids
        order = np.argsort(ids)
        order = order[~self._fresh[order]]
        return ids[order], {name: values[order] for name, values in self._state.items()}

    def missing(self, ids: Int64s) -> Int64s:
        """Those that have no row."""
        return ids[self._numbers.find(ids) < 0]

    def entries(self) -> SavedEntries | None:
        """How often and when ids were pushed; None if that is not needed."""
        return None if self._entries is None else self._entries.save(self._pushed)

    def keep(
        self, ids: Int64s, state: Mapping[str, Float32s], time: int = 0, entries: SavedEntries | None = None
    ) -> None:
        """Replaces the optimizer state: that of `ids`, whose rows are here, is given; all others have none. `time`: a
        step or milliseconds, as the table counts ages. Without `entries` all rows count as pushed once, at that
        time."""
        self._time, self._pushed = time, 0
        if self._entries is not None:
            self._entries = LocalEntries(self.lives, self.key)
            told = np.empty(0, np.int64) if entries is None else entries.ids
            if entries is not None:
                self._entries.load(entries, self._numbers.find(told) >= 0)
                self._pushed = int(entries.pushed[0])
            self._entries.put(np.setdiff1d(self._numbers.ids, told), time)
        self._state = {}
        self._keep({name: values.shape[1] for name, values in state.items()})
        self._fresh[:] = True
        numbers = self._numbers.find(ids)
        self._fresh[numbers] = False
        for name, values in state.items():
            self._state[name][numbers] = values

    def _keep(self, widths: Mapping[str, int]) -> None:
        for name, width in widths.items():
            if name not in self._state or self._state[name].shape[1] != width:
                self._state[name] = np.zeros((self._rows.shape[0], width), np.float32)

    def _add(self, ids: Int64s) -> Int64s:
        before = len(self._numbers)
        numbers = self._numbers.add(ids)
        after = len(self._numbers)
        if after > before:
            if after > self._rows.shape[0]:
                self._grow(max(after, 2 * self._rows.shape[0]))
            new = self._numbers.ids[before:]
            self._rows[before:after] = self._initial(new)
            self._fresh[before:after] = True
        return numbers

    def _initial(self, ids: Int64s) -> Float32s:
        return initial_rows(ids, self.dim, self.initial, self.key)

    def _square_norms(self, ids: Int64s) -> npt.NDArray[np.float64]:
        """Summed in the order of the values, as servers do."""
        values = np.ascontiguousarray(self._rows[self._numbers.find(ids)].T, np.float64)
        total: npt.NDArray[np.float64] = np.square(values).sum(axis=0)
        return total

    def _grow(self, rows: int) -> None:
        def grown(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            made = np.zeros((rows, *values.shape[1:]), values.dtype)
            made[: values.shape[0]] = values
            return made

        self._rows, self._fresh = grown(self._rows), grown(self._fresh)
        self._state = {name: grown(values) for name, values in self._state.items()}
