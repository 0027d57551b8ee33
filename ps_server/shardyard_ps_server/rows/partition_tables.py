"""The tables of one partition: made with it, changed in its turn, read at any time.

Owns: which rows of a push belong to the partition, what they do to its tables, and what expires with them. Invariants:
rows are decoded and checked, all of them, before anything changes: ids ascend strictly and are the partition's own,
gradients are finite; room for the rows of all tables is made sure of before the first changes, in a synchronous job
when they are recorded; who fails after that has left the tables torn, and says so; a table's clock goes on from where
it was when the table was cut. Where a walk finds what expires depends on a seed that nobody knows; so in an
asynchronous job with a log it is decided when a push is recorded, and recorded with it: what expires is in no push that
was recorded and has not taken effect. In a synchronous job it follows from the step and the rows. Whoever changes
tables has the partition's turn. Must not know: names, ledgers, which version is the newest, logs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardyard.codecs.rows.row_ids import decode_ids, decode_runs, encode_ids
from shardyard.codecs.rows.row_values import decode_raw_runs, decode_rows, encode_rows
from shardyard.domain.errors import InvalidRequest, MalformedPayload, NotReady, ShapeMismatch, TooLarge
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.limits import CODE_HEAD_BYTES_MAX, ROW_COUNT_BYTES, ROWS_PER_PART_MAX
from shardyard.domain.pulls import RequestedRows, RowCode
from shardyard.domain.pushes import PushedRows
from shardyard.domain.tables import row_optimizers
from shardyard.domain.tables.row_ids import Ids
from shardyard.domain.tables.row_routing import first_stray, partition_of
from shardyard.domain.tables.table_settings import ExpirySettings, TableSettings
from shardyard.runtime.clock import Clock
from shardyard_ps_server.rows import row_sums
from shardyard_ps_server.rows.previous_rows import PreviousRows
from shardyard_ps_server.rows.row_sums import Given, Mean
from shardyard_ps_server.rows.table_states import Tables, make_tables
from shardyard_ps_server.tables import table
from shardyard_ps_server.tables.cuts import Chunk
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.tables.table import Table
from shardyard_ps_server.values.versions import Bytes

Groups = Sequence[Sequence[float]]
Floats = npt.NDArray[np.float32]

HOMES_PER_ROW: Final = 2
"""Of a table whose rows expire, so many places are looked at for each row that is pushed."""
HOMES_MAX: Final = 1 << 18
"""And at most so many at a time, since nothing else is recorded meanwhile: a few milliseconds."""


class PushedTableRows(NamedTuple):
    """PushedTableRows of one table for one partition, checked, ids ascending, in memory of their own. `values`:
    gradients, or first values; `counts` None: each id occurred once. `now_ms`: the table's clock when they came, where
    that is recorded; None: it is as now."""

    table: int
    ids: Ids
    values: Floats
    counts: npt.NDArray[np.int64] | None = None
    now_ms: int | None = None


class RowQuery(NamedTuple):
    """PushedTableRows of one table that are asked of one partition; the ids were checked."""

    table: int
    partition: PartitionId
    ids: Ids


class ExpiredIds(NamedTuple):
    """Ids of one table, ascending, that expire."""

    table: int
    ids: Ids


class PartitionTables:
    """`recorded`: what expires with a push is decided by `await_push`, and not when it takes effect. `swept`: it is
    asked for by `sweep`, and goes with that update. `in_flight`: of ids of a table that might expire, which ascend,
    those that no step in flight was computed on; not asked where they are swept.

    Raises TableError where the address space for rows is refused."""

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
        self._without_flying = in_flight or (lambda _, ids: ids)
        self._clock = clock
        self.names = frozenset(settings.name for settings in layout.tables)
        self._recorded = recorded
        self._swept = swept
        self._awaiting = threading.Lock()
        self._awaited: list[Sequence[PushedTableRows]] = []
        self._decided: set[int] = set()
        self._owed: dict[int, int] = {}
        self.budget = budget
        """Of the server."""
        self.become(make_tables(layout, budget))

    @property
    def by_name(self) -> Tables:
        return self._tables

    def become(self, tables: Tables) -> None:
        """All of them, as a checkpoint has them; or none, where the partition is somebody else's now."""
        self._tables = tables
        now_ms = self._clock.now_ms()
        self._begun_ms = {name: now_ms - table.now_ms for name, table in tables.items()}
        """When each table's clock was 0."""

    def check_room(self, rows: Sequence[PushedTableRows], recorded: Sequence[PushedTableRows] = ()) -> None:
        """Raises TableFull where a table cannot take them, and `recorded` before."""
        for each in rows:
            into, others = self._of(each), [other.ids for other in recorded if other.table == each.table]
            if not others:
                into.check_room(each.ids)
            elif into.rows + each.ids.size + sum([ids.size for ids in others]) > into.rows_max:
                into.check_room(np.unique(np.concatenate([each.ids, *others])))

    def mean(
        self, given: Sequence[Sequence[PushedTableRows]], shares: Sequence[float], limit: float
    ) -> tuple[PushedTableRows, ...]:
        """The mean of what members of a step give, in their order; elements beyond `limit`, unless that is 0, are
        brought to it. Raises TooLarge."""
        found: dict[int, list[Given]] = {}
        for rows, share in zip(given, shares, strict=True):
            for each in rows:
                found.setdefault(each.table, []).append(Given(each.ids, each.values, each.counts, share))
        return tuple([PushedTableRows(number, *row_sums.mean_of(found[number], limit)) for number in sorted(found)])

    def set_aside(self, rows: Sequence[PushedTableRows | ExpiredIds], number: int) -> PreviousRows:
        """What these, each id of a table once, read as now, which is version `number`. Raises TooLarge."""
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
                raise TooLarge(f"{n} rows of {of.settings.name!r} to be kept; there is no memory") from None
            for part in _parts(ids.size):
                of.look_up(ids[part], values[part])
            found[index] = ids, values
        return PreviousRows(number, found)

    def sweep(self, rows: Sequence[PushedTableRows], step: int) -> tuple[ExpiredIds, ...]:
        """What expires with update number `step`, which changes these rows; nothing unless `swept`. Raises TooLarge."""
        found: list[ExpiredIds] = []
        for number, settings in enumerate(self._settings if self._swept else ()):
            if settings.expiry == _STAYS or step % settings.expiry.sweep_steps:
                continue
            swept = self._at(number)
            try:
                ids = swept.sweep(step, [each.ids for each in rows if each.table == number])
            except MemoryError:
                raise TooLarge(f"a sweep of {swept.settings.name!r}, for which there is no memory") from None
            if ids.size:
                found.append(ExpiredIds(number, ids))
        return tuple(found)

    def with_rows(self, gone: Sequence[ExpiredIds]) -> tuple[ExpiredIds, ...]:
        """Those of them that have a row: the others read the same when they have gone."""
        found = []
        for each in gone:
            having = [self._of(each).having_row(each.ids[part]) for part in _parts(each.ids.size)]
            found.append(ExpiredIds(each.table, np.concatenate(having)))
        return tuple(found)

    def push(
        self,
        rows: Sequence[PushedTableRows],
        groups: Groups,
        step: int,
        gone: Sequence[ExpiredIds] = (),
        hold: Callable[[ExpiredIds], None] | None = None,
    ) -> None:
        """Update number `step` of the partition. `hold`: is told what expires before it goes. What raises here has torn
        the tables."""
        for each in rows:
            into = self._of(each)
            time_ms = self._time_ms(each)
            for part in _parts(each.ids.size):  # several ranks may have more together
                counts = None if each.counts is None else each.counts[part]
                values = each.values[part]
                into.push(each.ids[part], values, step, group=groups[each.table], counts=counts, now_ms=time_ms)
            if into.settings.expiry != _STAYS and not (self._recorded or self._swept):
                self._expire(each, step, hold)
        for expired in gone:
            for part in _parts(expired.ids.size):
                self._of(expired).remove_expired(expired.ids[part])

    def _time_ms(self, rows: PushedTableRows) -> int:
        """By the table's clock. What a log has goes on from where the clock stood then, however long ago that is."""
        name, now_ms = self._settings[rows.table].name, self._clock.now_ms()
        if rows.now_ms is not None:
            self._begun_ms[name] = min(self._begun_ms[name], now_ms - rows.now_ms)
            return rows.now_ms
        return now_ms - self._begun_ms[name]

    def _expire(self, rows: PushedTableRows, step: int, hold: Callable[[ExpiredIds], None] | None) -> None:
        into, budget = self._of(rows), HOMES_PER_ROW * rows.ids.size
        # at the time that the push has told
        ids = self._without_flying(rows.table, into.expiring(step, budget).ids)
        if ids.size:
            if hold is not None:
                hold(ExpiredIds(rows.table, ids))
            for part in _parts(ids.size):
                into.remove_expired(ids[part])

    # ---- between the record of a push and its effect

    def is_close(self, rows: Sequence[PushedTableRows]) -> bool:
        """Whether there is room for them may depend on pushes that are awaited."""
        with self._awaiting:
            coming = [each for awaited in self._awaited for each in awaited]
        if not coming:
            return False
        for each in rows:
            into = self._of(each)
            others = sum([other.ids.size for other in coming if other.table == each.table])
            if into.rows + others + each.ids.size > into.rows_max:
                return True
        return False

    def await_push(
        self, rows: Sequence[PushedTableRows], step: int
    ) -> tuple[tuple[PushedTableRows, ...], tuple[ExpiredIds, ...]]:
        """Of a push that is about to be recorded, its rows with their time, and what expires with it; by one thread at
        a time. `end_push`, by any, must follow with both when it has taken effect, or never will."""
        rows = tuple(
            [
                each._replace(now_ms=self._time_ms(each)) if self._settings[each.table].expiry.by_time else each
                for each in rows
            ]
        )
        with self._awaiting:
            self._awaited.append(rows)
        found = []
        for each in rows:
            ids = self._expiring(each, step)
            if ids.size:
                found.append(ExpiredIds(each.table, ids))
        return rows, tuple(found)

    def end_push(self, rows: Sequence[PushedTableRows], gone: Sequence[ExpiredIds]) -> None:
        with self._awaiting:
            self._awaited = [each for each in self._awaited if each is not rows]
            self._decided -= {each.table for each in gone}

    def _expiring(self, rows: PushedTableRows, step: int) -> Ids:
        table, into = rows.table, self._of(rows)
        if into.settings.expiry == _STAYS or self._swept:
            return rows.ids[:0]
        owed = min(self._owed.get(table, 0) + HOMES_PER_ROW * rows.ids.size, HOMES_MAX)
        with self._awaiting:
            # one decision of a table at a time: what the one before takes out is still there
            waits = table in self._decided
            besides = [each.ids for awaited in self._awaited for each in awaited if each.table == table]
        self._owed[table] = owed if waits else 0
        if waits:
            return rows.ids[:0]
        ids = self._without_flying(table, into.expiring(step, owed, besides).ids)
        if ids.size:
            with self._awaiting:
                self._decided.add(table)
        return ids

    def load(self, rows: Sequence[PushedTableRows]) -> None:
        """First values, over what is there. Raises TableFull."""
        self.check_room(rows)
        for each in rows:
            self._of(each).load(each.ids, each.values)

    def look_up(self, number: int, ids: Ids, out: Floats) -> None:
        """out[i] becomes the row of ids[i] of a table. Changes nothing. Raises NotReady where the partition has been
        given up."""
        self._at(number).look_up(ids, out)

    def items(self, number: int) -> Iterator[Chunk]:
        """All rows of a table, as they are when the first is taken. Raises NotReady as `look_up`, and while they are
        read for somebody else."""
        yield from self._at(number).items()

    def _at(self, number: int) -> Table:
        found = self._tables.get(self._settings[number].name)
        if found is None:
            raise NotReady(f"rows of table {self._settings[number].name!r}, which have left this server")
        return found

    def _of(self, rows: PushedTableRows | ExpiredIds) -> Table:
        return self._tables[self._settings[rows.table].name]


