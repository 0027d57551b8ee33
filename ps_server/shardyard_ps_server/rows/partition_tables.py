"""The tables of one partition: what updates do to them, and which rows expire.

Owns: room for rows, clocks of tables, expiry. Invariants: room for the rows of all tables is reserved before the first
one changes, in a synchronous job when the rows are recorded; an error after that leaves the tables torn, and the caller
says so; after a restore, a table's clock continues from where it was when the table was cut. Tables change only in the
partition's turn. Must not know: names, ledgers, which version is the newest, logs.

Which rows expire is decided in one of three ways:

    synchronous            by `sweep`, from the step and its rows alone, so the result is the same on every server
    asynchronous, no log   by `expire`, which examines a few ids of the table for each row that it changes
    asynchronous, a log    by `begin_logged`, before the push is recorded: which ids are examined depends on a random
                           seed that a replay does not have. The record has the ids, and no other pending push has any
                           of them
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from shardyard.codecs.rows.row_ids import decode_ids, decode_runs, encode_ids
from shardyard.codecs.rows.row_values import decode_raw_runs, encode_rows
from shardyard.domain.errors import NotReady, TooLarge
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.limits import ROWS_PER_PART_MAX
from shardyard.domain.pulls import RowCode
from shardyard.domain.tables.row_ids import Ids
from shardyard.domain.tables.row_routing import first_misplaced, partition_of
from shardyard.domain.tables.table_settings import ExpirySettings
from shardyard.runtime.clock import Clock
from shardyard_ps_server.rows import row_sums
from shardyard_ps_server.rows.pushed_rows import ExpiredIds, Floats, Groups, PushedTableRows
from shardyard_ps_server.rows.row_overlay import RowDiff
from shardyard_ps_server.rows.table_states import Tables, make_tables
from shardyard_ps_server.tables import table
from shardyard_ps_server.tables.cuts import Chunk
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.tables.table import Table, TableRead, TableUpdate, look_up_all, push_all

HOMES_PER_ROW: Final = 2
"""For each row that is pushed, so many ids of the table are examined for expiry."""
HOMES_MAX: Final = 1 << 18
"""The most ids examined for one push: nothing else is recorded meanwhile, for a few milliseconds."""
_STAYS: Final = ExpirySettings()


class PartitionTables:
    """`recorded`: pushes are logged, so `begin_logged` decides what expires. `swept`: `sweep` decides it. `in_flight`:
    given ascending ids of a table that might expire, returns those that no step in flight was computed on; not used if
    rows are swept. `budget`: the server's.

    Raises TableError if the address space for rows is refused."""

    def __init__(
        self,
        layout: JobLayout,
        clock: Clock,
        *,
        recorded: bool = False,
        swept: bool = False,
        budget: Budget | None = None,
        in_flight: Callable[[int, Ids], Ids] | None = None,
    ) -> None:
        self._settings = layout.tables
        self._not_in_flight = in_flight or (lambda _, ids: ids)
        self._clock = clock
        self.names = frozenset(settings.name for settings in layout.tables)
        self._recorded = recorded
        self._swept = swept
        self._pending_lock = threading.Lock()
        self._pending: list[Sequence[PushedTableRows]] = []  # logged, and not yet applied
        self._expiring_tables: set[int] = set()  # tables in which a pending push expires ids
        self._owed: dict[int, int] = {}  # how many ids of a table are still to be examined
        self.budget = budget
        self.become(make_tables(layout, budget))

    @property
    def by_name(self) -> Tables:
        return self._tables

    def become(self, tables: Tables) -> None:
        """Replaces all tables: by those of a checkpoint, or by none if the partition has left this server."""
        self._tables = tables
        now_ms = self._clock.now_ms()
        self._begun_ms = {name: now_ms - table.state.now_ms for name, table in tables.items()}
        """The time when each table's clock was 0."""

    def load(self, rows: Sequence[PushedTableRows]) -> None:
        """Sets first values, over those that are there. Raises TableFull."""
        self.check_room(rows)
        for each in rows:
            self._of(each).load(each.ids, each.values)

    # ---- reads

    def read(self, number: int, ids: Ids, out: Floats) -> Iterator[TableRead]:
        """Yields the look-ups that write row ids[i] of a table into out[i], in pieces of the size that a table takes in
        one call. Raises NotReady if the partition has left."""
        of = self._at(number)
        for part in _parts(ids.size):
            yield TableRead(of, ids[part], out[part])

    def items(self, number: int) -> Iterator[Chunk]:
        """Yields all rows of a table, as they are when the first is taken. Raises NotReady if the partition has left,
        and while another reader reads the whole table."""
        yield from self._at(number).cuts.items()

    def set_aside(self, rows: Sequence[PushedTableRows | ExpiredIds], number: int) -> RowDiff:
        """Allocates a copy of these rows as they are in version `number`, which `read_rows` fills. Each id of a table
        comes once. Raises TooLarge."""
        changing: dict[int, list[Ids]] = {}
        for each in rows:
            changing.setdefault(each.table, []).append(each.ids)
        found = {}
        for index, parts in changing.items():
            of = self._at(index)
            try:
                ids = parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))
                values = np.empty((ids.size, of.settings.dim), np.float32)
            except MemoryError:
                n = sum([part.size for part in parts])
                raise TooLarge(f"no memory for a copy of {n} rows of {of.settings.name!r}") from None
            found[index] = ids, values
        return RowDiff(number, found)

    # ---- updates

    def check_room(self, rows: Sequence[PushedTableRows], recorded: Sequence[PushedTableRows] = ()) -> None:
        """Raises TableFull if a table cannot take these rows beside those that were recorded before."""
        for each in rows:
            into, others = self._of(each), [other.ids for other in recorded if other.table == each.table]
            if not others:
                into.check_room(each.ids)
            elif into.rows + each.ids.size + sum([ids.size for ids in others]) > into.rows_max:
                into.check_room(np.unique(np.concatenate([each.ids, *others])))

    def sweep(self, rows: Sequence[PushedTableRows], step: int) -> tuple[ExpiredIds, ...]:
        """Returns what expires with update number `step`, which changes these rows; nothing unless `swept`. Raises
        TooLarge."""
        found: list[ExpiredIds] = []
        for number, settings in enumerate(self._settings if self._swept else ()):
            if settings.expiry == _STAYS or step % settings.expiry.sweep_steps:
                continue
            swept = self._at(number)
            try:
                ids = swept.expiry.sweep(step, [each.ids for each in rows if each.table == number])
            except MemoryError:
                raise TooLarge(f"no memory for a sweep of {swept.settings.name!r}") from None
            if ids.size:
                found.append(ExpiredIds(number, ids))
        return tuple(found)

    def with_rows(self, gone: Sequence[ExpiredIds]) -> tuple[ExpiredIds, ...]:
        """Returns those of the ids that have a row. The others read the same before and after they expire."""
        found = []
        for each in gone:
            having = [self._of(each).having_row(each.ids[part]) for part in _parts(each.ids.size)]
            found.append(ExpiredIds(each.table, np.concatenate(having)))
        return tuple(found)

    def updates(self, push: RowPush) -> Iterator[tuple[int, TableUpdate]]:
        """Yields what changes rows, with the tables' numbers, in pieces of the size that a table takes in one call."""
        for each in push.rows:
            into, time_ms, group = self._of(each), self._time_ms(each), push.groups[each.table]
            for part in _parts(each.ids.size):  # several ranks together may have more than fit at once
                counts = None if each.counts is None else each.counts[part]
                ids, values = each.ids[part], each.values[part]
                yield each.table, into.update(ids, values, push.step, group=group, counts=counts, now_ms=time_ms)

    def expire(self, push: RowPush) -> None:
        """Removes what expires with a push, after its rows have changed."""
        for each in push.rows:
            into = self._of(each)
            if into.settings.expiry != _STAYS and not (self._recorded or self._swept):
                # at the time that the push carries
                homes = HOMES_PER_ROW * each.ids.size
                ids = self._not_in_flight(each.table, into.expiry.expiring(push.step, homes).ids)
                if ids.size:
                    if push.before_expiry is not None:
                        push.before_expiry(ExpiredIds(each.table, ids))
                    _remove(into, ids)
        for expired in push.gone:
            _remove(self._of(expired), expired.ids)

    def _time_ms(self, rows: PushedTableRows) -> int:
        """Returns the time by the table's clock. A replayed push sets the clock to the recorded time, however long ago
        that is."""
        name, now_ms = self._settings[rows.table].name, self._clock.now_ms()
        if rows.now_ms is not None:
            self._begun_ms[name] = min(self._begun_ms[name], now_ms - rows.now_ms)
            return rows.now_ms
        return now_ms - self._begun_ms[name]

    # ---- between the record of a push and its effect

    def is_close(self, rows: Sequence[PushedTableRows]) -> bool:
        """Whether pending pushes may decide if there is room for these rows."""
        with self._pending_lock:
            coming = [each for pending in self._pending for each in pending]
        if not coming:
            return False
        for each in rows:
            into = self._of(each)
            others = sum([other.ids.size for other in coming if other.table == each.table])
            if into.rows + others + each.ids.size > into.rows_max:
                return True
        return False

    def begin_logged(
        self, rows: Sequence[PushedTableRows], step: int
    ) -> tuple[tuple[PushedTableRows, ...], tuple[ExpiredIds, ...]]:
        """Decides the time of the rows of a push that is about to be recorded, and what expires with it. Called by one
        thread at a time. When the push has taken effect or never will, call `end_logged` with both, in any thread."""
        rows = tuple(
            [
                each._replace(now_ms=self._time_ms(each)) if self._settings[each.table].expiry.by_time else each
                for each in rows
            ]
        )
        with self._pending_lock:
            self._pending.append(rows)
        found = []
        for each in rows:
            ids = self._expiring(each, step)
            if ids.size:
                found.append(ExpiredIds(each.table, ids))
        return rows, tuple(found)

    def end_logged(self, rows: Sequence[PushedTableRows], gone: Sequence[ExpiredIds]) -> None:
        with self._pending_lock:
            self._pending = [each for each in self._pending if each is not rows]
            self._expiring_tables -= {each.table for each in gone}

    def _expiring(self, rows: PushedTableRows, step: int) -> Ids:
        table, into = rows.table, self._of(rows)
        if into.settings.expiry == _STAYS or self._swept:
            return rows.ids[:0]
        owed = min(self._owed.get(table, 0) + HOMES_PER_ROW * rows.ids.size, HOMES_MAX)
        with self._pending_lock:
            # one decision per table at a time: the ids of the last one are still in the table
            waits = table in self._expiring_tables
            besides = [each.ids for pending in self._pending for each in pending if each.table == table]
        self._owed[table] = owed if waits else 0
        if waits:
            return rows.ids[:0]
        ids = self._not_in_flight(table, into.expiry.expiring(step, owed, besides).ids)
        if ids.size:
            with self._pending_lock:
                self._expiring_tables.add(table)
        return ids

    def _at(self, number: int) -> Table:
        found = self._tables.get(self._settings[number].name)
        if found is None:
            raise NotReady(f"rows of table {self._settings[number].name!r}, which have left this server")
        return found

    def _of(self, rows: PushedTableRows | ExpiredIds) -> Table:
        return self._tables[self._settings[rows.table].name]


