"""Rows in pushes and look-ups: from the bytes of a payload to ids and values, checked.

In: what a header says about rows, and their codes. Out: `PushedTableRows` and `RowQuery`, or an error. Everything is
checked before anything changes: ids ascend strictly and belong to the partition, values are finite, and a length that a
header claims is possible for its number of rows. Must not know: tables, what is done with the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardyard.codecs.format.finiteness import first_not_finite
from shardyard.codecs.rows.row_ids import decode_ids, decode_runs
from shardyard.codecs.rows.row_values import decode_raw_runs, decode_rows
from shardyard.domain.errors import InvalidRequest, MalformedPayload, ShapeMismatch
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.limits import CODE_HEAD_BYTES_MAX, ID_BYTES, ROW_COUNT_BYTES
from shardyard.domain.pulls import RequestedRows, RowCode
from shardyard.domain.pushes import PushedRows
from shardyard.domain.tables import row_optimizers
from shardyard.domain.tables.row_ids import Ids
from shardyard.domain.tables.row_routing import first_misplaced, partition_of
from shardyard.domain.tables.table_settings import TableSettings
from shardyard_ps_server.values.versions import Bytes

Groups = Sequence[Sequence[float]]
Floats = npt.NDArray[np.float32]


class PushedTableRows(NamedTuple):
    """Checked rows of one table for one partition, in memory that nothing else changes: `ids`, shape (n,), ascending;
    `values`, shape (n, dim): gradients, or first values; `counts`: how often each id occurred, None: once. `now_ms`:
    the table's clock when they arrived, if that is recorded; None: now."""

    table: int
    ids: Ids
    values: Floats
    counts: npt.NDArray[np.int64] | None = None
    now_ms: int | None = None


class RowQuery(NamedTuple):
    """Rows of one table to read from one partition. The ids were checked."""

    table: int
    partition: PartitionId
    ids: Ids


class ExpiredIds(NamedTuple):
    """Ascending ids of one table that expire."""

    table: int
    ids: Ids


def check_pushed(tables: Sequence[TableSettings], pushed: Sequence[PushedRows], groups: Groups | None) -> None:
    """Checks what is known of a push's rows before their bytes arrive. `groups` None: they are first values. Raises
    InvalidRequest, ShapeMismatch."""
    if groups is not None and len(groups) != len(tables):
        raise InvalidRequest(f"a push with settings for {len(groups)} tables; the job has {len(tables)}")
    for each in pushed:
        settings = table_at(tables, each.table)
        n, nbytes = sum(each.rows), each.row_bytes[0]
        if not each.id_bytes and nbytes != 4 * settings.dim * n:
            raise ShapeMismatch(
                f"{n} rows of table {settings.name!r}, of dim {settings.dim}, in {nbytes} bytes",
                why="a row has the dim of its table",
            )
        for n, code, ids in zip(each.rows, each.row_bytes, each.id_bytes, strict=True) if each.id_bytes else ():
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


def requested_bytes_max(
    tables: Sequence[TableSettings], requested: Sequence[RequestedRows], code: RowCode = RowCode.FLOAT32
) -> int:
    """Returns the most bytes that all requested rows can take in the code. Raises InvalidRequest, MalformedPayload."""
    total = 0
    for each in requested:
        settings = table_at(tables, each.table)
        row = 4 * settings.dim
        if code is not RowCode.FLOAT32:  # rows that it cannot express come as float32, and each row has its scale
            row = max(row, settings.dim + 4)
            total += CODE_HEAD_BYTES_MAX * len(each.rows)
        total += row * sum(each.rows)
    return total


def table_at(tables: Sequence[TableSettings], index: int) -> TableSettings:
    """Raises InvalidRequest if the job has no such table."""
    if index >= len(tables):
        raise InvalidRequest(f"rows of table {index}; the job has {len(tables)} tables")
    return tables[index]


def _fits(ids: int, nbytes: int) -> bool:
    """Whether a code of that length can hold so many ids."""
    return 10 + (ids + 62) // 64 <= nbytes <= 9 * ids + CODE_HEAD_BYTES_MAX


def unpack_pushed(
    layout: JobLayout, pushed: Sequence[PushedRows], payload: Bytes, among: Container[PartitionId] | None = None
) -> Iterator[tuple[PartitionId, PushedTableRows]]:
    """Yields the rows of a checked push; `among`: only those of these partitions. Raises MalformedPayload,
    InvalidRequest."""
    at = 0
    for each in pushed:
        if not each.id_bytes:
            block = payload[at : at + each.payload_bytes]
            at += len(block)
            yield from _unpack_packed(layout, each, block, among)
            continue
        settings = layout.tables[each.table]
        parts = _parts_of(each, at)
        at = parts[-1].values[1] if parts else at
        if among is not None:
            parts = [part for part in parts if part.partition in among]
        ids = read_all_ids(layout, each.table, [(part.partition, part.rows, *part.ids) for part in parts], payload)
        values = _read_values(settings, parts, ids, payload)
        for part, mine, rows in zip(parts, ids, values, strict=True):
            yield part.partition, PushedTableRows(each.table, mine, rows, _read_counts(settings, part, payload))