def square_norm(rows: Sequence[PushedTableRows]) -> float:
    """Of all elements, table by table."""
    total = 0.0
    for each in rows:
        total += row_sums.square_norm(Mean(each.ids, each.values, each.counts))
    return total


def scaled(rows: Sequence[PushedTableRows], scale: float) -> tuple[PushedTableRows, ...]:
    """Raises TooLarge."""
    means = [row_sums.scaled(Mean(each.ids, each.values, each.counts), scale) for each in rows]
    return tuple([PushedTableRows(each.table, *mean, each.now_ms) for each, mean in zip(rows, means, strict=True)])


_STAYS: Final = ExpirySettings()


def _parts(n: int) -> Iterator[slice]:
    """Of n rows, so many as a table takes at a time."""
    return (slice(begin, begin + ROWS_PER_PART_MAX) for begin in range(0, n, ROWS_PER_PART_MAX))


@functools.cache
def warm() -> None:
    """Compiles the loops of tables, or loads them from disk: half a minute, or a second, once in a process."""
    table.warm()
    row_sums.warm()
    ids = np.arange(2, dtype=np.int64)
    code = np.frombuffer(encode_ids(ids), np.uint8)
    decode_ids(code.data, ids.size)
    partition_of(ids, 2)
    one = np.array([ids.size])
    decode_runs(code, one - one, one - one + code.size, one)
    first_stray(ids, one, one - one, 1)
    for kind in RowCode:
        encode_rows(np.ones((2, 2), np.float32), kind)
    code = np.frombuffer(encode_rows(np.ones((2, 2), np.float32), RowCode.FLOAT32), np.uint8)
    decode_raw_runs(code, one - one, one - one + code.size, one, 2)


