"""One table's rows in one partition.

Owns: what a table can be asked for, checked before anything changes. Invariants: a look-up changes nothing (rule A13);
a call that raises has changed nothing; the same pushes in the same order give the same rows, whatever the index's
private seed and the number of threads and stripes. Any thread may call: pushes, removals and look-ups run at the same
time, and each holds a stripe's lock for a part of its batch. Callers that need an order between two pushes of one id
call one after the other, as the partition does. Must not know: jobs, the wire, files.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardyard.domain.errors import TableError
from shardyard.domain.limits import FREQUENCY_MAX
from shardyard.domain.tables import row_optimizers, row_rules
from shardyard.domain.tables.row_admission import draws_key, share_of
from shardyard.domain.tables.row_ids import Ids, writable
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard_ps_server.tables.batches import Batches, batch_in
from shardyard_ps_server.tables.checks import check_array, check_ids
from shardyard_ps_server.tables.cuts import TableCuts
from shardyard_ps_server.tables.disk_tier import DiskTier
from shardyard_ps_server.tables.expiry import TableExpiry
from shardyard_ps_server.tables.loops import push_loops
from shardyard_ps_server.tables.memory.address_space import Pages
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.tables.memory.layout import (
    ADMITTED,
    COLD_ROWS,
    COUNTS_AT,
    GRADIENTS_AT,
    ID_COUNT,
    NEXT_ROW,
    PUSH_WORDS,
    READ_WORDS,
    STRIPE_COUNT,
    UNIT,
    Floats,
    LoopBatch,
    Numbers,
)
from shardyard_ps_server.tables.row_quota import RowQuota
from shardyard_ps_server.tables.state import TableState

STEP_MAX: Final = (1 << 47) - 1
COLD_ROWS_MAX: Final = (1 << 29) - (1 << 14)
"""The most rows of a table of which some may lie in a file."""
_NONE: Final[Numbers] = np.empty(0, np.int64)


class TableUse(NamedTuple):
    """`rows`: rows, in memory and on disk. `nbytes`: bytes of memory for rows that were ever used, their state, and the
    index. `ids`: ids with a row, and ids that are counted until they have one; `homes`: how many ids fit.
    `admitted`: rows that pushes created. `expired`: ids that have expired. `cold_rows`: rows in the file; `disk_bytes`:
    what it takes on disk; `disk_refused`: the disk's error, if rows stay in memory because of it."""

    rows: int
    nbytes: int
    ids: int
    homes: int
    admitted: int
    expired: int
    cold_rows: int
    disk_bytes: int
    disk_refused: str


