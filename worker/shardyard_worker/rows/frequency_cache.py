"""Caches rows that are likely to be requested again. Used by serving and by training.

Owns: a bounded number of rows of each table, or of bytes in all; how often each row was requested, and when it was
read. Invariants: a row is returned as it was last put, and only if it was read at `oldest` or later. With a bound on
rows, the first rows stay. With a bound on bytes, the rows with the most requests for each byte stay, and older requests
count half. Safe for several threads. Must not know: where rows come from, what a time is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from shardyard.domain.tables import row_rules
from shardyard_worker.rows.dedup import Float32s, Int64s, unique_ids
from shardyard_worker.rows.id_columns import IdColumns
from shardyard_worker.rows.row_prefetch import Bools, RowQuery

INDEX_BYTES: Final = 64
"""About how many bytes a row takes beside its values: for its id, place, time and number of requests."""
_NEVER = -(1 << 62)


class FrequencyCache:
    """Holds at most `rows_max` rows of each table, and about `bytes_max` bytes of all rows. None: no such bound."""

    def __init__(self, rows_max: int | None = None, *, bytes_max: int | None = None) -> None:
        self._rows_max, self._bytes_max = rows_max, bytes_max
        self._lock = threading.Lock()
        self._tables: dict[int, _CachedTable] = {}

    def take(self, table: int, ids: Int64s, out: Float32s, oldest: int = 0) -> tuple[Bools | None, int | None]:
        """Sets out[i], shape (n, dim), to the row of ids[i], each id once, if it is cached and was read at `oldest` or
        later. Returns which rows are missing (None: none), and when the oldest found row was read (None: none
        found)."""
        with self._lock:
            kept = self._tables.get(table)
            if kept is None:
                return (np.ones(ids.size, np.bool_) if ids.size else None), None
            return kept.take(ids, out, oldest)

    def put(self, table: int, ids: Int64s, rows: Float32s, as_of: int = 0) -> None:
        """Puts rows, each id once, that were read at `as_of`, if there is room. A cached row that is as new stays."""
        with self._lock:
            kept = self._table(table, rows.shape[1])
            fresh = kept.renew(ids, rows, as_of)
            kept.add(ids, rows, fresh[: self._room(kept, fresh.size)], np.ones(ids.size, np.int64), as_of)

    def drop(self, table: int, ids: Int64s) -> None:
        """Returns these rows no more until they are put again."""
        with self._lock:
            kept = self._tables.get(table)
            if kept is not None:
                numbers = kept.columns.find(ids)
                kept.columns["read"][numbers[numbers >= 0]] = _NEVER

    def update(self, table: int, ids: Int64s, gradients: Float32s, rule: row_rules.RowRule) -> None:
        """Updates the cached rows of these ids by their gradients, shape (n, dim), with a rule that needs no state. The
        rows then have the same bits as on the servers. Their time stays."""
        with self._lock:
            kept = self._tables.get(table)
            if kept is not None:
                numbers = kept.columns.find(ids)
                places, numbers = np.flatnonzero(numbers >= 0).astype(np.int32), numbers[numbers >= 0]
                rows = kept.columns["row"][numbers]
                row_rules.update_rows(rule, rows, np.arange(numbers.size), places, gradients, kept.dim)
                kept.columns["row"][numbers] = rows

    def clear(self) -> None:
        with self._lock:
            self._tables = {}

    def hottest(self, partitions: int) -> list[tuple[RowQuery, Int64s]]:
        """The requested rows, with half of their numbers of requests. The next version's cache begins with them."""
        with self._lock:  # only while copying: look-ups do not wait for the sort
            tables = [
                (table, kept.dim, kept.columns.ids.copy(), kept.columns["requests"] // 2)
                for table, kept in sorted(self._tables.items())
            ]
        found = []
        for table, dim, ids, requests in tables:
            order = np.argsort(-requests, kind="stable")[: np.count_nonzero(requests)]
            if order.size:
                each_once = unique_ids(ids[order], partitions)
                ordered = np.empty_like(order)
                ordered[each_once.places] = requests[order]
                found.append((RowQuery(table, each_once, dim), ordered))
        return found

    def begin(self, hottest: Sequence[tuple[RowQuery, Int64s]], rows: Sequence[Float32s]) -> None:
        """Puts the rows that another version's `hottest` named, as read from this version."""
        with self._lock:
            for (asked, requests), values in zip(hottest, rows, strict=True):
                kept = self._table(asked.table, asked.dim)
                fresh = kept.renew(asked.found.ids, values, 0)
                kept.add(asked.found.ids, values, fresh[: self._room(kept, fresh.size)], requests, 0)

    def __len__(self) -> int:
        with self._lock:
            return sum([len(kept) for kept in self._tables.values()])

    @property
    def nbytes(self) -> int:
        """About how many bytes all rows take."""
        with self._lock:
            return self._used()

    def _table(self, table: int, dim: int) -> _CachedTable:
        if table not in self._tables:
            self._tables[table] = _CachedTable(dim)
        return self._tables[table]

    def _used(self) -> int:
        return sum([len(kept) * kept.row_bytes for kept in self._tables.values()])

    def _room(self, kept: _CachedTable, wanted: int) -> int:
        """How many more rows there is room for."""
        room = wanted if self._rows_max is None else min(wanted, self._rows_max - len(kept))
        if self._bytes_max is None:
            return room
        if self._used() + room * kept.row_bytes > self._bytes_max:
            self._shrink(self._bytes_max // 2)
        return min(room, (self._bytes_max - self._used()) // kept.row_bytes)

    def _shrink(self, bytes_max: int) -> None:
        """Keeps the rows with the most requests for each byte; among equal ones the newest."""
        tables = [self._tables[table] for table in sorted(self._tables)]
        worth = np.concatenate([kept.columns["requests"] / kept.row_bytes for kept in tables])
        read = np.concatenate([kept.columns["read"] for kept in tables])
        costs = np.concatenate([np.full(len(kept), kept.row_bytes) for kept in tables])
        order = np.lexsort((-read, -worth))
        stays = np.zeros(order.size, np.bool_)
        stays[order[np.cumsum(costs[order]) <= bytes_max]] = True
        ends = np.cumsum([len(kept) for kept in tables])
        for kept, chosen in zip(tables, np.split(stays, ends[:-1]), strict=True):
            kept.keep(np.flatnonzero(chosen))


class _CachedTable:
    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.row_bytes = 4 * dim + INDEX_BYTES
        self.columns = IdColumns([("row", np.float32, (dim,)), ("read", np.int64), ("requests", np.int64)])
        """`read`: when the row was read. `requests`: how often it was requested."""

    def __len__(self) -> int:
        return len(self.columns)

    def take(self, ids: Int64s, out: Float32s, oldest: int) -> tuple[Bools | None, int | None]:
        numbers = self.columns.find(ids)
        known = numbers[numbers >= 0]
        self.columns["requests"][known] += 1
        there = numbers >= 0
        there[there] = self.columns["read"][known] >= oldest
        found = numbers[there]
        read = int(self.columns["read"][found].min()) if found.size else None
        if there.all():
            out[:] = self.columns["row"][found]
            return None, read
        out[there] = self.columns["row"][found]
        return ~there, read

    def renew(self, ids: Int64s, rows: Float32s, as_of: int) -> Int64s:
        """Replaces older rows. Returns the places of ids that are not cached."""
        numbers = self.columns.find(ids)
        older = numbers >= 0
        older[older] = self.columns["read"][numbers[older]] < as_of
        self.columns["row"][numbers[older]] = rows[older]
        self.columns["read"][numbers[older]] = as_of
        return np.flatnonzero(numbers < 0)

    def add(self, ids: Int64s, rows: Float32s, chosen: Int64s, requests: Int64s, as_of: int) -> None:
        """Adds the rows at the chosen places, whose ids are not cached."""
        numbers = self.columns.add(ids[chosen])
        self.columns["row"][numbers] = rows[chosen]
        self.columns["read"][numbers] = as_of
        self.columns["requests"][numbers] = requests[chosen]

    def keep(self, chosen: Int64s) -> None:
        """Keeps only these rows, given by number. Their earlier requests count half from now on."""
        self.columns.keep(chosen)
        self.columns["requests"][:] //= 2