def is_warm() -> bool:
    """Whether this process has all loops."""
    return warm.cache_info().currsize > 0


def check_pushed(tables: Sequence[TableSettings], pushed: Sequence[PushedRows], groups: Groups | None) -> None:
    """What can be said of a push's rows before their bytes come. `groups` None: they are first values. Raises
    InvalidRequest, ShapeMismatch."""
    if groups is not None and len(groups) != len(tables):
        raise InvalidRequest(f"a push with settings for {len(groups)} tables; the job has {len(tables)}")
    for each in pushed:
        settings = table_at(tables, each.table)
        for n, code, ids in zip(each.rows, each.row_bytes, each.id_bytes, strict=True):
            least, most = n * settings.dim, 4 * n * (settings.dim + 1) + CODE_HEAD_BYTES_MAX
            if not least < code <= most or not _fits(n, ids):
                raise ShapeMismatch(
                    f"{n} rows of table {settings.name!r}, of dim {settings.dim}, in {code} bytes, ids in {ids}",
                    why="a row has the dim of its table",
                )
        if each.counted and groups is None:
            raise InvalidRequest("first values of rows that were counted")
    for settings, values in zip(tables, groups or (), strict=False):
        row_optimizers.check_update(settings.optimizer, settings.group, values)


def check_wanted(
    tables: Sequence[TableSettings], wanted: Sequence[RequestedRows], code: RowCode = RowCode.FLOAT32
) -> int:
    """The bytes of all rows that are asked for, in a code at most. Raises InvalidRequest, MalformedPayload."""
    total = 0
    for each in wanted:
        settings = table_at(tables, each.table)
        for n, ids in zip(each.rows, each.id_bytes, strict=True):
            if not _fits(n, ids):
                raise MalformedPayload(f"{n} ids of table {settings.name!r} in {ids} bytes")
        row = 4 * settings.dim
        if code is not RowCode.FLOAT32:  # what it cannot say comes as it is, and each has its scale
            row = max(row, settings.dim + 4)
            total += CODE_HEAD_BYTES_MAX * len(each.rows)
        total += row * sum(each.rows)
    return total