def _unpack_packed(
    layout: JobLayout, pushed: PushedRows, block: Bytes, among: Container[PartitionId] | None
) -> Iterator[tuple[PartitionId, PushedTableRows]]:
    """As `unpack_pushed`, for the packed rows of one table. The ids and values are views of `block`."""
    settings, n = layout.tables[pushed.table], sum(pushed.rows)
    counts_at = ID_BYTES * n
    values_at = counts_at + (ROW_COUNT_BYTES * n if pushed.counted else 0)
    ends = [*itertools.accumulate(pushed.rows)]
    spans = [*zip(pushed.partitions, [0, *ends], ends, strict=False)]
    # all at once, or those alone that are wanted: of the others nothing is read
    for run in [spans] if among is None else [[span] for span in spans if span[0] in among]:
        first, last = run[0][1], run[-1][2]
        partitions, rows = [span[0] for span in run], [end - begin for _, begin, end in run]
        ids = read_packed_ids(layout, pushed.table, partitions, rows, block[ID_BYTES * first : ID_BYTES * last])
        width = 4 * settings.dim
        values = _aligned(block[values_at + width * first : values_at + width * last], np.float32)
        values = values.reshape(last - first, settings.dim)
        _check_finite(settings, ids, values)
        counts = None
        if pushed.counted:
            at = [counts_at + ROW_COUNT_BYTES * each for each in (first, last)]
            counts = _counts_in(settings, block[at[0] : at[1]])
        for partition, begin, end in run:
            mine = slice(begin - first, end - first)
            of_mine = None if counts is None else counts[mine]
            yield partition, PushedTableRows(pushed.table, ids[mine], values[mine], of_mine)


def read_packed_ids(
    layout: JobLayout, table: int, partitions: Sequence[PartitionId], rows: Sequence[int], block: Bytes
) -> Ids:
    """The ids of a table in several partitions, shape (sum(rows),), a view of `block` if that is aligned. Raises
    MalformedPayload, and InvalidRequest for an id of another partition."""
    ids: Ids = _aligned(block, np.int64)
    wrong = first_misplaced(ids, np.array(rows, np.int64), np.array(partitions, np.int64), len(layout.partitions))
    if wrong is None:
        return ids
    name, owner = layout.tables[table].name, partition_of(ids[wrong : wrong + 1], len(layout.partitions))[0]
    ends = itertools.accumulate(rows)
    partition = next(each for each, end in zip(partitions, ends, strict=True) if wrong < end)
    if owner == partition:
        raise MalformedPayload(f"ids of table {name!r} in partition {partition} that do not ascend")
    raise _stray(int(ids[wrong]), name, partition)


def _stray(number: int, table: str, partition: PartitionId) -> InvalidRequest:
    return InvalidRequest(
        f"id {number} of table {table!r} in partition {partition}",
        why="a row lies in the partition that its id is mixed to, for everybody the same",
        todo="cut ids by shardyard.domain.tables.row_ids.partition_of",
    )


def _aligned(block: Bytes, dtype: type) -> npt.NDArray[Any]:
    """A view of the bytes; a copy if they are not aligned."""
    if block.ctypes.data % np.dtype(dtype).itemsize:
        block = block.copy()
    return block.view(dtype)


class _Part(NamedTuple):
    """A table's rows of one partition: how many, and where in a payload their codes begin and end."""

    partition: PartitionId
    rows: int
    ids: tuple[int, int]
    counts: tuple[int, int]
    values: tuple[int, int]


def _parts_of(pushed: PushedRows, at: int) -> list[_Part]:
    """Finds where each partition's rows lie. The first begin at byte `at`."""
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
    return _counts_in(table, payload[begin:end])


def _counts_in(table: TableSettings, block: Bytes) -> npt.NDArray[np.int64]:
    counts = np.frombuffer(block.tobytes(), "<u2").astype(np.int64)
    if not counts.all():
        raise InvalidRequest(f"ids of table {table.name!r} that occurred no time at all")
    return counts


def _read_values(table: TableSettings, parts: Sequence[_Part], ids: Sequence[Ids], payload: Bytes) -> Sequence[Floats]:
    """Raises MalformedPayload, and InvalidRequest for values that are not finite."""
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
    _check_finite(table, ids, values)
    return values


def _check_finite(table: TableSettings, ids: Ids, values: Floats) -> None:
    if first_not_finite([values.ctypes.data], [values.size], "float32") is None:
        return
    wrong = ids[~np.isfinite(values).all(axis=1)]
    raise InvalidRequest(
        f"{wrong.size} rows for table {table.name!r} that are not finite, the first of id {wrong[0]}",
        why="a row would stay NaN for good; nothing was changed",
        todo="push such work as an empty one (job.nonfinite: skip)",
    )


def read_all_ids(
    layout: JobLayout, table: int, parts: Sequence[tuple[PartitionId, int, int, int]], codes: Bytes
) -> Sequence[Ids]:
    """Reads a table's ids of several partitions in one call. For each partition: its number, how many ids, and where
    theirs begin and end in `codes`. Raises what `read_ids` raises."""
    owners, counts, begins, ends = np.array(parts, np.int64).reshape(-1, 4).T.copy()
    whole = decode_runs(codes, begins, ends, counts)
    if whole is not None and first_misplaced(whole, counts, owners, len(layout.partitions)) is None:
        return _cut(whole, counts)
    name = layout.tables[table].name
    return [read_ids(layout, name, partition, n, codes[begin:end]) for partition, n, begin, end in parts]


def _cut(whole: npt.NDArray[Any], counts: npt.NDArray[np.int64]) -> Sequence[npt.NDArray[Any]]:
    """Returns views of the first counts[0] elements, the next counts[1] and so on."""
    found, at = [], 0
    for n in counts.tolist():
        found.append(whole[at : at + n])
        at += n
    return found


def read_ids(layout: JobLayout, table: str, partition: PartitionId, n: int, code: Bytes) -> Ids:
    """Raises MalformedPayload, and InvalidRequest for an id of another partition."""
    ids = decode_ids(code.data, n)
    if ids.size != n:
        raise MalformedPayload(f"a code of {ids.size} ids of table {table!r}; announced {n}")
    strange = partition_of(ids, len(layout.partitions)) != partition
    if strange.any():
        raise _stray(int(ids[strange][0]), table, partition)
    return ids
