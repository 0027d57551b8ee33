"""Which rows of a table are in memory, and which in its file.

Owns: when rows leave memory. Before rows are pushed or loaded, their pages of the file are read, and as many other rows
leave as these will need: of a few hundred neighbours in the order of hashes, which is as good as chance, the quarter
that was pushed longest ago, of those the least often. Rows come back when they are pushed. Invariants: a disk is waited
for here, by who pushes, while no lock of a stripe is held and the table's gate is open; where the disk refuses, or
memory to move them, rows stay; nobody waits for another one who waits for the disk. Must not know: gradients, cuts,
settings.
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
"""Buckets for which a stripe's lock is held."""
ROWS_LEAST: Final = 1_024
"""So many rows of each table may be in memory, whatever the bound."""
SLACK_SHARE: Final = 32
"""A limit is so much of itself lower than it need be, and raised when it could be a few times that higher."""
AT_ONCE: Final = 4_096
"""Rows that leave memory together."""
_QUARTER: Final = 4
_HOMES_PER_ROW: Final = 256
"""So many buckets at most are looked at for each row that is to leave."""
_HOMES_TENDED: Final = 1 << 15
_MORE: Final = 2_048


class DiskTier:
    """Of one table. Rows from number `memory.cold` on lie in the file."""

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
        """Why rows stay in memory that should not, if so."""
        return self._file.refused

    def bring(self, ids: Ids) -> int:
        """Reads the pages of the file that hold their rows; how many ids have no row in memory, at most."""
        shared = self._memory.shared
        if not shared[COLD_ROWS] and shared[LIMIT] == self._hot_max:
            return ids.size
        with self._reclaim.reading():
            return int(moves.bring(self._memory, writable(ids)))

    def make_room(self, ids: Ids) -> None:
        """Makes room for these rows before they are pushed or loaded. The caller is not inside the table's gate."""
        if self._tend(self.bring(ids)):
            other = self._budget.next_to_tend(self)
            if other is not None:
                other.tend()

    def tend(self) -> None:
        self._tend(0)

    # ---- inside

    def _tend(self, needed: int) -> bool:
        """Whether the table has a limit, and nobody else was at it."""
        if not self._moving.acquire(blocking=False):
            return False
        try:
            limited = self._set_limit(needed) != UNLIMITED
            if limited:
                with suppress(MemoryError):  # they stay, and the next push tries again
                    self._come_down(needed)
            return limited
        finally:
            self._moving.release()

    def _set_limit(self, needed: int) -> int:
        shared = self._memory.shared
        rows = int(heap.rows_of(self._memory)) + needed
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
        """So many rows more must leave, for `needed` to come and none to be beyond the limit; not more than are
        there."""
        shared = self._memory.shared
        free = int(shared[FREED]) + max(int(shared[LIMIT] - shared[NEXT_ROW]), 0)
        return min(needed + self._beyond() - free, int(shared[NEXT_ROW] - shared[FREED] - shared[HIGH_FREED]))

    def _beyond(self) -> int:
        """Rows that lie beyond the limit."""
        shared = self._memory.shared
        return max(int(shared[NEXT_ROW] - shared[LIMIT] - shared[HIGH_FREED]), 0)

    def _come_down(self, needed: int) -> None:
        most = 2 * needed + _MORE
        homes = _HOMES_PER_ROW * min(max(self._missing(needed), 0), most) + _HOMES_TENDED
        left = 0
        ids, keys, rows = (np.empty(2 * HOMES_PER_STEP, np.int64) for _ in range(3))
        coldest: list[tuple[Numbers, Numbers]] = []
        found = 0
        while homes > 0 and left < most and (self._beyond() or self._missing(needed) > found):
            with self._lock.together():
                n, cursor, over = moves.hot_some(self._memory, self._cursor, HOMES_PER_STEP, ids, keys, rows)
            self._cursor = np.uint64(0) if over else np.uint64(cursor)
            homes -= HOMES_PER_STEP
            wanted = min(self._missing(needed) - found, max(1, n // _QUARTER), n)
            if wanted > 0:
                chosen = np.argpartition(keys[:n], wanted - 1)[:wanted]
                coldest.append((ids[chosen], rows[chosen]))
                found += wanted
            if found >= AT_ONCE or self._missing(needed) <= found or homes <= 0:
                moved, hoped = self._lower(coldest), found
                coldest, found, left = [], 0, left + moved
                if moved < hoped and self._file.refused:
                    break
        if coldest:
            self._lower(coldest)
        if self._missing(needed) <= 0:
            self._file.accept()
        self._shrink()

    def _lower(self, coldest: list[tuple[Numbers, Numbers]]) -> int:
        """Rows leave memory, but for those that change meanwhile; how many have."""
        if not coldest:
            return 0
        ids, rows = (np.concatenate(each) for each in zip(*coldest, strict=True))
        slots = self._file.take(ids.size)
        if not slots.size:
            return 0
        moved = np.zeros(slots.size, np.bool_)
        try:
            # a row may change while it is copied: then it is not the same, and stays
            records = self._memory.slab[rows[: slots.size]]
            written = self._file.write(slots, records)
            with self._lock.together():
                moves.settle(
                    self._memory,
                    ids[:written],
                    rows[:written],
                    slots[:written],
                    records.view(np.int32),
                    moved[:written],
                )
        finally:
            self._file.give_back(slots[~moved])
        return int(moved.sum())

    def _shrink(self) -> None:
        """TableMemory behind the limit is given back, where no row is there any more."""
        shared = self._memory.shared
        if shared[NEXT_ROW] <= shared[LIMIT] or self._beyond():
            return
        with self._lock.alone():  # nobody takes rows or frees them
            if self._beyond():
                return
            begin, end = int(shared[LIMIT]), int(shared[NEXT_ROW])
            heap.cut_off(self._memory)
            record_bytes = int(self._memory.slab.shape[1]) * 4
            give_back(self._memory.slab, begin * record_bytes, end * record_bytes)
