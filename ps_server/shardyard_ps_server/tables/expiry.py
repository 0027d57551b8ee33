"""Which entries of a table expire, found a few at a time or all at once.

Owns: where the walk is, and what it has learned of frequencies. Nothing is removed here: the ids are returned, and the
caller removes them. Where a walk is depends on the index's private seed. So a caller that must remove the same ids
again records them (rule C1), or calls `sweep`, whose result does not depend on the seed. Must not know: when it is
called.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardyard.domain.limits import FREQUENCY_MAX
from shardyard.domain.tables.row_expiry import frequency_kept
from shardyard.domain.tables.row_ids import Ids
from shardyard.domain.tables.splitmix import mixed
from shardyard_ps_server.tables.loops import moves, walks
from shardyard_ps_server.tables.memory.layout import Numbers
from shardyard_ps_server.tables.state import TableState

HOMES_PER_STEP: Final = 512
"""The buckets that are examined while a stripe is locked once."""
HOMES_PER_SWEEP: Final = 16 * HOMES_PER_STEP
"""The same in a sweep. Nothing is pushed during a sweep, so it may hold the lock for longer."""


@dataclass(frozen=True, slots=True)
class Expired:
    """`ids`: ascending. `over`: the walk has come to the end of the table. The next one begins anew."""

    ids: Numbers
    over: bool


class TableExpiry:
    """The expiry of one table. Safe for several threads."""

    def __init__(self, state: TableState) -> None:
        self._state = state
        self._walking = threading.Lock()
        self._cursor = np.uint64(0)
        self._begun = False
        self._histogram: Numbers | None = None
        """Of the rows' frequencies, while they are counted because there are too many rows."""
        self._lowest = 0
        """Rows that are less frequent expire because there are too many rows; of those with this frequency, `_ties`
        expire."""
        self._ties = np.zeros(1, np.int64)

    def expiring(self, step: int, budget: int, besides: Sequence[Ids] = (), now_ms: int = 0) -> Expired:
        """Finds what expires at `step`, or at `now_ms` of the table's clock, except the ids in `besides`. Examines
        about `budget` buckets from where the last call stopped, or those up to the end of the table. Remove the result
        before you call it again. Others push and look up meanwhile."""
        state, found = self._state, list[Numbers]()
        over, staying = False, _distinct(besides)
        state.advance(0, now_ms)
        unit = state.unit(step)
        with self._walking:
            for _ in range(max(1, budget // HOMES_PER_STEP)):
                is_cut = state.memory.log_rows.shape[0] > 1  # then removed rows are copied first
                if self._histogram is None and (state.settings.expiry.norm_min > 0 or is_cut):
                    self._bring(HOMES_PER_STEP, self._cursor)
                with state.lock.together:
                    if not self._begun:
                        self._begin()
                    if self._histogram is not None:
                        self._count(self._histogram)
                        continue
                    reasons = self._reasons(unit, staying, self._lowest, self._ties)
                    gone = np.empty(2 * HOMES_PER_STEP, np.int64)
                    n, cursor, over = walks.expire_some(
                        state.memory, self._cursor, HOMES_PER_STEP, state.settings.dim, reasons, gone
                    )
                self._cursor = np.uint64(cursor)
                found.append(gone[:n].copy())
                if over:
                    self._begun = False
                    break
        # if a stripe has grown since the last step, some ids were examined twice
        return Expired(_distinct(found), bool(over))

    def sweep(self, step: int, besides: Sequence[Ids]) -> Ids:
        """Finds everything that expires at `step`, ascending, except the ids in `besides`. The result depends only on
        the entries and the step: tables with the same entries give the same ids. If there are too many rows of one
        frequency, those expire whose ids, mixed with the step, are the smallest. Nothing may be pushed meanwhile."""
        state, none = self._state, np.zeros(1, np.int64)
        too_many, lowest = 0, 0
        if 0 < state.settings.expiry.rows_kept < state.entries:
            histogram, over, cursor = _no_frequencies(), False, np.uint64(0)
            while not over:
                with state.lock.together:
                    after, over = walks.count_some(state.memory, cursor, HOMES_PER_SWEEP, histogram)
                cursor = np.uint64(after)
            too_many = max(int(histogram.sum()) - state.settings.expiry.rows_kept, 0)
            lowest, _ = frequency_kept(histogram, too_many)
        reasons = self._reasons(state.unit(step), _distinct(besides), lowest, none)
        gone = np.sort(self._all(reasons))
        if not too_many:
            return gone
        nothing_else = reasons._replace(age_units=0, grace_units=0, frequency_min=0, square_norm_min=0.0)
        least = np.sort(self._all(nothing_else._replace(fewest=lowest + 1)))
        goes = np.isin(least, gone, assume_unique=True)
        tied, left = least[~goes], max(too_many - int(goes.sum()), 0)
        chosen = tied[np.argsort(mixed(tied.view(np.uint64) ^ np.uint64(step)))[:left]]
        return np.union1d(gone, chosen)

    def _begin(self) -> None:
        self._begun = True
        self._cursor, self._lowest, self._ties[0] = np.uint64(0), 0, 0
        if 0 < self._state.settings.expiry.rows_kept < self._state.rows:
            self._histogram = _no_frequencies()

    def _count(self, histogram: Numbers) -> None:
        """Counts the frequencies of some rows. After the last one, decides which are too many."""
        state = self._state
        cursor, over = walks.count_some(state.memory, self._cursor, HOMES_PER_STEP, histogram)
        self._cursor = np.uint64(cursor)
        if over:
            too_many = state.rows - state.settings.expiry.rows_kept
            self._lowest, self._ties[0] = frequency_kept(histogram, too_many)
            self._histogram, self._cursor = None, np.uint64(0)

    def _bring(self, homes: int, cursor: np.uint64) -> None:
        """Reads rows of the next buckets from the file, before a lock is held."""
        moves.bring_window(self._state.memory, cursor, homes, not_copied=False, only_changed=False)

    def _reasons(self, unit: int, besides: Numbers, lowest: int, ties: Numbers) -> walks.Reasons:
        expiry = self._state.settings.expiry
        square_norm = float(expiry.norm_min) ** 2
        return walks.Reasons(
            unit, expiry.age_units, expiry.grace_units, expiry.frequency_min, square_norm, lowest, ties, besides
        )

    def _all(self, reasons: walks.Reasons) -> Numbers:
        """Returns all ids that expire for these reasons, in no particular order."""
        state, found = self._state, list[Numbers]()
        cursor, over, room = np.uint64(0), False, HOMES_PER_SWEEP
        while not over:
            if reasons.square_norm_min > 0:
                self._bring(HOMES_PER_SWEEP, cursor)
            gone = np.empty(room, np.int64)
            with state.lock.together:
                n, after, over = walks.expire_some(
                    state.memory, cursor, HOMES_PER_SWEEP, state.settings.dim, reasons, gone
                )
            if n == room:  # there may be more
                over, room = False, 2 * room
                continue
            found.append(gone[:n].copy())
            cursor = np.uint64(after)
        return np.concatenate(found)


def _no_frequencies() -> Numbers:
    return np.zeros(FREQUENCY_MAX + 1, np.int64)


def _distinct(ids: Sequence[Ids]) -> Ids:
    """Returns the ids, each once, ascending."""
    return np.unique(np.concatenate(ids)) if ids else np.empty(0, np.int64)
