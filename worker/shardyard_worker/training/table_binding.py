"""A model's tables in a job: their settings, their rows on the servers, and the gradients that a push includes.

Owns: which table of the job is which of the model's; where rows come from during the job. Invariants: all workers of a
job read the same rows, even rows that were never pushed, since the first registration sets the seeds; a table's rate
follows that of the parameter group that has its weight. Must not know: names of pushes, bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.limits import TABLE_ROWS_MAX, TABLE_SEED_MAX
from shardyard.domain.tables import row_optimizers, row_rules
from shardyard.domain.tables.initial_values import InitialValues
from shardyard.domain.tables.table_settings import Admission, TableSettings
from shardyard_worker.embedding.table import RowsNeeded, RowSource, Table
from shardyard_worker.rows.cache_rules import cache_rules
from shardyard_worker.rows.dedup import Float32s, Int64s, UniqueIds, unique_ids
from shardyard_worker.rows.row_cache import RowCache
from shardyard_worker.rows.row_codec import TableRows
from shardyard_worker.rows.row_prefetch import PartialRows, RowPrefetch, RowQuery, part_of
from shardyard_worker.session.session import Session

log = logging.getLogger("shardyard.worker")

Groups = tuple[tuple[float, ...], ...]
Announced = tuple[Table, Int64s]
"""Ids, shape (n,), repeated or not, that will be looked up."""
Upcoming = Callable[[], Sequence[Announced]]
"""Returns the ids that are looked up while the model holds the values of the next exchange."""


@dataclass(frozen=True)
class TakenRows:
    """The row gradients since the last step, of the tables that have any. `groups`: the settings of each table's
    optimizer for the update."""

    tables: tuple[TableRows, ...]
    groups: Groups

    def unscaled(self, scale: torch.Tensor | None) -> TakenRows:
        """Divides by the scale of the loss, in place. None: they are unscaled already."""
        if scale is not None:
            inverse = float(scale.double().reciprocal().float())
            torch._foreach_mul_(self.tensors, inverse)
        return self

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The gradients of each table, shape (m, dim), on the memory that is sent."""
        return [torch.from_numpy(each.values) for each in self.tables]


class TableBinding:
    """`tables`: of a model, by name; `groups`: the parameter groups of its optimizer; `paths`: of tables in the model,
    where they are not the names.

    Raises InvalidRequest for a seed of more than 64 bits, and for settings that servers do not accept.
    """

    def __init__(
        self, tables: Mapping[str, Table], groups: Sequence[dict[str, Any]], paths: Mapping[str, str] | None = None
    ) -> None:
        self._tables = tuple(tables.values())
        self.settings = tuple(_settings(name, table, (paths or {}).get(name, "")) for name, table in tables.items())
        self.partitions = 1
        """The job's number of partitions."""
        self.ahead: RowPrefetch | None = None
        """Prefetched rows that are as new as the model's values."""
        self.cache: RowCache | None = None
        """Rows of earlier steps, if this worker caches any."""
        self._rates = [_Rate(table, groups) for table in self._tables]
        self._numbers = {settings.name: number for number, settings in enumerate(self.settings)}

    def number(self, table: Table) -> int:
        """The table's number in the job; a copy has the same. Raises InvalidRequest for another table."""
        found = self._numbers.get(table.name)
        if found is None:
            raise InvalidRequest(f"table {table.name!r}, which is not one of those that were given to job.prepare")
        return found

    def adopt(self, layout: JobLayout) -> None:
        """Takes over the job's settings, those of the first registration. The model's own rows do not change."""
        assert len(layout.tables) == len(self._tables)
        self.partitions = len(layout.partitions)
        self.settings = layout.tables
        for settings, table in zip(self.settings, self._tables, strict=True):
            table.name, table.seed = settings.name, settings.seed

    def choose_cache(self, session: Session) -> None:
        """Makes a row cache if the job's mode allows one. A job that began asynchronous and is synchronous now has
        none; one that began synchronous refuses the setting. Raises ConfigurationError."""
        if session.mode is UpdateMode.SYNC and session.consistency.number:
            if session.settings.worker.cached_rows_bytes:
                log.warning("no rows are kept for later steps (worker.cached_rows_bytes): the job is in mode sync")
            self.cache = None
            return
        rules = cache_rules(session.settings.worker, session.job_settings)
        self.cache = None if rules is None else RowCache(rules)

    def first_rows(self) -> list[TableRows]:
        """The model's own rows, as loaded before."""
        found = []
        for number, table in enumerate(self._tables):
            every = table.rows.everything()
            if every.ids.size:
                order = unique_ids(every.ids, self.partitions)
                values = np.empty_like(every.rows)
                values[order.places] = every.rows
                found.append(TableRows(number, order, values))
        return found

    def begin(self, source: RowSource) -> None:
        """From now on rows come from the servers, and the job takes the gradients."""
        for table in self._tables:
            table.rows = table.no_rows()
            table.gradients.clear()
            table.source, table.is_trained = source, True

    def end(self) -> None:
        """The worker has left the job, so its rows cannot be reached any more."""
        self.ahead = None
        for table in self._tables:
            if not isinstance(table.source, _Left):
                table.source, table.is_trained = _Left(), False
                table.gradients.clear()

    def take(self) -> TakenRows | None:
        """Takes all gradients. None if no table has any."""
        found = []
        for number, table in enumerate(self._tables):
            taken = table.gradients.take(self.partitions)
            if taken is not None:
                found.append(TableRows(number, *taken))
        return TakenRows(tuple(found), self.groups()) if found else None

    def joined(self, announced: Sequence[Announced]) -> dict[int, Int64s]:
        """All announced ids, by table. Raises InvalidRequest."""
        by_table: dict[int, list[Int64s]] = {}
        for table, ids in announced:
            by_table.setdefault(self.number(table), []).append(ids)
        return {number: np.concatenate(ids) for number, ids in by_table.items()}

    def look_ahead(self, joined: Mapping[int, Int64s], *, step: int = 0, as_of: int = 0) -> RowPrefetch | None:
        """The rows to prefetch, without those in the cache. None if there are none, or more than one answer can carry.
        `step`: at which they are used; `as_of`: the step as of which servers answer."""
        asked = [
            RowQuery(number, unique_ids(ids, self.partitions), self.settings[number].dim)
            for number, ids in joined.items()
            if ids.size
        ]
        here: dict[int, PartialRows] = {}
        if self.cache is not None:
            asked = [part for each in asked if (part := _lacking(each, self.cache, step, here)) is not None]
        if not (asked or here) or not RowPrefetch.fit(asked):
            return None
        cleared = 0 if self.cache is None else self.cache.cleared
        return RowPrefetch(asked, joined, here, as_of=as_of, cleared=cleared)

    def pushed(self, taken: TakenRows, *, exact: bool) -> None:
        """This step sends these gradients. `exact`: servers get them unchanged."""
        if self.cache is None:
            return
        for each in taken.tables:
            rule = _stateless_rule(self.settings[each.table], taken.groups[each.table]) if exact else None
            self.cache.pushed(each.table, each.found.ids, each.values, rule)

    def arrive(self, ahead: RowPrefetch | None) -> None:
        """Takes the rows that came with the model's new values."""
        if ahead is not None and ahead is not self.ahead and self.cache is not None:
            if ahead.cleared != self.cache.cleared:
                ahead.forget_here()
            else:
                for table, ids, rows in ahead.came():
                    self.cache.put(table, ids, rows, ahead.as_of, since=ahead.as_of)
        self.ahead = ahead

    def once(self, number: int, ids: Int64s) -> UniqueIds:
        """Ids of a table, each once, by partition."""
        known = None if self.ahead is None else self.ahead.known(number, ids)
        return unique_ids(ids, self.partitions) if known is None else known

    def gradients(self) -> list[torch.Tensor]:
        """The gradients so far. They may be changed in place."""
        return [tensor for table in self._tables for tensor in table.gradients.tensors()]

    def clear(self) -> None:
        """Drops the gradients."""
        for table in self._tables:
            table.gradients.clear()

    def groups(self) -> Groups:
        """The settings of each table's optimizer for an update now."""
        return tuple([rate.group(settings) for rate, settings in zip(self._rates, self.settings, strict=True)])


