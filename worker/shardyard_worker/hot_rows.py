"""Rows that were read of one version and are likely to be asked for again.

Owns: a bounded number of rows of each table, and how often each was asked for. Invariants: what is given from here was
read of that version; who is kept for the next one is who was asked for most, older asks counting half. Safe for several
threads. Must not know: who has the rows, how old the version may be.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from shardyard_worker.distinct import Float32s, Int64s, Numbers, distinct
from shardyard_worker.rows_ahead import Asked, Bools

_GROWS_FROM = 256


class HotRows:
    """`rows_max`: of each table."""

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        self._lock = threading.Lock()
        self._tables: dict[int, _Kept] = {}

    def take(self, table: int, ids: Int64s, out: Float32s) -> Bools | None:
        """out[i] becomes the row of ids[i], shape (n, dim), each id once, where it is here. Which are not; None: all
        are."""
        with self._lock:
            kept = self._tables.get(table)
            if kept is None:
                return np.ones(ids.size, np.bool_)
            return kept.take(ids, out)

    def put(self, table: int, ids: Int64s, rows: Float32s) -> None:
        """Rows, each id once, as far as there is room."""
        with self._lock:
            self._kept(table, rows.shape[1]).put(ids, rows, np.ones(ids.size, np.int64))

    def hottest(self, partitions: int) -> list[tuple[Asked, Int64s]]:
        """What the next version shall begin with, and how often it was asked for."""
        with self._lock:  # for a copy: nobody who looks up waits while they are put in order
            asked = [(table, kept.dim, *kept.asked()) for table, kept in sorted(self._tables.items())]
        found = []
        for table, dim, ids, asks in asked:
            order = np.argsort(-asks, kind="stable")[: np.count_nonzero(asks)]
            if order.size:
                each_once = distinct(ids[order], partitions)
                ordered = np.empty_like(order)
                ordered[each_once.places] = asks[order]
                found.append((Asked(table, each_once, dim), ordered))
        return found

    def begin(self, hottest: Sequence[tuple[Asked, Int64s]], rows: Sequence[Float32s]) -> None:
        """With what another version's `hottest` has named, read of this one."""
        with self._lock:
            for (asked, asks), values in zip(hottest, rows, strict=True):
                self._kept(asked.table, asked.dim).put(asked.found.ids, values, asks)

    def __len__(self) -> int:
        with self._lock:
            return sum([len(kept.numbers) for kept in self._tables.values()])

    def _kept(self, table: int, dim: int) -> _Kept:
        if table not in self._tables:
            self._tables[table] = _Kept(dim, self._rows_max)
        return self._tables[table]


class _Kept:
    """Of one table."""

    def __init__(self, dim: int, rows_max: int) -> None:
        self.dim = dim
        self.numbers = Numbers()
        self._rows_max = rows_max
        self._rows: Float32s = np.empty((0, dim), np.float32)
        self._asks: Int64s = np.empty(0, np.int64)

    def take(self, ids: Int64s, out: Float32s) -> Bools | None:
        numbers = self.numbers.find(ids)
        lacks = numbers < 0
        if not lacks.any():
            out[:] = self._rows[numbers]
            self._asks[numbers] += 1
            return None
        there = numbers[~lacks]
        out[~lacks] = self._rows[there]
        self._asks[there] += 1
        return lacks

    def put(self, ids: Int64s, rows: Float32s, asks: Int64s) -> None:
        fresh = np.flatnonzero(self.numbers.find(ids) < 0)[: self._rows_max - len(self.numbers)]
        if not fresh.size:
            return
        numbers = self.numbers.add(ids[fresh])
        if len(self.numbers) > len(self._rows):
            self._grow()
        self._rows[numbers] = rows[fresh]
        self._asks[numbers] = asks[fresh]

    def asked(self) -> tuple[Int64s, Int64s]:
        """All ids, and half of how often each was asked for."""
        return self.numbers.ids.copy(), self._asks[: len(self.numbers)] // 2

    def _grow(self) -> None:
        size = min(self._rows_max, max(_GROWS_FROM, 2 * len(self.numbers)))
        rows, asks = np.empty((size, self.dim), np.float32), np.zeros(size, np.int64)
        rows[: len(self._rows)], asks[: len(self._asks)] = self._rows, self._asks
        self._rows, self._asks = rows, asks