class Table:
    """`budget`: the memory for all tables of a server, and where colder rows go. `cuts` takes cuts, `expiry` finds what
    expires. Raises TableError if the address space for `rows_max` rows is refused."""

    def __init__(self, settings: TableSettings, budget: Budget | None = None) -> None:
        self.settings = settings
        rows_max = settings.rows_max if budget is None else min(settings.rows_max, COLD_ROWS_MAX)
        self._quota = RowQuota(settings.name, rows_max)
        self.state = state = TableState(settings, rows_max, tiered=budget is not None)
        self.cuts, self.expiry = TableCuts(state), TableExpiry(state)
        self._pages = Pages(state.memory.slab)
        self._batches = Batches()
        self._turns = itertools.count(0, 7)
        self._tier = None if budget is None else DiskTier(state, budget)
        self._expired = 0
        self._group = settings.group
        admission = settings.admission
        self._admission = push_loops.AdmissionRule(
            admission.kind.value, admission.threshold, share_of(admission.chance), np.uint64(0)
        )

    # ---- reading

    @property
    def rows_max(self) -> int:
        """The most rows, by the settings and because row numbers are limited."""
        return self._quota.rows_max

    @property
    def rows(self) -> int:
        return self.state.rows

    def use(self) -> TableUse:
        """How much the table holds."""
        state, tier = self.state, self._tier
        shared = state.memory.shared
        filter_bytes = 0 if state.filter is None else state.filter.nbytes
        return TableUse(
            state.rows,
            int(shared[NEXT_ROW]) * state.stride * 4 + state.stripes.nbytes + filter_bytes,
            state.entries,
            state.stripes.homes,
            int(shared[ADMITTED]),
            self._expired,
            int(shared[COLD_ROWS]),
            0 if tier is None else tier.disk_bytes,
            "" if tier is None else tier.refused,
        )

    def look_up(self, ids: Ids, out: Floats) -> None:
        """Writes the values of the row of ids[i] into out[i]; for an id without a row its initial values, or zeros, as
        the admission settings say. `ids`: int64 (n,), may repeat. `out`: float32 (n, dim). Changes nothing."""
        look_up_all([TableRead(self, ids, out)])

    def having_row(self, ids: Ids) -> Ids:
        """Returns those of the ids that have a row. Nothing may be pushed meanwhile."""
        check_ids(self.settings.name, ids)
        with self.state.lock.together:
            return ids[~self._without_row(ids)]

    def check_room(self, ids: Ids) -> None:
        """Raises TableFull if the rows of ids that have none would be too many. The answer is good until rows are
        made."""
        check_ids(self.settings.name, ids)
        room = self._quota.rows_max - ids.size
        if self.state.rows_at_most > room and self.rows > room:
            with self.state.lock.together:
                self._quota.give_back(self._take_room(ids))

    # ---- changing

    def push(
        self,
        ids: Ids,
        gradients: Floats,
        step: int,
        *,
        group: Sequence[float] | None = None,
        counts: Numbers | None = None,
        finite: bool = False,
        now_ms: int = 0,
    ) -> None:
        """Counts the ids, makes the rows of new ids that are admitted, and updates rows. `ids`: int64 (n,); a repeated
        id is updated once for each gradient, in order. `gradients`: float32 (n, dim). `step`: the number of this
        update, from 1. `group`: the optimizer's settings for it. `counts`: how often each id occurred, int64 (n,); by
        default once. `finite`: gradients that are not finite are refused. `now_ms`: the time by the table's clock, if
        the table counts ages in time; the clock never goes back. Raises TableError, ShapeMismatch, DTypeMismatch,
        InvalidRequest."""
        push_all([self.update(ids, gradients, step, group=group, counts=counts, finite=finite, now_ms=now_ms)])

    def update(
        self,
        ids: Ids,
        gradients: Floats,
        step: int,
        *,
        group: Sequence[float] | None = None,
        counts: Numbers | None = None,
        finite: bool = False,
        now_ms: int = 0,
    ) -> TableUpdate:
        """Checks a push, for `push_all`. Arguments and errors are those of `push`."""
        settings = self.settings
        check_ids(settings.name, ids)
        check_array(settings.name, "gradients", gradients, (ids.size, settings.dim), np.float32)
        if finite and not np.isfinite(gradients).all():
            raise TableError(f"gradients for {ids.size} rows of table {settings.name!r} are not all finite")
        given = settings.group if group is None else tuple(group)
        if given != self._group:
            row_optimizers.check_update(settings.optimizer, settings.group, given)
            self._group = given
        return self._update(ids, np.ascontiguousarray(gradients), step, given, counts, now_ms)

    def count(self, ids: Ids, counts: Numbers | None, step: int, now_ms: int = 0) -> None:
        """A push without gradients: counts the ids, and makes the rows of those that are admitted."""
        check_ids(self.settings.name, ids)
        push_all([self._update(ids, None, step, self._group, counts, now_ms)])

    def remove(self, ids: Ids) -> Ids:
        """Removes rows and counts. Returns the ids that were there."""
        check_ids(self.settings.name, ids)
        gone, state = np.zeros(ids.size, np.bool_), self.state
        if self._tier is not None:
            self._tier.bring(ids)
        with state.lock.together:
            push_loops.remove(state.memory, self._batch(ids), gone, self._turn())
            self.cuts.note_removed(ids[gone])
        return ids[gone]

    def remove_expired(self, ids: Ids) -> None:
        """Removes what `expiry` has found, here or where a log was written."""
        self._expired += self.remove(ids).size

    def load(
        self,
        ids: Ids,
        values: Floats,
        state: Floats | None = None,
        frequencies: Numbers | None = None,
        steps: Numbers | None = None,
    ) -> None:
        """Sets rows, over those that are there: int64 (n,), float32 (m, dim), float32 (m, state), int64 (n,) from 1 to
        65,535, and int64 (n,). The first m ids get a row; the others are only counted. Without `state` it is that of
        new rows. Without `frequencies` they are 1. `steps`: the step of the last push, or its time if the table counts
        ages in time; by default step 0, or now."""
        table, expiry = self.settings.name, self.settings.expiry
        check_ids(table, ids)
        n, dim = ids.size, self.settings.dim
        m = values.shape[0] if values.ndim == 2 and values.shape[0] <= n else n
        check_array(table, "values", values, (m, dim), np.float32)
        records = np.empty((m, self.state.stride), np.float32)
        records[:, :dim] = values
        if state is None:
            rule = row_rules.rule_of(self.settings.optimizer, self.settings.group, 1)
            row_rules.begin_rows(rule, self.state.slots, records, dim)
        else:
            check_array(table, "state", state, (m, self.state.stride - dim), np.float32)
            records[:, dim:] = state
        frequencies = np.ones(n, np.int64) if frequencies is None else frequencies
        steps = np.full(n, expiry.time(0, self.state.now_ms)) if steps is None else steps
        check_array(table, "frequencies", frequencies, (n,), np.int64)
        check_array(table, "steps", steps, (n,), np.int64)
        if n and not (frequencies.min() >= 1 and frequencies.max() <= FREQUENCY_MAX):
            raise TableError(f"frequencies from {frequencies.min()} to {frequencies.max()}; expected 1 to 65,535")
        if n and not (steps.min() >= 0 and steps.max() <= STEP_MAX):
            raise TableError(f"steps from {steps.min()} to {steps.max()}; expected 0 to 2**47 - 1")
        units = steps // expiry.age_unit
        if self._tier is not None:
            self._tier.make_room(ids)
        with self.state.lock.together:
            taken = self._take_room(ids)
            try:
                memory, batch = self.state.memory, self._batch(ids)
                newest = int(steps.max()) if n else 0
                self.state.advance(0 if expiry.by_time else newest, newest)
                counts = writable(frequencies)
                self._repeat(lambda: int(push_loops.load_batch(memory, batch, records, counts, units, self._turn())))
            finally:
                self._quota.give_back(taken)

    def load_cells(self, cells: npt.NDArray[np.uint8], begin: int | None = None) -> None:
        """Sets the filter of a cut, or a piece of it whose first cell is number `begin`. Raises TableError."""
        if self.state.filter is None:
            raise TableError("a filter was given to a table that does not admit ids by estimate")
        self.state.filter.load(cells, begin)

    def resume(self, updates: int, now_ms: int = 0) -> None:
        """After rows were loaded: continues after update number `updates`, at that time of the table's clock."""
        state = self.state
        if not state.updates <= updates <= STEP_MAX:
            raise TableError(f"update number {updates} as the last, of a table that has seen {state.updates}")
        if self.settings.expiry.by_time and not state.now_ms <= now_ms <= STEP_MAX:
            raise TableError(f"{now_ms} ms as the time of a table whose clock is at {state.now_ms} ms")
        state.advance(updates, now_ms)

    # ---- inside

    def _update(
        self,
        ids: Ids,
        gradients: Floats | None,
        step: int,
        group: tuple[float, ...],
        counts: Numbers | None,
        now_ms: int,
    ) -> TableUpdate:
        if not 1 <= step <= STEP_MAX:
            raise TableError(f"update number {step}; expected 1 to 2**47 - 1")
        if not 0 <= now_ms <= STEP_MAX:
            raise TableError(f"an update at {now_ms} ms; expected 0 to 2**47 - 1")
        if counts is not None:
            check_array(self.settings.name, "counts", counts, (ids.size,), np.int64)
            if ids.size and counts.min() < 1:
                raise TableError(f"an id that occurred {counts.min()} times; expected at least once")
            counts = np.minimum(counts, FREQUENCY_MAX)
        return TableUpdate(self, np.ascontiguousarray(ids), gradients, step, group, counts, now_ms)

    def _make_ready(self, ids: Ids) -> None:
        """Before the stripes of a push are locked."""
        self.state.reclaim.free()
        if self._tier is not None:
            self._tier.make_room(ids)
        else:  # a page fault under a stripe's lock would delay all look-ups in the stripe
            self._pages.make_ready(int(self.state.memory.shared[NEXT_ROW]) + ids.size)

    def _finish(self, batch: LoopBatch, pushed: push_loops.Pushed, admission: push_loops.AdmissionRule) -> None:
        """Pushes the rest of a batch, after a stripe was full."""
        memory, dim = self.state.memory, self.settings.dim
        self._repeat(lambda: int(push_loops.push(memory, batch, dim, pushed, admission, self._turn())))

    def _repeat(self, loop: Callable[[], int]) -> None:
        """Calls a loop again after a stripe that it found full has grown."""
        while (stripe := loop()) >= 0:
            self.state.stripes.make_room(stripe)

    def _turn(self) -> int:
        """The stripe at which a loop begins: concurrent threads begin at different ones."""
        return next(self._turns) % self.state.stripes.count

    def _batch(self, ids: Ids) -> LoopBatch:
        return self._batches.arrange(self.state.memory, ids, self.state.stripes.count)

    def _take_room(self, ids: Ids) -> int:
        """Until the returned room is given back, no other push takes the rows that these ids may need. Raises
        TableFull."""
        missing = lambda: np.unique(ids[self._without_row(ids)]).size  # noqa: E731
        return self._quota.take(ids.size, self.state.rows_at_most, lambda: self.state.rows, missing)

    def _without_row(self, ids: Ids) -> npt.NDArray[np.bool_]:
        missing = np.zeros(ids.size, np.bool_)
        push_loops.find_missing(self.state.memory, self._batch(ids), missing)
        return missing


