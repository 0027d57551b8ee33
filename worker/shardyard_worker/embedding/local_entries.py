"""Which ids of a table in this process have a row, how often and when each was pushed, and which ids expire.

Owns: the entries of ids that have a row, or are counted until they get one. Admission and expiry are those of a server
(docs/internals/tables.md), and a property test compares the two: the same pushes at the same steps give the same
entries, and a walk through the whole table leaves the same ids, except for the choice among equally frequent ids when
there are too many rows. Invariant: a call that raises has changed nothing. Must not know: values of rows, when a walk
is due.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardyard.domain.limits import FREQUENCY_MAX
from shardyard.domain.tables.row_admission import count_cells, drawn_of, draws_key, share_of
from shardyard.domain.tables.row_ids import writable
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings
from shardyard_worker.rows.dedup import IdNumbering, Int64s

Flags = npt.NDArray[np.bool_]
Cells = npt.NDArray[np.uint8]
_NO_CELLS: Cells = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class LifetimeRules:
    """Which ids of a table get a row, and which lose it."""

    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    expiry: ExpirySettings = field(default_factory=ExpirySettings)

    @property
    def are_kept(self) -> bool:
        """Whether the frequencies and times of pushes are needed."""
        return self.admission.kind is not Admission.ALL or self.expires

    @property
    def expires(self) -> bool:
        return self.expiry != ExpirySettings()


@dataclass(frozen=True, slots=True, eq=False)
class SavedEntries:
    """`ids`, shape (n,), ascending. `frequencies`, `times`, shape (n,): how often each was pushed, and when last, in
    steps or milliseconds, as the table counts ages. `cells`: the filter of ids that have no row yet; empty if there is
    none. `pushed`, shape (1,): how many ids were pushed since the last walk for expired ids."""

    ids: Int64s
    frequencies: Int64s
    times: Int64s
    cells: Cells
    pushed: Int64s


class LocalEntries:
    """`key`: the table's (shardyard.domain.tables.row_values.row_key). A `time` is a step or a number of milliseconds,
    as the expiry settings tell ages (ExpirySettings.time)."""

    def __init__(self, lives: LifetimeRules, key: int) -> None:
        self._admission, self._expiry, self._key = lives.admission, lives.expiry, key
        self._numbers = IdNumbering()
        self._frequencies: Int64s = np.empty(0, np.int64)
        self._units: Int64s = np.empty(0, np.int64)
        self._has_row: Flags = np.empty(0, np.bool_)
        by_estimate = lives.admission.kind is Admission.ESTIMATE
        self._cells = np.zeros(lives.admission.cells, np.uint8) if by_estimate else _NO_CELLS

    def __len__(self) -> int:
        return len(self._numbers)

    def push(self, ids: Int64s, step: int, time: int) -> Flags:
        """Counts `ids`, each once, in update number `step`. Returns which of them have a row now."""
        admission = self._admission
        numbers = self._numbers.find(ids)
        entering = numbers < 0
        before = np.zeros(ids.size, np.int64)
        if admission.kind is Admission.ESTIMATE:
            once = np.ones(ids.size, np.int64)
            count_cells(self._cells, np.uint64(self._key), writable(ids), once, before, _NO_CELLS, _NO_CELLS)
            entering &= before + 1 >= admission.threshold
        elif admission.kind is Admission.CHANCE:
            entering &= drawn_of(ids, draws_key(self._key, step), share_of(admission.chance))
        self._enter(ids[entering], before[entering])
        numbers[entering] = self._numbers.find(ids[entering])
        there = numbers >= 0
        found = numbers[there]
        frequencies = np.minimum(self._frequencies[found] + 1, FREQUENCY_MAX)
        self._frequencies[found] = frequencies
        self._units[found] = np.maximum(self._units[found], time // self._expiry.age_unit)
        if admission.kind is Admission.COUNT:
            self._has_row[found] |= frequencies >= admission.threshold
        else:
            self._has_row[found] = True
        there[there] = self._has_row[found]
        return there

    def put(self, ids: Int64s, time: int) -> None:
        """Gives these ids a row. They count as pushed now."""
        absent = ids[self._numbers.find(ids) < 0]
        self._enter(absent, np.ones(absent.size, np.int64))
        numbers = self._numbers.find(ids)
        self._units[numbers] = np.maximum(self._units[numbers], time // self._expiry.age_unit)
        self._has_row[numbers] = True

    def expired(self, time: int, square_norms: Callable[[Int64s], npt.NDArray[np.float64]]) -> Int64s:
        """The ids that expire at `time`. `square_norms`: returns those of rows, by id."""
        expiry = self._expiry
        n = len(self)
        frequencies, has_row = self._frequencies[:n], self._has_row[:n]
        ages = time // expiry.age_unit - self._units[:n]
        gone = np.zeros(n, np.bool_)
        if expiry.age_units:
            gone |= ages > expiry.age_units
        too_many = int(has_row.sum()) - expiry.rows_kept
        if expiry.rows_kept and too_many > 0:
            below = np.cumsum(np.bincount(frequencies[has_row], minlength=FREQUENCY_MAX + 1))
            fewest = int(np.searchsorted(below, too_many))
            gone |= has_row & (frequencies < fewest)
            left = too_many - int((gone & has_row & (frequencies <= fewest)).sum())
            gone[np.flatnonzero(has_row & (frequencies == fewest) & ~gone)[: max(left, 0)]] = True
        aged = ages >= expiry.grace_units
        gone |= aged & (frequencies < expiry.frequency_min)
        if expiry.norm_min:
            asked = np.flatnonzero(aged & has_row & ~gone)
            norms = square_norms(self._numbers.ids[asked])
            gone[asked[norms < float(expiry.norm_min) ** 2]] = True
        return self._numbers.ids[gone]

    def drop(self, ids: Int64s) -> None:
        """Removes the entries of `ids`, if there are any."""
        found = self._numbers.find(ids)
        stays = np.ones(len(self), np.bool_)
        stays[found[found >= 0]] = False
        kept = self._numbers.ids[stays]
        frequencies, units = self._frequencies[: stays.size][stays], self._units[: stays.size][stays]
        has_row = self._has_row[: stays.size][stays]
        self._numbers = IdNumbering(kept.size)
        self._enter(kept, frequencies)
        self._units[: kept.size], self._has_row[: kept.size] = units, has_row

    def adopt(self, other: LocalEntries) -> None:
        """Takes frequencies and times from `other`, for ids that have a row in both."""
        n = len(self)
        numbers = other._numbers.find(self._numbers.ids)
        both = numbers >= 0
        both[both] = other._has_row[numbers[both]]
        self._frequencies[:n][both] = other._frequencies[numbers[both]]
        self._units[:n][both] = other._units[numbers[both]]

    def save(self, pushed: int) -> SavedEntries:
        ids = self._numbers.ids
        order = np.argsort(ids)
        times = self._units[order] * self._expiry.age_unit
        return SavedEntries(
            ids[order], self._frequencies[order], times, self._cells.copy(), np.array([pushed], np.int64)
        )

    def load(self, saved: SavedEntries, has_row: Flags) -> None:
        """Replaces all entries, each id once. `has_row`: which of them have a row. The filter stays as it is if none of
        its size was saved."""
        self._numbers = IdNumbering(saved.ids.size)
        self._enter(saved.ids, saved.frequencies)
        n = saved.ids.size
        self._units[:n] = saved.times // self._expiry.age_unit
        self._has_row[:n] = has_row
        if saved.cells.size == self._cells.size:
            self._cells = saved.cells.copy()

    def _enter(self, ids: Int64s, frequencies: Int64s) -> None:
        """Adds entries without rows, last pushed at time 0."""
        before = len(self._numbers)
        self._numbers.add(ids)
        after = len(self._numbers)
        if after > self._frequencies.size:
            room = max(after, 2 * self._frequencies.size) - self._frequencies.size
            self._frequencies = np.concatenate([self._frequencies, np.zeros(room, np.int64)])
            self._units = np.concatenate([self._units, np.zeros(room, np.int64)])
            self._has_row = np.concatenate([self._has_row, np.zeros(room, np.bool_)])
        self._frequencies[before:after] = frequencies
        self._units[before:after] = 0
        self._has_row[before:after] = False
