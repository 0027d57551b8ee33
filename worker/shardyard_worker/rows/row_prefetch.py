"""Rows of the next batches, which an exchange brings along with the values that these will be computed on.

Owns: what is asked for ahead, the memory that it comes into, and which of it a forward needs. Invariants: what is taken
from here is what servers had when they gave the values of the same exchange, the push of that exchange included; ids
that were not asked for are never answered from here. Must not know: models, names of pushes, servers' addresses.
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
    """UniqueIds ids of one table, by its number, that are asked for, and its dim."""

    table: int
    found: UniqueIds
    dim: int


class PartialRows(NamedTuple):
    """Rows of which some need not be asked for. `rows`: shape (m, dim), of all ids of `found`; `lacks`: which are not
    there, and are asked for."""

    found: UniqueIds
    rows: Float32s
    lacks: Bools


class RowPrefetch:
    """Each table at most once. `batches`: by table all ids, as the batch has them. `here`: by table what is asked for
    with those that are here already. `as_of`: the step as of which servers answer; `lives`: of
    the cache that had them."""

    def __init__(
        self,
        asked: Sequence[RowQuery],
        batches: Mapping[int, Int64s] | None = None,
        here: Mapping[int, PartialRows] | None = None,
        as_of: int = 0,
        lives: int = 0,
    ) -> None:
        self._asked = asked
        self._batches = batches or {}
        self._here = dict(here or {})
        self.as_of, self.lives = as_of, lives
        self._rows = [np.empty((each.found.ids.size, each.dim), np.float32) for each in asked]
        self._questions: dict[tuple[PartitionId, ...], RowLookup | None] = {}

    @staticmethod
    def fit(asked: Sequence[RowQuery]) -> bool:
        """Whether one answer has room for all."""
        return sum([max(4 * each.dim, ROW_COST_MIN) * each.found.ids.size for each in asked]) <= ROWS_ALONG_BYTES_MAX

    def question(self, owned: tuple[PartitionId, ...]) -> RowLookup | None:
        """How the server that has these partitions is asked; None where none of the rows is there."""
        if owned not in self._questions:
            made = questions(self._asked, owned, ROWS_ALONG_BYTES_MAX)
            assert len(made) <= 1
            self._questions[owned] = made[0] if made else None
        return self._questions[owned]

    @property
    def rows(self) -> Sequence[Float32s]:
        """The memory that all answers go into, for each table."""
        return self._rows

    def places(self, question: RowLookup) -> list[memoryview]:
        """The memory that the answer goes into."""
        return question.places(self._rows)

    def known(self, table: int, ids: Int64s) -> UniqueIds | None:
        """These ids, each once, where all that was asked for of the table is the same batch."""
        batch = self._batches.get(table)
        if batch is None or not np.array_equal(batch, ids):
            return None
        here = self._here.get(table)
        return next(each.found for each in self._asked if each.table == table) if here is None else here.found

    def came(self) -> list[tuple[int, Int64s, Float32s]]:
        """What was asked for, once it has come: by table, ids and rows."""
        return [(each.table, each.found.ids, rows) for each, rows in zip(self._asked, self._rows, strict=True)]

    def forget_here(self) -> None:
        """What was here is not good any more: only what was asked for is taken."""
        self._here.clear()
        self._batches = {}

    def take(self, table: int, found: UniqueIds, dim: int) -> tuple[Float32s, Bools | None]:
        """Rows of these ids, shape (m, dim), and which of them have not come; None: all have, and the rows may be
        anybody's, so that nobody changes them."""
        here = self._here.get(table)
        if here is not None:
            return _taken(found, here.found, self._whole(table, here))
        for each, rows in zip(self._asked, self._rows, strict=True):
            if each.table == table:
                return _taken(found, each.found, rows)
        return np.empty((found.ids.size, dim), np.float32), np.ones(found.ids.size, np.bool_)

    def _whole(self, table: int, here: PartialRows) -> Float32s:
        """What was here, with what has come."""
        for each, rows in zip(self._asked, self._rows, strict=True):
            if each.table == table:
                here.rows[here.lacks] = rows
        return here.rows


def complete(
    asked: Sequence[RowQuery],
    take: Callable[[RowQuery], tuple[Float32s, Bools | None]],
    rest: Callable[[Sequence[RowQuery]], Sequence[Float32s]],
) -> Sequence[Float32s]:
    """Of each the rows that `take` has, shape (m, dim), and those that it lacks from `rest`, all at once."""
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
    """Some of distinct ids."""
    before = np.concatenate([[0], np.cumsum(chosen)]).astype(np.int64)
    return UniqueIds(found.ids[chosen], found.places[:0], before[found.starts])


def _places(wanted: UniqueIds, there: UniqueIds) -> Int64s:
    """Where each wanted id is among those that are there, -1 where it is not."""
    places = np.empty(wanted.ids.size, np.int64)
    _find_places(wanted.ids, wanted.starts, there.ids, there.starts, places)
    return places


@compiled
def _find_places(wanted: Int64s, wanted_starts: Int64s, there: Int64s, there_starts: Int64s, places: Int64s) -> None:
    """Both ascend within each partition."""
    for p in range(wanted_starts.size - 1):
        at, end = there_starts[p], there_starts[p + 1]
        for i in range(wanted_starts[p], wanted_starts[p + 1]):
            while at < end and there[at] < wanted[i]:
                at += 1
            places[i] = at if at < end and there[at] == wanted[i] else -1