def _stateless_rule(settings: TableSettings, group: tuple[float, ...]) -> row_rules.RowRule | None:
    """How servers update rows, if an update needs only the row and its gradient."""
    if settings.optimizer != "sgd" or settings.admission.kind is not Admission.ALL:
        return None
    rule = row_rules.rule_of("sgd", group, 1)
    return rule if rule.code == row_rules.SGD else None


def _lacking(asked: RowQuery, cache: RowCache, step: int, here: dict[int, PartialRows]) -> RowQuery | None:
    """The ids that must be looked up. The others are noted in `here`."""
    rows = np.empty((asked.found.ids.size, asked.dim), np.float32)
    lacks = cache.take(asked.table, asked.found.ids, rows, step)
    if lacks is None:
        here[asked.table] = PartialRows(asked.found, rows, np.zeros(asked.found.ids.size, np.bool_))
        return None
    if lacks.all():
        return asked
    here[asked.table] = PartialRows(asked.found, rows, lacks)
    return RowQuery(asked.table, part_of(asked.found, lacks), asked.dim)


class _Rate:
    """A table's rate: its optimizer's rate, times its parameter group's current rate over that group's first rate."""

    def __init__(self, table: Table, groups: Sequence[dict[str, Any]]) -> None:
        holds = [group for group in groups if any(each is table.weight for each in group["params"])]
        self._group = (holds or list(groups))[0]
        self._base = float(self._group.get("initial_lr", self._group["lr"]))

    def group(self, settings: TableSettings) -> tuple[float, ...]:
        now = float(self._group["lr"])
        if now == self._base or self._base == 0:
            return settings.group
        names = [setting.name for setting in row_optimizers.settings_of(settings.optimizer)]
        at = names.index("lr")
        return (*settings.group[:at], settings.group[at] * (now / self._base), *settings.group[at + 1 :])


def _settings(name: str, table: Table, path: str) -> TableSettings:
    if not -TABLE_SEED_MAX <= table.seed <= TABLE_SEED_MAX:
        raise InvalidRequest(f"table {name!r} with the seed {table.seed}; expected one of 64 bits")
    initial = InitialValues(table.initial.kind, float(table.initial.scale))
    return TableSettings(
        name,
        table.dim,
        table.optimizer.kind,
        table.optimizer.group,
        table.seed,
        initial,
        TABLE_ROWS_MAX,
        table.lifetime.admission,
        table.lifetime.expiry,
        path,
    )


class _Left:
    """Raises an error for rows of a job that this worker has left."""

    def once(self, table: Table, *_: object) -> NoReturn:
        raise _gone(table)

    count = pieces = put = replace = once

    def fetch(self, wanted: Sequence[RowsNeeded]) -> Sequence[Float32s]:
        raise _gone(wanted[0].table)


def _gone(table: Table) -> InvalidRequest:
    return InvalidRequest(
        f"rows of table {table.name!r}, whose job has been left",
        why="they are the servers', and no more than a job's table fits into one process",
        todo="take model.state_dict(), or table.export(path), before the job is left",
    )