def table_at(tables: Sequence[TableSettings], index: int) -> TableSettings:
    """Raises InvalidRequest where there is none."""
    if index >= len(tables):
        raise InvalidRequest(f"rows of table {index}; the job has {len(tables)} tables")
    return tables[index]


def _fits(ids: int, nbytes: int) -> bool:
    """Whether so many ids can have a code of that length."""
    return 10 + (ids + 62) // 64 <= nbytes <= 9 * ids + CODE_HEAD_BYTES_MAX


def unpack_pushed(
    layout: JobLayout, pushed: Sequence[PushedRows], payload: Bytes, among: Container[PartitionId] | None = None
) -> Iterator[tuple[PartitionId, PushedTableRows]]:
    """The rows of a push that was checked; `among`: those of these partitions. Raises MalformedPayload,
    InvalidRequest."""
    at = 0
    for each in pushed:
        settings = layout.tables[each.table]
        parts = _parts_of(each, at)
        at = parts[-1].values[1] if parts else at
        if among is not None:
            parts = [part for part in parts if part.partition in among]
        ids = read_all_ids(layout, each.table, [(part.partition, part.rows, *part.ids) for part in parts], payload)
        values = _read_values(settings, parts, ids, payload)
        for part, mine, rows in zip(parts, ids, values, strict=True):
            yield part.partition, PushedTableRows(each.table, mine, rows, _read_counts(settings, part, payload))


