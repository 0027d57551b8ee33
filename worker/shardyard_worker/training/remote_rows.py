"""Rows on a job's servers, as the modules of a model ask for them.

Owns: a `RowSource` over the servers. Invariants: a look-up changes nothing, so it is repeated if no answer came, and
under the newest map if partitions have moved; in a synchronous job rows are of the version that the targets hold, or
the current work does not count. Must not know: how rows are pooled, bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from shardyard.domain.errors import InvalidRequest, NotFound
from shardyard.domain.ids import PartitionId
from shardyard_worker.embedding.table import RowsNeeded, Table
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.exchange.row_reads import RowReads
from shardyard_worker.exchange.server_group import ServerGroup
from shardyard_worker.rows.dedup import Float32s, Int64s, UniqueIds
from shardyard_worker.rows.row_codec import questions
from shardyard_worker.rows.row_prefetch import Bools, RowQuery, complete
from shardyard_worker.session.interrupts import INTERRUPTS
from shardyard_worker.training.table_binding import TableBinding
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepContext

R = TypeVar("R")


class RemoteRows:
    """The rows of one job, for the thread that trains."""

    def __init__(
        self,
        trainer: Trainer,
        tables: TableBinding,
        *,
        context: Callable[[], StepContext],
        looks_ahead: Callable[[], bool],
    ) -> None:
        """`looks_ahead`: whether the script announces the ids of its next batches."""
        self._trainer = trainer
        self._context = context
        self._looks_ahead = looks_ahead
        self._tables = tables
        self.looked_up, self.came_ahead = 0, 0
        """Rows that forwards have asked for while look-ahead was on, and how many had arrived by then."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteRows:
        """A copy of a model shares these rows."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise InvalidRequest(
            "a model with tables of a job, to be pickled",
            why="its rows are on servers",
            todo="pickle model.state_dict(), or load that into a model outside of the job",
        )

    def once(self, table: Table, ids: Int64s) -> UniqueIds:
        return self._tables.once(self._tables.number(table), ids)

    def fetch(self, wanted: Sequence[RowsNeeded]) -> Sequence[Float32s]:
        """Takes prefetched rows first, then cached rows, and the rest from the servers."""
        asked = [RowQuery(self._tables.number(each.table), each.found, each.table.dim) for each in wanted]
        ahead = self._tables.ahead
        if self._looks_ahead():
            self.looked_up += _count(asked)
        if ahead is None:
            return self._find(asked)
        lacking = 0

        def rest(more: Sequence[RowQuery]) -> Sequence[Float32s]:
            nonlocal lacking
            lacking = _count(more)
            return self._find(more)

        found = complete(asked, lambda each: ahead.take(*each), rest)
        if self._looks_ahead():
            self.came_ahead += _count(asked) - lacking
        return found

    def _find(self, asked: Sequence[RowQuery]) -> Sequence[Float32s]:
        """Finds rows in the cache, if there is one, or on the servers."""
        cache = self._tables.cache
        if cache is None:
            return self._look_up(asked)

        def take(each: RowQuery) -> tuple[Float32s, Bools | None]:
            rows = np.empty((each.found.ids.size, each.dim), np.float32)
            return rows, cache.take(each.table, each.found.ids, rows, cache.step)

        def look_up(more: Sequence[RowQuery]) -> Sequence[Float32s]:
            values = self._look_up(more)
            for each, rows in zip(more, values, strict=True):
                cache.put(each.table, each.found.ids, rows, cache.step, since=cache.step - cache.under_way)
            return values

        return complete(asked, take, look_up)

    def _look_up(self, asked: Sequence[RowQuery]) -> Sequence[Float32s]:
        found = [np.empty((each.found.ids.size, each.dim), np.float32) for each in asked]

        def ask(router: ServerGroup) -> None:
            number, reads = self._context().rows_version(), router.rows
            if number is None and router.looks_up_in_exchanges:
                router.look_up(asked, found)
                return
            by_server = {server: questions(asked, owned) for server, owned in reads.owned.items()}
            if number is not None:
                try:
                    reads.look_up(by_server, found, number)
                except NotFound as error:
                    if "newest" not in error.facts:
                        raise
                    self._context().on_rows_version_passed(error)
                else:
                    return
            reads.look_up(by_server, found)

        self._reach(ask)
        return found

    def count(self, table: Table) -> int:
        name = self._tables.settings[self._tables.number(table)].name
        return self._reach(lambda router: router.rows.count_rows(name))

    def pieces(self, table: Table) -> Iterator[tuple[Int64s, Float32s]]:
        number = self._tables.number(table)
        for index in range(self._tables.partitions):
            partition = PartitionId(index)
            # under another map the current partition is read again
            read = partial(RowReads.read_rows, table=number, dim=table.dim, partition=partition)
            yield from self._reach(partial(_of_rows, read))

    def put(self, table: Table, ids: Int64s, rows: Float32s) -> None:  # noqa: ARG002
        raise _given(table)

    def replace(self, table: Table, ids: Int64s, rows: Float32s) -> None:  # noqa: ARG002
        raise _given(table)

    def _reach(self, ask: Callable[[ServerGroup], R]) -> R:
        """Asks under the newest map."""
        with INTERRUPTS:
            while True:
                try:
                    return ask(self._trainer.router)
                except MapChanged:
                    self._context().follow_map()


def _of_rows(read: Callable[[RowReads], R], router: ServerGroup) -> R:
    return read(router.rows)


def _count(asked: Sequence[RowQuery]) -> int:
    return sum([each.found.ids.size for each in asked])


def _given(table: Table) -> InvalidRequest:
    return InvalidRequest(
        f"rows put into table {table.name!r} of a job",
        why="its rows are changed by pushes alone, each of which counts once",
        todo="put or load them before job.prepare: the worker that gives first values gives these too",
    )
