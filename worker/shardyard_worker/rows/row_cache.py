"""Rows that a worker has read, kept for a bounded number of its steps.

Owns: which rows are young enough for a step, what happens to rows that this worker pushes, and the counts. Invariants:
a row serves the step that it was read at, and at most `staleness` steps after it; where own pushes are included, a row
misses only pushes that were under way when it was read; rows from before the job went back, or before partitions
moved, are gone. Must not know: servers, what a step is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from shardyard_worker.rows.dedup import Float32s, Int64s
from shardyard_worker.rows.frequency_cache import FrequencyCache
from shardyard_worker.rows.row_prefetch import Bools


@dataclass(frozen=True)
class CacheRules:
    """`bytes_max`: of all rows; `staleness`: steps; `includes_own`: a row that this worker pushes is not given as it
    was before; `under_way`: so many of its pushes may lack in what it reads."""

    bytes_max: int
    staleness: int
    includes_own: bool = True
    under_way: int = 0


@dataclass(frozen=True)
class CacheCounts:
    """Since the job was prepared, of distinct ids that were looked for: those that were here, those that were not, and
    the largest age of one that was, in steps."""

    hits: int = 0
    misses: int = 0
    age: int = 0


@dataclass(frozen=True)
class SgdRule:
    """How servers change a row by a gradient where nothing but the row is needed for it: SGD without momentum."""

    lr: float
    decay: float

    def change(self, rows: Float32s, gradients: Float32s) -> Float32s:
        """The rows after it, to the bits of the servers."""
        slope = gradients + np.float32(self.decay) * rows if self.decay else gradients
        return rows - np.float32(self.lr) * slope


class RowCache:
    """For the thread that trains."""

    def __init__(self, rules: CacheRules) -> None:
        self._rules = rules
        self._rows = FrequencyCache(bytes_max=rules.bytes_max)
        self._pushed: deque[tuple[int, int, Int64s]] = deque()
        """The step, table and ids of what was pushed lately."""
        self.staleness = rules.staleness
        self.step = 0
        """The step that the model computes."""
        self.lives = 0
        """How often the cache was cleared."""
        self.counts = CacheCounts()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    @property
    def under_way(self) -> int:
        return self._rules.under_way

    def take(self, table: int, ids: Int64s, out: Float32s, step: int) -> Bools | None:
        """out[i] becomes the row of ids[i], shape (n, dim), each id once, where it is young enough for that step. Which
        are not; None: all are."""
        lacks, oldest = self._rows.take(table, ids, out, step - self.staleness)
        misses = 0 if lacks is None else int(np.count_nonzero(lacks))
        counts, age = self.counts, 0 if oldest is None else step - oldest
        self.counts = CacheCounts(counts.hits + ids.size - misses, counts.misses + misses, max(counts.age, age))
        return lacks

    def put(self, table: int, ids: Int64s, rows: Float32s, as_of: int, *, since: int) -> None:
        """Rows, each id once, that were read as of that step; they may lack this worker's pushes of the step `since`
        and later."""
        stays = np.ones(ids.size, np.bool_)
        for step, number, pushed in self._pushed if self._rules.includes_own else ():
            if number == table and step >= since:
                stays &= ~np.isin(ids, pushed)
        self._rows.put(table, ids[stays], rows[stays], as_of)

    def pushed(self, table: int, ids: Int64s, gradients: Float32s, descent: SgdRule | None) -> None:
        """This worker's gradients, shape (n, dim), for these rows, each id once, are sent with the step at hand.
        `descent` None: what they change is not known."""
        if not self._rules.includes_own:
            return
        self._pushed.append((self.step, table, ids))
        if descent is None:
            self._rows.drop(table, ids)
        else:
            self._rows.change(table, ids, gradients, descent.change)

    def begin(self, step: int) -> None:
        """The model computes that step from now on."""
        if step < self.step:
            self.clear()
            self._pushed.clear()
        self.step = step
        while self._pushed and self._pushed[0][0] < step - self._rules.under_way:
            self._pushed.popleft()

    def clear(self) -> None:
        """Forgets all rows: the servers may have undone updates, or other workers may be far ahead."""
        self._rows.clear()
        self.lives += 1
