"""Rows of a followed job, as the modules of a model ask for them.

Owns: a `RowSource` over a version that is pinned on servers. Invariants: a model reads rows of the version that it was
given; if that is lost and the job is not synchronous, it reads rows of a newer version, in which each partition is as
it was at one moment; nothing is ever changed. Safe for several threads. Must not know: parameters, when versions are
taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardyard.domain.errors import InvalidRequest, ShapeMismatch, UnsupportedModel, VersionPassed
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import JobLayout
from shardyard_worker.embedding.table import RowsNeeded, RowSource, Table
from shardyard_worker.reader.pinned_version import numbers_of
from shardyard_worker.rows.dedup import Float32s, Int64s, UniqueIds, unique_ids
from shardyard_worker.rows.row_prefetch import RowQuery

LookUpRows = Callable[[Sequence[RowQuery]], Sequence[Float32s]]
"""Returns the rows of each table's unique ids, all of one version. Each table is named at most once. Raises
VersionPassed."""
ReadRows = Callable[[int, int, PartitionId], list[tuple[Int64s, Float32s]]]
"""Returns all rows that a table, given by its number and dim, has in a partition, each id once, of one version. Raises
VersionPassed."""
Reads = tuple[LookUpRows, ReadRows]


class PinnedRows:
    """`renew`: pins a newer version after one was lost. None: no newer one may be read."""

    def __init__(self, layout: JobLayout, renew: Callable[[], Reads] | None = None) -> None:
        self._numbers = numbers_of(layout)
        self._partitions = len(layout.partitions)
        self._renew = renew
        self._lock = threading.Lock()
        self._read: LookUpRows | None = None
        self._read_all: ReadRows | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PinnedRows:
        """A copy of a model shares these rows."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise InvalidRequest(
            "a model with tables of a job that is followed, to be pickled",
            why="its rows are on servers",
            todo="pickle its parameters alone",
        )

    def show(self, read: LookUpRows | None, read_all: ReadRows | None = None) -> None:
        """Sets the version that is read from now on. `read_all`: reads all rows of a table, if that is allowed. `read`
        None: no version can be read for now."""
        with self._lock:
            self._read, self._read_all = read, read_all

    def once(self, table: Table, ids: Int64s) -> UniqueIds:  # noqa: ARG002
        return unique_ids(ids, self._partitions)

    def fetch(self, wanted: Sequence[RowsNeeded]) -> Sequence[Float32s]:
        """Raises VersionPassed."""
        asked = [RowQuery(self._numbers[each.table.name], each.found, each.table.dim) for each in wanted]
        while True:
            with self._lock:
                read = self._read
            if read is None:
                raise VersionPassed(
                    f"rows of table {wanted[0].table.name!r}, of a version that was left",
                    why="rows are those of the newest snapshot, until the next one is asked for, or the run is closed",
                    todo="evaluate within the loop over run.snapshots(model)",
                )
            try:
                return read(asked)
            except VersionPassed:
                if self._renew is None:
                    raise
                self.show(*self._renew())

    def count(self, table: Table) -> int:
        raise _all_rows(table)

    def pieces(self, table: Table) -> Iterator[tuple[Int64s, Float32s]]:
        """Yields a partition at a time. Raises VersionPassed, InvalidRequest if all rows may not be read."""
        for partition in range(self._partitions):
            yield from self._read_partition(table, PartitionId(partition))

    def _read_partition(self, table: Table, partition: PartitionId) -> list[tuple[Int64s, Float32s]]:
        while True:
            with self._lock:
                read_all = self._read_all
            if read_all is None:
                raise _all_rows(table)
            try:
                return read_all(self._numbers[table.name], table.dim, partition)
            except VersionPassed:
                if self._renew is None:
                    raise
                self.show(*self._renew())

    def put(self, table: Table, ids: Int64s, rows: Float32s) -> None:  # noqa: ARG002
        raise _changed(table)

    def replace(self, table: Table, ids: Int64s, rows: Float32s) -> None:  # noqa: ARG002
        raise _changed(table)


def bind(tables: dict[str, Table], layout: JobLayout, source: RowSource) -> None:
    """Makes these the job's tables of the same names, with their rows from `source`. A table that the job does not have
    is left alone if it has rows of its own. Raises UnsupportedModel, ShapeMismatch."""
    theirs = {settings.name: settings for settings in layout.tables}
    for name, table in tables.items():
        if name not in theirs:
            if len(table):
                continue
            raise UnsupportedModel(
                f"a model to be followed whose embedding table {name!r} has no rows",
                why=f"the job has no table of that name ({', '.join(theirs) or 'none at all'}), so it would be judged "
                "by untrained rows",
                todo="build the job's model, or put rows into the table first (table.load)",
            )
        if table.dim != theirs[name].dim:
            raise ShapeMismatch(f"table {name!r} is of dim {table.dim}; the job's of dim {theirs[name].dim}")
    for name, table in tables.items():
        if name in theirs and table.source is not source:
            table.name, table.seed = name, theirs[name].seed
            table.rows = table.no_rows()
            table.gradients.clear()
            table.source, table.is_trained = source, False


def _all_rows(table: Table) -> InvalidRequest:
    return InvalidRequest(
        f"all rows of table {table.name!r} of a job that is followed",
        why="a reader looks up rows by their ids",
        todo="write them out from a checkpoint: `shardyard checkpoint export --table`",
    )


def _changed(table: Table) -> InvalidRequest:
    return InvalidRequest(
        f"rows put into table {table.name!r} of a job that is followed",
        why="a reader changes nothing",
        todo="",
    )
