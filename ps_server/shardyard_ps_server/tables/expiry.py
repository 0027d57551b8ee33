"""What goes, a little at a time or all at once: walks for a table's expiry settings.

Owns: where the walk is, and what it has learned of frequencies. Invariants: the ids stay that it is told to leave; what
goes is told, since where a walk stands depends on the index's private seed: whoever needs the same rows again records
the ids (rule C1), or sweeps, which depends on it in nothing. Must not know: when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from shardyard.domain.limits import FREQUENCY_MAX
from shardyard.domain.tables.row_expiry import frequency_kept
from shardyard.domain.tables.splitmix import mixed
from shardyard.domain.tables.table_settings import ExpirySettings
from shardyard_ps_server.tables.loops import moves, walks
from shardyard_ps_server.tables.memory.layout import Numbers, TableMemory

HOMES_PER_STEP: Final = 512
HOMES_PER_SWEEP: Final = 16 * HOMES_PER_STEP
"""With each call of a sweep, beside which nobody pushes."""
_GONE: Final = 2 * HOMES_PER_STEP

Together = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Expired:
    """`ids`: those that are to go, ascending. `over`: the walk has come to the end of the table, and begins anew next
    time."""

    ids: Numbers
    over: bool


@dataclass(slots=True)
class Expiry:
    """`step` until it says that it is over, or has done enough for now."""

    settings: ExpirySettings
    dim: int
    _cursor: np.uint64 = field(default_factory=lambda: np.uint64(0))
    _histogram: Numbers | None = None
    """Of frequencies, while they are counted because there are too many rows."""
    _fewest: int = 0
    _ties: Numbers = field(default_factory=lambda: np.zeros(1, np.int64))
    _begun: bool = False

    def step(self, memory: TableMemory, unit: int, rows: int, besides: Numbers) -> Expired:
        """What expires of the next few hundred buckets, but for `besides`, ids that ascend."""
        nothing = np.empty(0, np.int64)
        if not self._begun:
            self._begin(rows)
        if self._histogram is not None:
            cursor, over = walks.count_some(memory, self._cursor, HOMES_PER_STEP, self._histogram)
            self._cursor = np.uint64(cursor)
            if over:
                self._choose(rows)
            return Expired(nothing, over=False)
        gone = np.empty(_GONE, np.int64)
        n, cursor, over = walks.expire_some(
            memory, self._cursor, HOMES_PER_STEP, self.dim, self._reasons(unit, besides), gone
        )
        self._cursor = np.uint64(cursor)
        if over:
            self._begun = False
        return Expired(gone[:n].copy(), over=over)

    def bring(self, memory: TableMemory) -> None:
        """What the next step reads of rows is in memory: their values, or all of what goes where a cut is taken."""
        is_cut = memory.log_rows.shape[0] > 1
        if self._histogram is None and (self.settings.norm_min > 0 or is_cut):
            moves.bring_window(memory, self._cursor, HOMES_PER_STEP, not_copied=False, only_changed=False)

    def _begin(self, rows: int) -> None:
        self._begun = True
        self._cursor, self._fewest, self._ties[0] = np.uint64(0), 0, 0
        if 0 < self.settings.rows_kept < rows:
            self._histogram = np.zeros(FREQUENCY_MAX + 1, np.int64)

    def _choose(self, rows: int) -> None:
        """So many of the least frequent go as are too many."""
        assert self._histogram is not None
        self._fewest, self._ties[0] = frequency_kept(self._histogram, rows - self.settings.rows_kept)
        self._histogram = None
        self._cursor = np.uint64(0)

    def _reasons(self, unit: int, besides: Numbers) -> walks.Reasons:
        settings = self.settings
        return walks.Reasons(
            unit,
            settings.age_units,
            settings.grace_units,
            settings.frequency_min,
            float(settings.norm_min) ** 2,
            self._fewest,
            self._ties,
            besides,
        )


@dataclass(frozen=True, slots=True)
class Sweep:
    """Through a table into which nobody pushes meanwhile, and beside which rows may go to a file and come back.
    `together`: within it some thousand buckets are looked at."""

    settings: ExpirySettings
    dim: int
    memory: TableMemory
    together: Together

    def expiring(self, unit: int, entries: int, besides: Numbers, draw: int) -> Numbers:
        """All ids that expire at `unit`, ascending, but for `besides`, which ascend. They follow from the table's
        entries alone, of which there are `entries`, and from `draw`: of rows that are as frequent, those go whose ids
        are mixed with it to the smallest numbers."""
        settings = self.settings
        kept, too_many, fewest = settings.rows_kept, 0, 0
        if 0 < kept < entries:
            histogram = self._histogram()
            too_many = max(int(histogram.sum()) - kept, 0)
            fewest, _ = frequency_kept(histogram, too_many)
        no_ties = np.zeros(1, np.int64)
        reasons = walks.Reasons(
            unit=unit,
            age_units=settings.age_units,
            grace_units=settings.grace_units,
            frequency_min=settings.frequency_min,
            square_norm_min=float(settings.norm_min) ** 2,
            fewest=fewest,
            ties=no_ties,
            besides=besides,
        )
        gone = np.sort(self._walk(reasons))
        if not too_many:
            return gone
        nothing_else = reasons._replace(age_units=0, grace_units=0, frequency_min=0, square_norm_min=0.0)
        least = np.sort(self._walk(nothing_else._replace(fewest=fewest + 1)))
        goes = np.isin(least, gone, assume_unique=True)
        tied, left = least[~goes], max(too_many - int(goes.sum()), 0)
        chosen = tied[np.argsort(mixed(tied.view(np.uint64) ^ np.uint64(draw)))[:left]]
        return np.union1d(gone, chosen)

    def _walk(self, reasons: walks.Reasons) -> Numbers:
        """What expires for these, in no order."""
        found: list[Numbers] = []
        cursor, over, room = np.uint64(0), False, HOMES_PER_SWEEP
        while not over:
            if reasons.square_norm_min > 0:
                moves.bring_window(self.memory, cursor, HOMES_PER_SWEEP, not_copied=False, only_changed=False)
            gone = np.empty(room, np.int64)
            with self.together():
                n, after, over = walks.expire_some(self.memory, cursor, HOMES_PER_SWEEP, self.dim, reasons, gone)
            if n == room:  # there may be more
                over, room = False, 2 * room
                continue
            found.append(gone[:n].copy())
            cursor = np.uint64(after)
        return np.concatenate(found)

    def _histogram(self) -> Numbers:
        """How many rows have each frequency."""
        found = np.zeros(FREQUENCY_MAX + 1, np.int64)
        cursor, over = np.uint64(0), False
        while not over:
            with self.together():
                after, over = walks.count_some(self.memory, cursor, HOMES_PER_SWEEP, found)
            cursor = np.uint64(after)
        return found
