"""Steps of tables whose rows are in this process, for a loop with no job: `shardyard.tables.Optimizer`.

Owns: one parameter group for each table, with its settings, so that learning-rate schedulers work as with any optimizer
of torch; the number of each table's steps. Invariant: a step changes the rows of a table that have a gradient since the
last `zero_grad`, each once, by the sum of its gradients. Must not know: jobs; how a rule computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, overload

import numpy as np
import torch

from shardyard.ground.errors import InvalidRequest, ShapeMismatch
from shardyard_worker.distinct import Int64s
from shardyard_worker.row_updates import check, state_widths, update
from shardyard_worker.table import Table, tables_of

_NO_IDS: Int64s = np.empty(0, np.int64)
_ROWS = "rows"


class Optimizer(torch.optim.Optimizer):
    """Trains the tables of a model that belongs to no job, each with the optimizer that it was made with, beside the
    optimizer of the model's other parameters.

    It takes the gradients of those tables from now on. What is kept with each row begins anew. Raises InvalidRequest
    for a model without tables, VariableConflict for two tables of one name.
    """

    def __init__(self, model: torch.nn.Module) -> None:
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
        """One step of each table that has gradients. Gives back the closure's loss. Raises InvalidRequest for a setting
        out of range; then nothing has changed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check(group["kind"], _settings(group))
        for group in self.param_groups:
            name, kind, settings = group["table"], group["kind"], _settings(group)
            table = self._tables[name]
            taken = table.gradients.take()
            if taken is None:
                continue
            self._steps[name] += 1
            found, sums = taken
            change = partial(_change, kind, settings, self._steps[name])
            table.rows.update(found.ids, sums, state_widths(kind, settings, table.dim), change)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients that have come. There is nothing to be set to zero."""
        super().zero_grad(set_to_none)
        for table in self._tables.values():
            table.gradients.clear()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with what is kept with each table's rows under "rows": ids, step, and state by torch's names."""
        made = super().state_dict()
        made[_ROWS] = {}
        for name, table in self._tables.items():
            ids, state = table.rows.kept()
            made[_ROWS][name] = {
                "step": torch.tensor(self._steps[name]),
                "ids": torch.from_numpy(ids),
                **{key: torch.from_numpy(values) for key, values in state.items()},
            }
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """After the model's own. Raises InvalidRequest for tables or rows that are not here, ShapeMismatch; then
        nothing has changed."""
        rows = state_dict.get(_ROWS, {})
        if set(rows) != set(self._tables):
            raise InvalidRequest(f"state of the tables {sorted(rows)} for the tables {sorted(self._tables)}")
        taken = {name: self._checked(table, rows[name]) for name, table in self._tables.items()}
        super().load_state_dict({key: value for key, value in state_dict.items() if key != _ROWS})
        for name, (ids, state) in taken.items():
            self._steps[name] = int(rows[name]["step"])
            self._tables[name].rows.keep(ids, state)

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


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "table", "kind", "initial_lr")}


def _change(kind: str, settings: Mapping[str, Any], step: int, *args: Any) -> None:
    update(kind, settings, step, *args)