class _Part(NamedTuple):
    """Of a table's rows those of one partition: how many, and where in a payload their codes begin and end."""

    partition: PartitionId
    rows: int
    ids: tuple[int, int]
    counts: tuple[int, int]
    values: tuple[int, int]


def _parts_of(pushed: PushedRows, at: int) -> list[_Part]:
    """Where each partition's lie, those of the first from byte `at` on."""
    parts = []
    entries = zip(pushed.partitions, pushed.rows, pushed.id_bytes, pushed.row_bytes, strict=True)
    for partition, n, id_bytes, row_bytes in entries:
        ids_end = at + id_bytes
        counts_end = ids_end + (ROW_COUNT_BYTES * n if pushed.counted else 0)
        end = counts_end + row_bytes
        parts.append(_Part(partition, n, (at, ids_end), (ids_end, counts_end), (counts_end, end)))
        at = end
    return parts


def _read_counts(table: TableSettings, part: _Part, payload: Bytes) -> npt.NDArray[np.int64] | None:
    begin, end = part.counts
    if begin == end:
        return None
    counts = np.frombuffer(payload[begin:end].tobytes(), "<u2").astype(np.int64)
    if not counts.all():
        raise InvalidRequest(f"ids of table {table.name!r} that occurred no time at all")
    return counts


def _read_values(table: TableSettings, parts: Sequence[_Part], ids: Sequence[Ids], payload: Bytes) -> Sequence[Floats]:
    """Raises MalformedPayload, and InvalidRequest for what is not finite."""
    numbers = [(part.rows, *part.values) for part in parts]
    counts, begins, ends = np.array(numbers, np.int64).reshape(-1, 3).T.copy()
    whole = decode_raw_runs(payload, begins, ends, counts, table.dim)
    if whole is not None:
        return _cut(whole, counts)
    return [
        _read_finite(table, part.rows, mine, payload[slice(*part.values)])
        for part, mine in zip(parts, ids, strict=True)
    ]


def _read_finite(table: TableSettings, n: int, ids: Ids, code: Bytes) -> Floats:
    values = decode_rows(code.data, n, table.dim)
    if not np.isfinite(values).all():
        wrong = ids[~np.isfinite(values).all(axis=1)]
        raise InvalidRequest(
            f"{wrong.size} rows for table {table.name!r} that are not finite, the first of id {wrong[0]}",
            why="a row would stay NaN for good; nothing was changed",
            todo="push such work as an empty one (job.nonfinite: skip)",
        )
    return values


def read_all_ids(
    layout: JobLayout, table: int, parts: Sequence[tuple[PartitionId, int, int, int]], codes: Bytes
) -> Sequence[Ids]:
    """The ids of a table that are said of several partitions: of each its number, how many, and where in `codes` theirs
    begin and end. Raises as `read_ids`, of which this is one call for all."""
    owners, counts, begins, ends = np.array(parts, np.int64).reshape(-1, 4).T.copy()
    whole = decode_runs(codes, begins, ends, counts)
    if whole is not None and first_stray(whole, counts, owners, len(layout.partitions)) is None:
        return _cut(whole, counts)
    name = layout.tables[table].name
    return [read_ids(layout, name, partition, n, codes[begin:end]) for partition, n, begin, end in parts]


def _cut(whole: npt.NDArray[Any], counts: npt.NDArray[np.int64]) -> Sequence[npt.NDArray[Any]]:
    """The first counts[0], the next counts[1] and so on; views."""
    found, at = [], 0
    for n in counts.tolist():
        found.append(whole[at : at + n])
        at += n
    return found


def read_ids(layout: JobLayout, table: str, partition: PartitionId, n: int, code: Bytes) -> Ids:
    """Raises MalformedPayload, InvalidRequest for an id of another partition."""
    ids = decode_ids(code.data, n)
    if ids.size != n:
        raise MalformedPayload(f"a code of {ids.size} ids of table {table!r}; announced {n}")
    strange = partition_of(ids, len(layout.partitions)) != partition
    if strange.any():
        raise InvalidRequest(
            f"id {ids[strange][0]} of table {table!r} in partition {partition}",
            why="a row lies in the partition that its id is mixed to, for everybody the same",
            todo="cut ids by shardyard.domain.tables.row_ids.partition_of",
        )
    return ids
