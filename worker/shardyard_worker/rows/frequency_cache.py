"""Rows that were read and are likely to be asked for again. Used by serving and by training.

Owns: a bounded number of rows of each table, or of bytes in all, how often each row was requested, and the time as of
which it was read. Invariants: a row is returned as it was last put, and only if it was read at `oldest` or later. With
a bound on rows, the first rows stay. With a bound on bytes, the rows with the most requests for their bytes stay, and
older requests count half. Safe for several threads. Must not know: where rows come from, what a time is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from shardyard_worker.rows.dedup import Float32s, IdNumbering, Int64s, unique_ids
from shardyard_worker.rows.row_prefetch import Bools, RowQuery

INDEX_BYTES: Final = 64
"""About the bytes of a row beside its values: its id, its place, its time and its number of requests."""
_GROWS_FROM = 256
_NEVER = -(1 << 62)


class FrequencyCache:
    """`rows_max`: of each table; `bytes_max`: of all rows, about. None: no such bound."""

    def __init__(self, rows_max: int | None = None, *, bytes_max: int | None = None) -> None:
        self._rows_max, self._bytes_max = rows_max, bytes_max
        self._lock = threading.Lock()
        self._tables: dict[int, _Kept] = {}

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
        """Puts rows, each id once, that were read at `as_of`, if there is room. Rows that are as new stay."""
        with self._lock:
            kept = self._kept(table, rows.shape[1])
            fresh = kept.renew(ids, rows, as_of)
            kept.add(ids, rows, fresh[: self._room(kept, fresh.size)], np.ones(ids.size, np.int64), as_of)

    def drop(self, table: int, ids: Int64s) -> None:
        """Drops these rows until they are put again."""
        with self._lock:
            kept = self._tables.get(table)
            if kept is not None:
                kept.drop(ids)

    def change(self, table: int, ids: Int64s, by: Float32s, change: Callable[[Float32s, Float32s], Float32s]) -> None:
        """Sets the cached rows of these ids to what `change` makes of them and of `by`, shape (n, dim). Their time
        stays."""
        with self._lock:
            kept = self._tables.get(table)
            if kept is not None:
                kept.change(ids, by, change)

    def clear(self) -> None:
        with self._lock:
            self._tables = {}

    def hottest(self, partitions: int) -> list[tuple[RowQuery, Int64s]]:
        """The rows that the next version begins with, and their numbers of requests."""
        with self._lock:  # only for a copy: look-ups do not wait for the sort
            asked = [(table, kept.dim, *kept.asked()) for table, kept in sorted(self._tables.items())]
        found = []
        for table, dim, ids, asks in asked:
            order = np.argsort(-asks, kind="stable")[: np.count_nonzero(asks)]
            if order.size:
                each_once = unique_ids(ids[order], partitions)
                ordered = np.empty_like(order)
                ordered[each_once.places] = asks[order]
                found.append((RowQuery(table, each_once, dim), ordered))
        return found

    def begin(self, hottest: Sequence[tuple[RowQuery, Int64s]], rows: Sequence[Float32s]) -> None:
        """Begins with the rows that another version's `hottest` named, read from this version."""
        with self._lock:
            for (asked, asks), values in zip(hottest, rows, strict=True):
                kept = self._kept(asked.table, asked.dim)
                fresh = kept.renew(asked.found.ids, values, 0)
                kept.add(asked.found.ids, values, fresh[: self._room(kept, fresh.size)], asks, 0)

    def __len__(self) -> int:
        with self._lock:
            return sum([len(kept.numbers) for kept in self._tables.values()])

    @property
    def nbytes(self) -> int:
        """The bytes of all rows, about."""
        with self._lock:
            return self._used()

    def _kept(self, table: int, dim: int) -> _Kept:
        if table not in self._tables:
            self._tables[table] = _Kept(dim)
        return self._tables[table]

    def _used(self) -> int:
        return sum([len(kept.numbers) * kept.row_bytes for kept in self._tables.values()])

    def _room(self, kept: _Kept, wanted: int) -> int:
        """How many more rows there is room for."""
        room = wanted if self._rows_max is None else min(wanted, self._rows_max - len(kept.numbers))
        if self._bytes_max is None:
            return room
        if self._used() + room * kept.row_bytes > self._bytes_max:
            self._shrink(self._bytes_max // 2)
        return min(room, (self._bytes_max - self._used()) // kept.row_bytes)

    def _shrink(self, bytes_max: int) -> None:
        """Keeps the rows with the most requests for their bytes; among equal ones the newest."""
        tables = [self._tables[table] for table in sorted(self._tables)]
        worth = np.concatenate([kept.asks / kept.row_bytes for kept in tables])
        read = np.concatenate([kept.read for kept in tables])
        costs = np.concatenate([np.full(len(kept.numbers), kept.row_bytes) for kept in tables])
        order = np.lexsort((-read, -worth))
        stays = np.zeros(order.size, np.bool_)
        stays[order[np.cumsum(costs[order]) <= bytes_max]] = True
        ends = np.cumsum([len(kept.numbers) for kept in tables])
        for kept, chosen in zip(tables, np.split(stays, ends[:-1]), strict=True):
            kept.keep(np.flatnonzero(chosen))


class _Kept:
    """The cached rows of one table."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.row_bytes = 4 * dim + INDEX_BYTES
        self.numbers = IdNumbering()
        self._rows: Float32s = np.empty((0, dim), np.float32)
        self._read: Int64s = np.empty(0, np.int64)
        self._asks: Int64s = np.empty(0, np.int64)

    @property
    def asks(self) -> Int64s:
        """By number."""
        return self._asks[: len(self.numbers)]

    @property
    def read(self) -> Int64s:
        """By number."""
        return self._read[: len(self.numbers)]

    def take(self, ids: Int64s, out: Float32s, oldest: int) -> tuple[Bools | None, int | None]:
        numbers = self.numbers.find(ids)
        known = numbers[numbers >= 0]
        self._asks[known] += 1
        there = numbers >= 0
        there[there] = self._read[known] >= oldest
        if there.all():
            out[:] = self._rows[numbers]
            return None, int(self._read[numbers].min()) if numbers.size else None
        given = numbers[there]
        out[there] = self._rows[given]
        return ~there, int(self._read[given].min()) if given.size else None

    def renew(self, ids: Int64s, rows: Float32s, as_of: int) -> Int64s:
        """Replaces older rows. Returns the places of ids that are not cached."""
        numbers = self.numbers.find(ids)
        older = numbers >= 0
        older[older] = self._read[numbers[older]] < as_of
        self._rows[numbers[older]] = rows[older]
        self._read[numbers[older]] = as_of
        return np.flatnonzero(numbers < 0)

    def add(self, ids: Int64s, rows: Float32s, chosen: Int64s, asks: Int64s, as_of: int) -> None:
        """Adds the rows at the chosen places, whose ids are not cached."""
        if not chosen.size:
            return
        numbers = self.numbers.add(ids[chosen])
        if len(self.numbers) > len(self._rows):
            self._resize(max(_GROWS_FROM, 2 * len(self.numbers)))
        self._rows[numbers] = rows[chosen]
        self._read[numbers] = as_of
        self._asks[numbers] = asks[chosen]

    def drop(self, ids: Int64s) -> None:
        numbers = self.numbers.find(ids)
        self._read[numbers[numbers >= 0]] = _NEVER

    def change(self, ids: Int64s, by: Float32s, change: Callable[[Float32s, Float32s], Float32s]) -> None:
        numbers = self.numbers.find(ids)
        there = numbers >= 0
        known = numbers[there]
        self._rows[known] = change(self._rows[known], by[there])

    def keep(self, chosen: Int64s) -> None:
        """Keeps only these, given by number. Their requests so far count half from now on."""
        ids, rows = self.numbers.ids[chosen], self._rows[chosen]
        self._read, self._asks, self._rows = self._read[chosen], self._asks[chosen] // 2, rows
        self.numbers = IdNumbering(expected=ids.size)
        self.numbers.add(ids)

    def asked(self) -> tuple[Int64s, Int64s]:
        """All ids, and half of each one's number of requests."""
        return self.numbers.ids.copy(), self.asks // 2

    def _resize(self, size: int) -> None:
        rows = np.empty((size, self.dim), np.float32)
        read, asks = np.full(size, _NEVER, np.int64), np.zeros(size, np.int64)
        rows[: len(self._rows)], read[: len(self._read)], asks[: len(self._asks)] = self._rows, self._read, self._asks
        self._rows, self._read, self._asks = rows, read, asks
