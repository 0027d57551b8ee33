"""Caches rows that a worker has read, for a bounded number of its steps.

Owns: which rows are new enough for a step, what happens to rows that this worker pushes, and the counts. Invariants: a
row is used at the step at which it was read, and at most `staleness` steps after it. If own pushes are included, a row
misses only those own pushes that were in flight when it was read. Rows are dropped when the job goes back or partitions
move. Must not know: servers, what a step is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from shardyard.domain.tables.row_rules import RowRule
from shardyard_worker.rows.dedup import Float32s, Int64s
from shardyard_worker.rows.frequency_cache import FrequencyCache
from shardyard_worker.rows.row_prefetch import Bools


@dataclass(frozen=True)
class CacheRules:
    """`bytes_max`: of all rows. `staleness`: in steps. `includes_own`: a row that this worker has pushed is not
    returned with its earlier value. `under_way`: how many of its own pushes a row that it reads may miss."""

    bytes_max: int
    staleness: int
    includes_own: bool = True
    under_way: int = 0


@dataclass(frozen=True)
class CacheCounts:
    """Counts of distinct ids looked up since the job was prepared: found, not found, and the largest age of a found
    row, in steps."""

    hits: int = 0
    misses: int = 0
    age: int = 0


class RowCache:
    """Used by the training thread only."""

    def __init__(self, rules: CacheRules) -> None:
        self._rules = rules
        self._rows = FrequencyCache(bytes_max=rules.bytes_max)
        self._pushed: deque[tuple[int, int, Int64s]] = deque()
        """The step, table and ids of recent pushes."""
        self.staleness = rules.staleness
        self.step = 0
        """The step that the model computes."""
        self.cleared = 0
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
        """Sets out[i], shape (n, dim), to the row of ids[i], each id once, if it is new enough for the step. Returns
        which rows are missing; None: none."""
        lacks, oldest = self._rows.take(table, ids, out, step - self.staleness)
        misses = 0 if lacks is None else int(np.count_nonzero(lacks))
        counts, age = self.counts, 0 if oldest is None else step - oldest
        self.counts = CacheCounts(counts.hits + ids.size - misses, counts.misses + misses, max(counts.age, age))
        return lacks

    def put(self, table: int, ids: Int64s, rows: Float32s, as_of: int, *, since: int) -> None:
        """Puts rows, each id once, that were read at step `as_of`. They may miss this worker's pushes of step `since`
        and later."""
        stays = np.ones(ids.size, np.bool_)
        for step, number, pushed in self._pushed if self._rules.includes_own else ():
            if number == table and step >= since:
                stays &= ~np.isin(ids, pushed)
        self._rows.put(table, ids[stays], rows[stays], as_of)

    def pushed(self, table: int, ids: Int64s, gradients: Float32s, rule: RowRule | None) -> None:
        """This step sends these gradients, shape (n, dim), each id once. `rule`: how the servers update rows. None: the
        rule needs optimizer state, so the new rows are not known."""
        if not self._rules.includes_own:
            return
        self._pushed.append((self.step, table, ids))
        if rule is None:
            self._rows.drop(table, ids)
        else:
            self._rows.update(table, ids, gradients, rule)

    def begin(self, step: int) -> None:
        """The model computes this step from now on."""
        if step < self.step:
            self.clear()
            self._pushed.clear()
        self.step = step
        while self._pushed and self._pushed[0][0] < step - self._rules.under_way:
            self._pushed.popleft()

    def clear(self) -> None:
        """Drops all rows: the servers may have undone updates, or other workers may be far ahead."""
        self._rows.clear()
        self.cleared += 1