class TableRead(NamedTuple):
    """A look-up in one table: see `Table.look_up`."""

    table: Table
    ids: Ids
    out: Floats


class TableUpdate(NamedTuple):
    """A checked push to one table: see `Table.push`. `gradients` None: ids are counted, and no row changes."""

    table: Table
    ids: Ids
    gradients: Floats | None
    step: int
    group: tuple[float, ...]
    counts: Numbers | None
    now_ms: int


def look_up_all(reads: Sequence[TableRead]) -> None:
    """Looks up in tables, those with the same settings in one call of the compiled loop: the tables of a job in all
    partitions of a server."""
    for table, ids, out in reads:
        settings = table.settings
        check_ids(settings.name, ids)
        check_array(settings.name, "out", out, (ids.size, settings.dim), np.float32)
        if not (out.flags.writeable and out.flags.c_contiguous and out.flags.aligned):
            raise TableError("a look-up into an array that is read-only, or not in one piece")
    for _, same in itertools.groupby(reads, lambda each: each.table.settings):
        _look_up_same(list(same))


def _look_up_same(reads: Sequence[TableRead]) -> None:
    first = reads[0].table
    words: list[Any] = []
    read_ids = [np.ascontiguousarray(each.ids) for each in reads]
    began: list[tuple[Table, int]] = []
    try:
        for each, ids in zip(reads, read_ids, strict=True):
            began.append((each.table, each.table.state.reclaim.begin()))
            words += [each.table.state.record, (ids.ctypes.data, ids.size, each.out.ctypes.data)]
        parts = np.concatenate(words).reshape(len(reads), READ_WORDS)
        settings = first.settings
        push_loops.look_up_in(first.state.format, parts, settings.dim, settings.admission.zeros)
    finally:
        for table, epoch in began:
            table.state.reclaim.end(epoch)


