"""`shardyard.tables.Optimizer`: steps of tables whose rows are in this process, for a loop without a job.

Owns: one parameter group for each table, with its settings, so torch's learning-rate schedulers work; the number of
each table's steps. Invariant: a step changes each row that has gradients once, by their sum. Must not know: jobs, how a
rule computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, overload

import numpy as np
import torch

from shardyard.domain.errors import InvalidRequest, ShapeMismatch
from shardyard.domain.limits import FREQUENCY_MAX
from shardyard.runtime.clock import Clock, SystemClock
from shardyard_worker.embedding.local_rows import SavedEntries
from shardyard_worker.embedding.row_optimizers import group_of
from shardyard_worker.embedding.table import Table, tables_of
from shardyard_worker.rows.dedup import Int64s

_NO_IDS: Int64s = np.empty(0, np.int64)
_ROWS, _ENTRIES, _NOW_MS = "rows", "entries", "now_ms"
_OURS = (_ROWS, _ENTRIES, _NOW_MS)


class Optimizer(torch.optim.Optimizer):
    """Trains the tables of a model that belongs to no job, each with its own optimizer settings, beside the optimizer
    of the model's other parameters.

    From now on it takes these tables' gradients. Optimizer state of rows starts anew. `clock`: the clock by which rows
    age, for tables that expire rows by seconds. Raises InvalidRequest for a model without tables, VariableConflict for
    two tables of one name.

    >>> model = sy.Embedding(2, optimizer=sy.tables.SGD(lr=0.5))
    >>> optimizer = sy.tables.Optimizer(model)
    >>> before = model(torch.tensor([7]))
    >>> before.sum().backward()
    >>> optimizer.step()
    >>> (model(torch.tensor([7])) - before).tolist()
    [[-0.5, -0.5]]
    """

    def __init__(self, model: torch.nn.Module, *, clock: Clock | None = None) -> None:
        self._tables = tables_of(model)
        if not self._tables:
            raise InvalidRequest("a model without tables", todo="give its parameters to an optimizer of torch.optim")
        groups = [
            {
                "params": [table.weight],
                "table": name,
                "kind": table.optimizer.kind,
                **dataclasses.asdict(table.optimizer),
            }
            for name, table in self._tables.items()
        ]
        super().__init__(groups, {})
        self._steps = dict.fromkeys(self._tables, 0)
        self._clock = clock or SystemClock()
        self._begun_ms = self._clock.now_ms()
        """The time at which the tables' clock was 0. They age only while there is an optimizer."""
        for table in self._tables.values():
            table.rows.keep(_NO_IDS, {})
            table.gradients.clear()
            table.is_trained = True

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step of each table that has gradients. Returns the closure's loss. Raises InvalidRequest for a
        setting out of range; then nothing has changed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        numbers = [_numbers(group) for group in self.param_groups]  # checks all before any table changes
        for group, settings in zip(self.param_groups, numbers, strict=True):
            name = group["table"]
            table = self._tables[name]
            taken = table.gradients.take()
            if taken is None:
                continue
            self._steps[name] += 1
            found, sums = taken
            table.rows.update(found.ids, sums, group["kind"], settings, self._steps[name], self._now_ms)
            table.rows.remove_expired()
        return loss

    @property
    def _now_ms(self) -> int:
        return self._clock.now_ms() - self._begun_ms

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients. `set_to_none` changes nothing: there is no `.grad` to set to zero."""
        super().zero_grad(set_to_none)
        for table in self._tables.values():
            table.gradients.clear()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, plus two entries by table. "rows": ids, step, and optimizer state by torch's names. "entries",
        for tables with admission or expiry: how often and when ids were pushed ("now_ms": the time, in
        milliseconds)."""
        made = super().state_dict()
        made[_ROWS] = {}
        made[_ENTRIES] = {}
        made[_NOW_MS] = self._now_ms
        for name, table in self._tables.items():
            ids, state = table.rows.kept()
            made[_ROWS][name] = {
                "step": torch.tensor(self._steps[name]),
                "ids": torch.from_numpy(ids),
                **{key: torch.from_numpy(values) for key, values in state.items()},
            }
            entries = table.rows.entries()
            if entries is not None:
                made[_ENTRIES][name] = {
                    field.name: torch.from_numpy(getattr(entries, field.name)) for field in dataclasses.fields(entries)
                }
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the model's own state first. Raises InvalidRequest for tables or rows that the model does not have,
        ShapeMismatch; then nothing has changed."""
        rows = state_dict.get(_ROWS, {})
        if set(rows) != set(self._tables):
            raise InvalidRequest(f"state of the tables {sorted(rows)} for the tables {sorted(self._tables)}")
        taken = {name: self._checked(table, rows[name]) for name, table in self._tables.items()}
        entries = {name: _checked_entries(name, each) for name, each in state_dict.get(_ENTRIES, {}).items()}
        now_ms = int(state_dict.get(_NOW_MS, 0))
        if now_ms < 0:
            raise InvalidRequest(f"state of tables at {now_ms} ms; expected 0 or more")
        super().load_state_dict({key: value for key, value in state_dict.items() if key not in _OURS})
        self._begun_ms = self._clock.now_ms() - now_ms
        for name, (ids, state) in taken.items():
            self._steps[name], kept = int(rows[name]["step"]), self._tables[name].rows
            kept.keep(ids, state, kept.lifetime.expiry.time(self._steps[name], now_ms), entries.get(name))

    def _checked(self, table: Table, given: Mapping[str, torch.Tensor]) -> tuple[Int64s, dict[str, Any]]:
        ids = given["ids"].cpu().numpy()
        missing = table.rows.missing(ids)
        if missing.size:
            raise InvalidRequest(
                f"state for {missing.size} rows that the table does not have, the first of them of id {missing[0]}",
                todo="load the model's state_dict first",
            )
        state = {key: value.cpu().numpy() for key, value in given.items() if key not in ("ids", "step")}
        for key, values in state.items():
            if values.ndim != 2 or len(values) != ids.size or values.shape[1] not in (1, table.dim):
                raise ShapeMismatch(f"state {key!r} of shape {values.shape} for {ids.size} rows of dim {table.dim}")
        return ids, state


def _checked_entries(name: str, given: Mapping[str, torch.Tensor]) -> SavedEntries:
    """Raises InvalidRequest."""
    names = [field.name for field in dataclasses.fields(SavedEntries)]
    dtypes = dict.fromkeys(names, torch.int64) | {"cells": torch.uint8}
    if set(given) != set(names) or any(given[key].dtype is not dtypes[key] or given[key].dim() != 1 for key in names):
        raise InvalidRequest(f"entries of table {name!r} with {sorted(given)}; expected {names}, int64 and uint8, (n,)")
    found = SavedEntries(**{key: given[key].cpu().numpy() for key in names})
    n = found.ids.size
    if found.pushed.size != 1 or found.frequencies.size != n or found.times.size != n or np.unique(found.ids).size != n:
        raise InvalidRequest(f"entries of table {name!r}, of {n} ids, that do not fit together, or name an id twice")
    if n and not (found.frequencies.min() >= 1 and found.frequencies.max() <= FREQUENCY_MAX and found.times.min() >= 0):
        raise InvalidRequest(
            f"entries of table {name!r} with frequencies beyond 1 to {FREQUENCY_MAX}, or times below 0"
        )
    return found


def _numbers(group: Mapping[str, Any]) -> tuple[float, ...]:
    """The settings of a parameter group. Raises InvalidRequest."""
    others = ("params", "table", "kind", "initial_lr")
    return group_of(group["kind"], {name: value for name, value in group.items() if name not in others})
