"""Decides which rows of a table are in memory, and which are in its file.

Before rows are pushed or loaded, their pages of the file are read, and other rows leave memory to make room for them.
The walk looks at a few hundred rows at a time that are adjacent in the order of hashes, so they are a random sample.
The quarter of them that was pushed longest ago leaves; among equally old rows, those that were pushed least often. A
row returns to memory when it is pushed.

Invariants: only the thread that pushes waits for the disk, while it holds no lock; rows stay in memory if the disk, or
memory for moving them, is refused. Must not know: gradients, cuts, settings.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Final

import numpy as np

from shardyard.domain.tables.row_ids import Ids, writable
from shardyard_ps_server.tables.cold_file import ColdFile
from shardyard_ps_server.tables.loops import moves
from shardyard_ps_server.tables.memory import heap
from shardyard_ps_server.tables.memory.address_space import give_back
from shardyard_ps_server.tables.memory.budget import UNLIMITED, Budget
from shardyard_ps_server.tables.memory.layout import COLD_ROWS, FREED, HIGH_FREED, LIMIT, NEXT_ROW, Numbers
from shardyard_ps_server.tables.state import TableState

HOMES_PER_STEP: Final = 2_048
"""The buckets that are examined while a stripe is locked once."""
ROWS_LEAST: Final = 1_024
"""The rows of each table that may be in memory, whatever the bound."""
SLACK_SHARE: Final = 32
"""A new limit is lower than necessary by one in so many rows, and is raised only when it is too low by four times
that."""
AT_ONCE: Final = 4_096
"""How many rows leave memory together."""
_QUARTER: Final = 4
_HOMES_PER_ROW: Final = 256
"""The most buckets examined for each row that should leave."""
_HOMES_LEAST: Final = 1 << 15
_MORE: Final = 2_048


class DiskTier:
    """The disk tier of one table. Rows from number `memory.cold` on lie in the file."""

    def __init__(self, state: TableState, budget: Budget) -> None:
        self._memory, self._stripes, self._reclaim, self._lock = state.memory, state.stripes, state.reclaim, state.lock
        self._budget = budget
        self._moving = threading.Lock()
        self._file = ColdFile(state.memory, f"table {state.settings.name!r}", budget.open_file)
        self._cursor = np.uint64(0)
        self._hot_max = int(state.memory.shared[LIMIT])
        budget.join(self)

    @property
    def disk_bytes(self) -> int:
        return self._file.nbytes

    @property
    def refused(self) -> str:
        """The disk's error, if rows stay in memory because of it."""
        return self._file.refused

    def bring(self, ids: Ids) -> int:
        """Reads the pages of the file that hold the ids' rows. Returns how many ids have no row in memory, at most."""
        shared = self._memory.shared
        if not shared[COLD_ROWS] and shared[LIMIT] == self._hot_max:
            return ids.size
        with self._reclaim.reading():
            return int(moves.bring(self._memory, writable(ids)))

    def make_room(self, ids: Ids) -> None:
        """Makes room for these rows before they are pushed or loaded. The caller does not hold the table's lock."""
        if self._fit(self.bring(ids)):
            other = self._budget.next_to_shrink(self)
            if other is not None:
                other.shrink()

    def shrink(self) -> None:
        self._fit(0)

    # ---- inside

    def _fit(self, needed: int) -> bool:
        """Makes room for `needed` rows. Returns False if the table has no limit, or another thread does so now."""
        if not self._moving.acquire(blocking=False):
            return False
        try:
            limited = self._set_limit(needed) != UNLIMITED
            if limited:
                with suppress(MemoryError):  # rows stay, and the next push tries again
                    self._move_out(needed)
            return limited
        finally:
            self._moving.release()

    def _set_limit(self, needed: int) -> int:
        shared = self._memory.shared
        rows = int(heap.rows_of(self._memory.shared)) + needed
        record_bytes = int(self._memory.slab.shape[1]) * 4
        index_bytes = self._stripes.nbytes_soon
        wanted = self._budget.limit_of(self, index_bytes=index_bytes, rows=rows, record_bytes=record_bytes)
        now = int(shared[LIMIT])
        if wanted == UNLIMITED:
            limit = self._hot_max
        else:
            wanted = max(wanted, ROWS_LEAST)
            fits = wanted * (SLACK_SHARE - 4) // SLACK_SHARE <= now <= wanted
            limit = now if fits else max(wanted - wanted // SLACK_SHARE, ROWS_LEAST)
        limit = min(limit, self._hot_max)
        if limit != now:
            heap.set_limit(self._memory, limit)
        return wanted

    def _missing(self, needed: int) -> int:
        """Returns how many rows must leave, so that `needed` rows fit and no row is beyond the limit; at most all."""
        shared = self._memory.shared
        free = int(shared[FREED]) + max(int(shared[LIMIT] - shared[NEXT_ROW]), 0)
        return min(needed + self._beyond() - free, int(shared[NEXT_ROW] - shared[FREED] - shared[HIGH_FREED]))

    def _beyond(self) -> int:
        """Returns how many rows lie beyond the limit."""
        shared = self._memory.shared
        return max(int(shared[NEXT_ROW] - shared[LIMIT] - shared[HIGH_FREED]), 0)

    def _move_out(self, needed: int) -> None:
        most = 2 * needed + _MORE
        homes = _HOMES_PER_ROW * min(max(self._missing(needed), 0), most) + _HOMES_LEAST
        left = 0
        ids, keys, rows = (np.empty(2 * HOMES_PER_STEP, np.int64) for _ in range(3))
        coldest: list[tuple[Numbers, Numbers]] = []
        found = 0
        while homes > 0 and left < most and (self._beyond() or self._missing(needed) > found):
            with self._lock.together:
                n, cursor, over = moves.hot_some(self._memory, self._cursor, HOMES_PER_STEP, ids, keys, rows)
            self._cursor = np.uint64(0) if over else np.uint64(cursor)
            homes -= HOMES_PER_STEP
            wanted = min(self._missing(needed) - found, max(1, n // _QUARTER), n)
            if wanted > 0:
                chosen = np.argpartition(keys[:n], wanted - 1)[:wanted]
                coldest.append((ids[chosen], rows[chosen]))
                found += wanted
            if found >= AT_ONCE or self._missing(needed) <= found or homes <= 0:
                moved, hoped = self._write_out(coldest), found
                coldest, found, left = [], 0, left + moved
                if moved < hoped and self._file.refused:
                    break
        if coldest:
            self._write_out(coldest)
        if self._missing(needed) <= 0:
            self._file.accept()
        self._release_memory()

    def _write_out(self, coldest: list[tuple[Numbers, Numbers]]) -> int:
        """Moves rows to the file, except those that change meanwhile. Returns how many moved."""
        if not coldest:
            return 0
        ids, rows = (np.concatenate(each) for each in zip(*coldest, strict=True))
        slots = self._file.take(ids.size)
        if not slots.size:
            return 0
        moved = np.zeros(slots.size, np.bool_)
        try:
            # a row that changes while it is copied is not the same any more, and stays in memory
            records = self._memory.slab[rows[: slots.size]]
            written = self._file.write(slots, records)
            with self._lock.together:
                moves.confirm(
                    self._memory,
                    ids[:written],
                    rows[:written],
                    slots[:written],
                    records.view(np.int32),
                    moved[:written],
                )
        finally:
            self._file.free(slots[~moved])
        return int(moved.sum())

    def _release_memory(self) -> None:
        """Gives the memory beyond the limit back, if no row is there any more."""
        shared = self._memory.shared
        if shared[NEXT_ROW] <= shared[LIMIT] or self._beyond():
            return
        with self._lock.alone():  # so no thread allocates or frees rows
            if self._beyond():
                return
            begin, end = int(shared[LIMIT]), int(shared[NEXT_ROW])
            heap.cut_off(self._memory)
            record_bytes = int(self._memory.slab.shape[1]) * 4
            give_back(self._memory.slab, begin * record_bytes, end * record_bytes)