def push_all(updates: Sequence[TableUpdate]) -> None:
    """Pushes to tables, none of which comes twice. Pushes of the same update number to tables with the same settings
    are one call of the compiled loop: those to a job's table in all partitions of a server. Raises TableFull; before
    any table of such a call has changed."""
    for _, same in itertools.groupby(updates, _in_common):
        _push_same(list(same))


def _in_common(update: TableUpdate) -> tuple[object, ...]:
    return update.table.settings, update.step, update.group, update.gradients is None


def _push_same(updates: Sequence[TableUpdate]) -> None:
    for each in updates:
        each.table._make_ready(each.ids)
    entered: list[Table] = []
    taken: list[int] = []
    try:
        for each in updates:
            each.table.state.lock.enter()
            entered.append(each.table)
            taken.append(each.table._take_room(each.ids))
        _apply(updates)
    finally:
        for table, rows in zip(entered, taken, strict=False):
            table._quota.give_back(rows)
        for table in entered:
            table.state.lock.leave()


def _apply(updates: Sequence[TableUpdate]) -> None:
    """Calls the compiled loop, again each time after a full stripe."""
    first = updates[0].table
    settings, step, group, updates_rows = first.settings, updates[0].step, updates[0].group, updates[0].gradients
    rule = row_rules.rule_of(settings.optimizer, group, step)
    estimates = [_estimates(each) for each in updates]
    words = [each for pair in zip(updates, estimates, strict=True) for each in _words(*pair)]
    parts = np.concatenate(words).reshape(len(updates), PUSH_WORDS)
    pushed = push_loops.Pushed(rule.code, updates_rows is not None, rule.scalars, 0, 0, 0, _NONE)
    admission = first._admission
    if settings.admission.kind is Admission.CHANCE:
        admission = admission._replace(key=draws_key(first.state.key, step))
    room = first._batches.room(max([each.ids.size for each in updates]))
    begin = 0
    while begin < len(updates):
        number = push_loops.push_in(first.state.format, parts, begin, room, settings.dim, pushed, admission)
        if number < 0:
            return
        part = parts[number]
        batch = batch_in(room, int(part[ID_COUNT]), int(part[STRIPE_COUNT]))
        mine = pushed._replace(
            gradients=int(part[GRADIENTS_AT]),
            counts=int(part[COUNTS_AT]),
            unit=int(part[UNIT]),
            estimates=estimates[number],
        )
        updates[number].table._finish(batch, mine, admission)
        begin = number + 1