class RowPush(NamedTuple):
    """Update number `step` of a partition: gradients of rows, and ids that expire with them. `before_expiry` is called
    with what expires beside `gone`."""

    tables: PartitionTables
    rows: Sequence[PushedTableRows]
    groups: Groups
    step: int
    gone: Sequence[ExpiredIds] = ()
    before_expiry: Callable[[ExpiredIds], None] | None = None


class RowsToRead(NamedTuple):
    """Rows of one table: ascending ids, shape (n,), and `out`, shape (n, dim), into which their values are written."""

    table: int
    ids: Ids
    out: Floats


def read_rows(asked: Sequence[tuple[PartitionTables, Sequence[RowsToRead]]]) -> None:
    """Looks up rows of different partitions as they are now, each table in one call. Raises NotReady if a partition has
    left."""
    of_tables: dict[int, list[TableRead]] = {}
    for tables, of_partition in asked:
        for number, ids, out in of_partition:
            of_tables.setdefault(number, []).extend(tables.read(number, ids, out))
    look_up_all(list(itertools.chain.from_iterable(of_tables.values())))


def push_rows(pushes: Sequence[RowPush]) -> None:
    """Applies updates of different partitions, each table in one call. Any error leaves all their tables torn."""
    # by table, and the pieces of one partition apart: a call has each partition's table once
    together: dict[tuple[int, int], list[TableUpdate]] = {}
    for push in pushes:
        pieces: dict[int, int] = {}
        for number, update in push.tables.updates(push):
            piece = pieces[number] = pieces.get(number, 0) + 1
            together.setdefault((number, piece), []).append(update)
    for updates in together.values():
        push_all(updates)
    for push in pushes:
        push.tables.expire(push)


