"""The rows of a table in this process, for tables that belong to no job.

The rules that servers use (shardyard.domain.tables) decide which ids get a row, how rows begin, how they are updated,
and which expire. The same updates give the same bits as a server's table; a property test compares the two. If there
are too many rows, the choice among equally frequent ids may differ.

A server's own table (shardyard_ps_server.tables) is not used here: its loops for look-ups and pushes take half a minute
to compile. These arrays need only one optimizer's loop.

Owns: how often and when each id was pushed, if it has a row or is counted until it gets one; the rows with their
optimizer state; when rows are examined for expiry. Invariants: a look-up changes nothing. An id without a row reads as
its initial value, or as zeros. The first admitted update makes the row, or a `put`. Must not know: modules, files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardyard.domain.limits import FREQUENCY_MAX
from shardyard.domain.tables import row_rules
from shardyard.domain.tables.initial_values import InitialValues
from shardyard.domain.tables.row_admission import count_cells, drawn_of, draws_key, share_of
from shardyard.domain.tables.row_expiry import expires, frequency_kept
from shardyard.domain.tables.row_ids import writable
from shardyard.domain.tables.row_optimizers import slots_of
from shardyard.domain.tables.row_values import initial_rows
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings
from shardyard_worker.rows.dedup import Float32s, Int64s
from shardyard_worker.rows.id_columns import IdColumns, grown

Cells = npt.NDArray[np.uint8]
_NO_CELLS: Cells = np.empty(0, np.uint8)
_ENTRY = np.dtype([("frequency", np.int64), ("unit", np.int64), ("row", np.int64), ("updated", np.bool_)])
"""`unit`: when the id was last pushed, in units of ages. `row`: its row's number plus one; 0: none. `updated`: whether
the row has optimizer state."""


@dataclass(frozen=True, slots=True)
class RowSet:
    """`ids`: shape (n,), ascending, each once. `rows`: shape (n, dim). Copies."""

    ids: Int64s
    rows: Float32s


@dataclass(frozen=True, slots=True)
class LifetimeRules:
    """Which ids of a table get a row, and which lose it."""

    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    expiry: ExpirySettings = field(default_factory=ExpirySettings)

    @property
    def need_entries(self) -> bool:
        """Whether a rule uses the frequencies and times of pushes."""
        return self.admission.kind is not Admission.ALL or self.expires

    @property
    def expires(self) -> bool:
        return self.expiry != ExpirySettings()


@dataclass(frozen=True, slots=True, eq=False)
class SavedEntries:
    """`ids`, shape (n,), ascending. `frequencies`, `times`, shape (n,): how often each was pushed, and when last, in
    steps or milliseconds, as the table counts ages. `cells`: the filter of ids that have no row yet; empty if there is
    none. `pushed`, shape (1,): how many ids were pushed since rows were last examined for expiry."""

    ids: Int64s
    frequencies: Int64s
    times: Int64s
    cells: Cells
    pushed: Int64s


class LocalRows:
    """On the CPU. One thread at a time. `key`: the table's (shardyard.domain.tables.row_values.row_key)."""

    def __init__(self, dim: int, initial: InitialValues, key: int, lifetime: LifetimeRules = LifetimeRules()) -> None:
        self.dim, self.initial, self.key, self.lifetime = dim, initial, key, lifetime
        self._time = 0
        """The time of the last update: a step, or milliseconds, as the table counts ages."""
        self._pushed = 0
        self._entries = IdColumns(_ENTRY)
        self._count = 0
        """How many rows there are: the first of `_records`."""
        self._widths: dict[str, int] = {}
        """The optimizer state in a record: torch's names, and how many numbers each has."""
        self._records: Float32s = np.empty((0, dim), np.float32)
        """Shape (rows, dim + state): a row's values, then its state."""
        estimates = lifetime.admission.kind is Admission.ESTIMATE
        self._cells = np.zeros(lifetime.admission.cells, np.uint8) if estimates else _NO_CELLS

    def __len__(self) -> int:
        return self._count

    def look_up(self, ids: Int64s) -> Float32s:
        """Shape (n, dim): the rows of `ids`, shape (n,), which may repeat."""
        rows = self._row_of(ids)
        absent = rows < 0
        if not absent.any():
            return np.ascontiguousarray(self._records[rows, : self.dim])
        found = np.empty((ids.size, self.dim), np.float32)
        found[~absent] = self._records[rows[~absent], : self.dim]
        found[absent] = 0 if self.lifetime.admission.zeros else self._initial(ids[absent])
        return found

    def update(
        self, ids: Int64s, gradients: Float32s, kind: str, group: tuple[float, ...], step: int, now_ms: int = 0
    ) -> None:
        """Applies update number `step` of the table, at `now_ms` of its clock, with an optimizer's kind and settings.
        Changes the rows of `ids`, each once, by their gradients, shape (n, dim). Ids that are not admitted are left
        out."""
        rule, slots = row_rules.rule_of(kind, group, step), slots_of(kind, group)
        self._lay_out({slot.name: slot.width(self.dim) for slot in slots})
        self._time = max(self._time, self.lifetime.expiry.time(step, now_ms))
        admitted, numbers = self._count_push(ids, step)
        rows = self._make_rows(numbers)
        new = rows[~self._entries["updated"][numbers]]
        records = self._records[new]
        row_rules.begin_rows(rule, slots, records, self.dim)
        self._records[new] = records
        places = np.flatnonzero(admitted).astype(np.int32)
        row_rules.update_rows(rule, self._records, rows, places, gradients, self.dim)
        self._entries["updated"][numbers] = True
        self._pushed += ids.size

    def remove_expired(self) -> None:
        """Removes rows and counts that have expired, if enough ids were pushed since the last time."""
        # the cost for each pushed id then does not depend on the number of rows
        if self.lifetime.expires and self._pushed >= len(self._entries):
            self._pushed = 0
            self.drop(self.expired())

    def expired(self) -> Int64s:
        """The ids, with or without a row, that had expired at the last update."""
        expiry, entries = self.lifetime.expiry, self._entries
        frequencies, has_row = entries["frequency"], entries["row"] > 0
        ages = self._time // expiry.age_unit - entries["unit"]
        too_many = self._count - expiry.rows_kept if expiry.rows_kept else 0
        lowest, ties = frequency_kept(np.bincount(frequencies[has_row], minlength=1), too_many)
        gone = expires(ages, frequencies, has_row, expiry.age_units, expiry.grace_units, expiry.frequency_min, lowest)
        left = ties - int((gone & has_row & (frequencies == lowest)).sum())
        gone[np.flatnonzero(has_row & (frequencies == lowest) & ~gone)[: max(left, 0)]] = True
        if expiry.norm_min:
            asked = np.flatnonzero((ages >= expiry.grace_units) & has_row & ~gone)
            gone[asked[self._square_norms(entries["row"][asked] - 1) < float(expiry.norm_min) ** 2]] = True
        found: Int64s = entries.ids[gone]
        return found

    def drop(self, ids: Int64s) -> None:
        """Removes the rows and counts of `ids`, if there are any."""
        found = self._entries.find(ids)
        stays = np.ones(len(self._entries), np.bool_)
        stays[found[found >= 0]] = False
        if stays.all():
            return
        self._entries.keep(stays)
        rows = self._entries["row"]
        having = np.flatnonzero(rows)
        self._records = self._records[rows[having] - 1]
        self._count = having.size
        rows[having] = np.arange(1, self._count + 1)

    def put(self, ids: Int64s, rows: Float32s) -> None:
        """Sets the rows of `ids`, each once. Ids without an entry count as pushed once, now. Optimizer state stays."""
        places = self._make_rows(self._enter(ids, self._time))
        self._records[places, : self.dim] = rows

    def with_rows(self, ids: Int64s, rows: Float32s, key: int) -> LocalRows:
        """Another store, with another key and these rows. It takes over the state and counts of ids that have a row
        here."""
        made = LocalRows(self.dim, self.initial, key, self.lifetime)
        made.put(ids, rows)
        kept, state = self.kept()
        there = np.isin(kept, ids)
        made.keep(kept[there], {name: values[there] for name, values in state.items()}, self._time)
        numbers, others = made._entries.find(self._entries.ids), self._entries
        both = (numbers >= 0) & (others["row"] > 0)
        for column in ("frequency", "unit"):
            made._entries[column][numbers[both]] = others[column][both]
        return made

    def everything(self) -> RowSet:
        numbers = self._in_order(self._entries["row"] > 0)
        return RowSet(self._entries.ids[numbers], self._records[self._entries["row"][numbers] - 1, : self.dim])

    def kept(self) -> tuple[Int64s, dict[str, Float32s]]:
        """The ids of the rows that were updated, ascending, and their optimizer state: shape (n, dim) or (n, 1)."""
        numbers = self._in_order(self._entries["updated"])
        records = self._records[self._entries["row"][numbers] - 1]
        return self._entries.ids[numbers], {name: records[:, at].copy() for name, at in self._columns().items()}

    def missing(self, ids: Int64s) -> Int64s:
        """The ids that have no row."""
        return ids[self._row_of(ids) < 0]

    def entries(self) -> SavedEntries | None:
        """How often and when ids were pushed; None if no rule uses it."""
        if not self.lifetime.need_entries:
            return None
        numbers, entries = self._in_order(np.ones(len(self._entries), np.bool_)), self._entries
        times = entries["unit"][numbers] * self.lifetime.expiry.age_unit
        pushed = np.array([self._pushed], np.int64)
        return SavedEntries(entries.ids[numbers], entries["frequency"][numbers], times, self._cells.copy(), pushed)

    def keep(
        self, ids: Int64s, state: Mapping[str, Float32s], time: int = 0, entries: SavedEntries | None = None
    ) -> None:
        """Replaces the optimizer state: `ids`, which have rows, get this state; all others have none. `time`: a step or
        milliseconds, as the table counts ages. Without `entries` all rows count as pushed once, at that time."""
        every = self.everything()
        widths = {name: values.shape[1] for name, values in state.items()}
        self._time, self._entries, self._count, self._widths = time, IdColumns(_ENTRY), 0, widths
        self._records = np.empty((0, self.dim + sum(widths.values())), np.float32)
        self._pushed, self._cells = 0, np.zeros_like(self._cells)
        if entries is not None and self.lifetime.need_entries:
            numbers, self._pushed = self._entries.add(entries.ids), int(entries.pushed[0])
            self._entries["frequency"][numbers] = entries.frequencies
            self._entries["unit"][numbers] = entries.times // self.lifetime.expiry.age_unit
            if entries.cells.size == self._cells.size:
                self._cells = entries.cells.copy()
        new = every.ids[self._entries.find(every.ids) < 0]
        self._enter(new, time)
        rows = self._make_rows(self._entries.find(every.ids))
        self._records[rows, : self.dim] = every.rows
        numbers = self._entries.find(ids)
        self._entries["updated"][numbers] = True
        for name, at in self._columns().items():
            self._records[self._entries["row"][numbers] - 1, at] = state[name]

    # ---- inside

    def _count_push(self, ids: Int64s, step: int) -> tuple[npt.NDArray[np.bool_], Int64s]:
        """Counts `ids`, each once. Returns which of them are admitted, and the numbers of these entries."""
        admission, entries = self.lifetime.admission, self._entries
        numbers = entries.find(ids)
        enters, before = numbers < 0, np.zeros(ids.size, np.int64)
        if admission.kind is Admission.ESTIMATE:
            once = np.ones(ids.size, np.int64)
            count_cells(self._cells, np.uint64(self.key), writable(ids), once, before, _NO_CELLS, _NO_CELLS)
            enters &= before + 1 >= admission.threshold
        elif admission.kind is Admission.CHANCE:
            enters &= drawn_of(ids, draws_key(self.key, step), share_of(admission.chance))
        numbers[enters] = entries.add(ids[enters])
        entries["frequency"][numbers[enters]] = before[enters]
        counted = numbers >= 0
        found = numbers[counted]
        frequencies = np.minimum(entries["frequency"][found] + 1, FREQUENCY_MAX)
        entries["frequency"][found] = frequencies
        self._touch(found, self._time)
        if admission.kind is Admission.COUNT:
            counted[counted] = (frequencies >= admission.threshold) | (entries["row"][found] > 0)
        return counted, numbers[counted]

    def _enter(self, ids: Int64s, time: int) -> Int64s:
        """Notes that these ids were pushed at `time`. Returns their numbers."""
        before = len(self._entries)
        numbers = self._entries.add(ids)
        self._entries["frequency"][before:] = 1
        self._touch(numbers, time)
        return numbers

    def _touch(self, numbers: Int64s, time: int) -> None:
        units = self._entries["unit"]
        units[numbers] = np.maximum(units[numbers], time // self.lifetime.expiry.age_unit)

    def _make_rows(self, numbers: Int64s) -> Int64s:
        """The rows of these entries. Missing rows are made, with initial values and no state."""
        rows, first = self._entries["row"], self._count
        new = numbers[rows[numbers] == 0]
        self._count += new.size
        self._records = grown(self._records, self._count)
        rows[new] = np.arange(first + 1, self._count + 1)
        self._records[first : self._count, : self.dim] = self._initial(self._entries.ids[new])
        return rows[numbers] - 1

    def _row_of(self, ids: Int64s) -> Int64s:
        """The row of each id; -1: it has none."""
        rows = self._entries.find(ids)
        rows[rows >= 0] = self._entries["row"][rows[rows >= 0]] - 1
        return rows

    def _in_order(self, chosen: npt.NDArray[np.bool_]) -> Int64s:
        """The numbers of the chosen entries, by ascending id."""
        numbers = np.flatnonzero(chosen)
        return numbers[np.argsort(self._entries.ids[numbers])]

    def _columns(self) -> dict[str, slice]:
        """Where each part of the state lies in a record."""
        ends = np.cumsum([self.dim, *self._widths.values()]).tolist()
        return {name: slice(ends[at], ends[at + 1]) for at, name in enumerate(self._widths)}

    def _lay_out(self, widths: dict[str, int]) -> None:
        """Makes room for this state. State that the records already have stays."""
        if list(widths.items()) == list(self._widths.items()):
            return
        before, records, known = self._columns(), self._records, self._widths
        self._widths = widths
        self._records = np.zeros((len(records), self.dim + sum(widths.values())), np.float32)
        self._records[:, : self.dim] = records[:, : self.dim]
        for name, at in self._columns().items():
            if known.get(name) == widths[name]:
                self._records[:, at] = records[:, before[name]]

    def _initial(self, ids: Int64s) -> Float32s:
        return initial_rows(ids, self.dim, self.initial, self.key)

    def _square_norms(self, rows: Int64s) -> npt.NDArray[np.float64]:
        """Summed in the order of the values, as servers do."""
        values = np.ascontiguousarray(self._records[rows, : self.dim].T, np.float64)
        total: npt.NDArray[np.float64] = np.square(values).sum(axis=0)
        return total
