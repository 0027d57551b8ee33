"""Rows in pushes and look-ups: from the bytes of a payload to ids and values, checked.

In: what a header says about rows, and their codes. Out: `PushedTableRows` and `RowQuery`, or an error. Everything is
checked before anything changes: ids ascend strictly and belong to the partition, values are finite, and a length that a
header claims is possible for its number of rows. Must not know: tables, what is done with the rows.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardyard.codecs.rows.row_ids import decode_ids, decode_runs
from shardyard.codecs.rows.row_values import decode_raw_runs, decode_rows
from shardyard.domain.errors import InvalidRequest, MalformedPayload, ShapeMismatch
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.limits import CODE_HEAD_BYTES_MAX, ROW_COUNT_BYTES
from shardyard.domain.pulls import RequestedRows, RowCode
from shardyard.domain.pushes import PushedRows
from shardyard.domain.tables import row_optimizers
from shardyard.domain.tables.row_ids import Ids
from shardyard.domain.tables.row_routing import first_stray, partition_of
from shardyard.domain.tables.table_settings import TableSettings
from shardyard_ps_server.values.versions import Bytes

Groups = Sequence[Sequence[float]]
Floats = npt.NDArray[np.float32]


class PushedTableRows(NamedTuple):
    """Checked rows of one table for one partition, in memory of their own: `ids`, shape (n,), ascending; `values`,
    shape (n, dim): gradients, or first values; `counts`: how often each id occurred, None: once. `now_ms`: the table's
    clock when they arrived, if that is recorded; None: now."""

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


def requested_bytes_max(
    tables: Sequence[TableSettings], requested: Sequence[RequestedRows], code: RowCode = RowCode.FLOAT32
) -> int:
    """Returns the most bytes that all requested rows can take in the code. Raises InvalidRequest, MalformedPayload."""
    total = 0
    for each in requested:
        settings = table_at(tables, each.table)
        for n, ids in zip(each.rows, each.id_bytes, strict=True):
            if not _fits(n, ids):
                raise MalformedPayload(f"{n} ids of table {settings.name!r} in {ids} bytes")
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
    counts = np.frombuffer(payload[begin:end].tobytes(), "<u2").astype(np.int64)
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
    """Reads a table's ids of several partitions in one call. For each partition: its number, how many ids, and where
    theirs begin and end in `codes`. Raises what `read_ids` raises."""
    owners, counts, begins, ends = np.array(parts, np.int64).reshape(-1, 4).T.copy()
    whole = decode_runs(codes, begins, ends, counts)
    if whole is not None and first_stray(whole, counts, owners, len(layout.partitions)) is None:
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
        raise InvalidRequest(
            f"id {ids[strange][0]} of table {table!r} in partition {partition}",
            why="a row lies in the partition that its id is mixed to, for everybody the same",
            todo="cut ids by shardyard.domain.tables.row_ids.partition_of",
        )
    return ids