def _remove(into: Table, ids: Ids) -> None:
    for part in _parts(ids.size):
        into.remove_expired(ids[part])


def _parts(n: int) -> Iterator[slice]:
    """Returns slices of n rows, none larger than what a table takes in one call."""
    return (slice(begin, begin + ROWS_PER_PART_MAX) for begin in range(0, n, ROWS_PER_PART_MAX))


@functools.cache
def warm() -> None:
    """Compiles the loops of tables in half a minute, or loads them from disk in a second. Needed once per process."""
    table.warm()
    row_sums.warm()
    ids = np.arange(2, dtype=np.int64)
    code = np.frombuffer(encode_ids(ids), np.uint8)
    decode_ids(code.data, ids.size)
    partition_of(ids, 2)
    one = np.array([ids.size])
    decode_runs(code, one - one, one - one + code.size, one)
    first_misplaced(ids, one, one - one, 1)
    for kind in RowCode:
        encode_rows(np.ones((2, 2), np.float32), kind)
    code = np.frombuffer(encode_rows(np.ones((2, 2), np.float32), RowCode.FLOAT32), np.uint8)
    decode_raw_runs(code, one - one, one - one + code.size, one, 2)


def is_warm() -> bool:
    """Whether this process has all loops."""
    return warm.cache_info().currsize > 0