def _estimates(update: TableUpdate) -> Numbers:
    update.table.state.advance(update.step, update.now_ms)
    filter_ = update.table.state.filter
    return _NONE if filter_ is None else filter_.count(update.ids, update.counts)


def _words(update: TableUpdate, estimates: Numbers) -> tuple[Any, Any]:
    """What the compiled loop gets of a table and a push to it: PUSH_WORDS numbers."""
    table, ids, gradients, step, _, counts, _ = update
    places = (
        0 if gradients is None else gradients.ctypes.data,
        0 if counts is None else counts.ctypes.data,
        estimates.ctypes.data if estimates.size else 0,
    )
    stripes = table.state.stripes.count
    return table.state.record, (ids.ctypes.data, ids.size, *places, table.state.unit(step), stripes, table._turn())


def warm() -> None:
    """Compiles every loop, or loads it from disk. A server calls it before it takes partitions of a job with tables
    (shardyard_ps_server.jit.table_warmup)."""
    budget = Budget(1, lambda: os.memfd_create("rows"))  # so rows go to a file and come back
    expiry = ExpirySettings(rows_kept=1_000)
    for admission in (AdmissionSettings(), AdmissionSettings(Admission.ESTIMATE, cells=64)):
        table = Table(TableSettings("warm", 1, "ftrl", rows_max=4_096, admission=admission, expiry=expiry), budget)
        ids = np.arange(2_000, dtype=np.int64)
        for part in (ids[:1_500], ids[500:], ids):
            table.push(part, np.zeros((part.size, 1), np.float32), 1, counts=np.ones(part.size, np.int64))
        table.look_up(ids, np.zeros((ids.size, 1), np.float32))
        for chunk in table.cuts.items():
            table.load(chunk.ids, chunk.values, chunk.state, chunk.frequencies, chunk.steps)
        table.having_row(table.expiry.sweep(1, [ids[:9]]))
        for homes in (1, 1 << 20):
            table.remove_expired(table.expiry.expiring(1, homes).ids)
        table.remove(ids)
