"""Prefetches the rows of later batches: they arrive with the values on which these batches are computed.

Owns: which rows are prefetched, the memory for them, and which of them a forward needs. Invariants: a prefetched row is
of the same moment as the values of its exchange, and includes the exchange's push. Only prefetched ids are answered.
Must not know: models, names of pushes, servers' addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardyard.domain.compiling import compiled
from shardyard.domain.ids import PartitionId
from shardyard.domain.limits import ROWS_ALONG_BYTES_MAX
from shardyard_worker.rows.dedup import Float32s, Int64s, UniqueIds
from shardyard_worker.rows.row_codec import ROW_COST_MIN, RowLookup, questions

Bools = npt.NDArray[np.bool_]


class RowQuery(NamedTuple):
    """The unique ids that are looked up in one table; the table's number and dim."""

    table: int
    found: UniqueIds
    dim: int


class PartialRows(NamedTuple):
    """Rows that are partly cached. `rows`: shape (m, dim), for all ids of `found`. `lacks`: which rows are missing and
    are looked up."""

    found: UniqueIds
    rows: Float32s
    lacks: Bools


class RowPrefetch:
    """The prefetched rows of one batch, each table at most once. `batches`: all ids of the batch, by table. `here`:
    rows that are partly cached, by table. `as_of`: the step at which servers read the rows. `cleared`: how often the
    cache had been cleared when it returned rows."""

    def __init__(
        self,
        asked: Sequence[RowQuery],
        batches: Mapping[int, Int64s] | None = None,
        here: Mapping[int, PartialRows] | None = None,
        as_of: int = 0,
        cleared: int = 0,
    ) -> None:
        self._asked = asked
        self._batches = batches or {}
        self._here = dict(here or {})
        self.as_of, self.cleared = as_of, cleared
        self.rows = [np.empty((each.found.ids.size, each.dim), np.float32) for each in asked]
        """The memory for all answers, by query."""
        self._questions: dict[tuple[PartitionId, ...], RowLookup | None] = {}

    @staticmethod
    def fit(asked: Sequence[RowQuery]) -> bool:
        """Whether one answer has room for all rows."""
        return sum([max(4 * each.dim, ROW_COST_MIN) * each.found.ids.size for each in asked]) <= ROWS_ALONG_BYTES_MAX

    def question(self, owned: tuple[PartitionId, ...]) -> RowLookup | None:
        """The look-up on the server that owns these partitions. None if it has none of the rows."""
        if owned not in self._questions:
            made = questions(self._asked, owned, ROWS_ALONG_BYTES_MAX)
            assert len(made) <= 1
            self._questions[owned] = made[0] if made else None
        return self._questions[owned]

    def places(self, question: RowLookup) -> list[memoryview]:
        """The memory for one server's answer."""
        return question.places(self.rows)

    def known(self, table: int, ids: Int64s) -> UniqueIds | None:
        """The unique ids of a batch, if exactly this batch was prefetched from the table."""
        batch = self._batches.get(table)
        if batch is None or not np.array_equal(batch, ids):
            return None
        here = self._here.get(table)
        return next(each.found for each in self._asked if each.table == table) if here is None else here.found

    def came(self) -> list[tuple[int, Int64s, Float32s]]:
        """The rows that have arrived: each table's number, ids and rows."""
        return [(each.table, each.found.ids, rows) for each, rows in zip(self._asked, self.rows, strict=True)]

    def forget_here(self) -> None:
        """Drops the cached rows. `take` then returns only rows that were looked up."""
        self._here.clear()
        self._batches = {}

    def take(self, table: int, found: UniqueIds, dim: int) -> tuple[Float32s, Bools | None]:
        """Returns the rows of these ids, shape (m, dim), and which of them are missing. None: none are; the rows may
        then be shared, so do not change them."""
        here = self._here.get(table)
        if here is not None:
            return _taken(found, here.found, self._whole(table, here))
        for each, rows in zip(self._asked, self.rows, strict=True):
            if each.table == table:
                return _taken(found, each.found, rows)
        return np.empty((found.ids.size, dim), np.float32), np.ones(found.ids.size, np.bool_)

    def _whole(self, table: int, here: PartialRows) -> Float32s:
        """The cached rows together with those that have arrived."""
        for each, rows in zip(self._asked, self.rows, strict=True):
            if each.table == table:
                here.rows[here.lacks] = rows
        return here.rows


def complete(
    asked: Sequence[RowQuery],
    take: Callable[[RowQuery], tuple[Float32s, Bools | None]],
    rest: Callable[[Sequence[RowQuery]], Sequence[Float32s]],
) -> Sequence[Float32s]:
    """The rows of each query, shape (m, dim). They come from `take`; one call of `rest` gives all that are missing."""
    found: list[Float32s] = []
    lacking: list[tuple[Float32s, Bools]] = []
    more: list[RowQuery] = []
    for each in asked:
        rows, lacks = take(each)
        found.append(rows)
        if lacks is not None:
            lacking.append((rows, lacks))
            more.append(RowQuery(each.table, part_of(each.found, lacks), each.dim))
    if more:
        for (rows, lacks), values in zip(lacking, rest(more), strict=True):
            rows[lacks] = values
    return found


def _taken(wanted: UniqueIds, there: UniqueIds, rows: Float32s) -> tuple[Float32s, Bools | None]:
    if there is wanted or np.array_equal(there.ids, wanted.ids):
        return rows, None
    places = _places(wanted, there)
    lacking = places < 0
    return rows[places], lacking if lacking.any() else None


def part_of(found: UniqueIds, chosen: Bools) -> UniqueIds:
    """The chosen ids."""
    before = np.concatenate([[0], np.cumsum(chosen)]).astype(np.int64)
    return UniqueIds(found.ids[chosen], found.places[:0], before[found.starts])


def _places(wanted: UniqueIds, there: UniqueIds) -> Int64s:
    """The place of each wanted id among those that are there; -1: it is not there."""
    places = np.empty(wanted.ids.size, np.int64)
    _find_places(wanted.ids, wanted.starts, there.ids, there.starts, places)
    return places


@compiled
def _find_places(wanted: Int64s, wanted_starts: Int64s, there: Int64s, there_starts: Int64s, places: Int64s) -> None:
    """As `_places`. Both lists ascend within each partition."""
    for p in range(wanted_starts.size - 1):
        at, end = there_starts[p], there_starts[p + 1]
        for i in range(wanted_starts[p], wanted_starts[p + 1]):
            while at < end and there[at] < wanted[i]:
                at += 1
            places[i] = at if at < end and there[at] == wanted[i] else -1
