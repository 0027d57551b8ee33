"""Rows in a log: those of a push as they were received, the time when they arrived, and the ids that expire with it.

Owns: where their bytes are in a record. Invariant: like bytes from a peer, all bytes of a record are checked before
anything changes. Must not know: files, what a push does.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

import numpy as np

from shardyard.domain.errors import InvalidRequest, MalformedPayload
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.pulls import RequestedRows
from shardyard.domain.pushes import PushedRows, PushHeader
from shardyard_ps_server.rows.pushed_rows import (
    ExpiredIds,
    PushedTableRows,
    check_pushed,
    read_packed_ids,
    requested_bytes_max,
    unpack_pushed,
)
from shardyard_ps_server.values.versions import Bytes


def encode_expired(
    gone: Iterable[tuple[PartitionId, Sequence[ExpiredIds]]],
) -> tuple[tuple[RequestedRows, ...], list[Bytes]]:
    """What expires in each partition, for a record: the header's part, and the ids."""
    tables: dict[int, list[tuple[PartitionId, ExpiredIds]]] = {}
    for partition, each in gone:
        for one in each:
            tables.setdefault(one.table, []).append((partition, one))
    expired = [
        RequestedRows(table, tuple([partition for partition, _ in mine]), tuple([one.ids.size for _, one in mine]))
        for table, mine in tables.items()
    ]
    return tuple(expired), [one.ids.view(np.uint8) for mine in tables.values() for _, one in mine]


def with_times(
    pushed: Sequence[PushedRows], brought: Iterable[tuple[PartitionId, Sequence[PushedTableRows]]]
) -> tuple[PushedRows, ...]:
    """Returns the header's part for the rows of a push, with arrival times for tables that have a clock."""
    times = {
        (partition, each.table): each.now_ms for partition, rows in brought for each in rows if each.now_ms is not None
    }
    timed = {table for _, table in times}
    return tuple(
        [
            replace(each, now_ms=tuple([times[partition, each.table] for partition in each.partitions]))
            if each.table in timed
            else each
            for each in pushed
        ]
    )


def read_rows(
    layout: JobLayout, header: PushHeader, payload: Bytes, among: Container[PartitionId]
) -> tuple[dict[PartitionId, list[PushedTableRows]], dict[PartitionId, list[ExpiredIds]]]:
    """Reads the rows of a recorded push in the partitions `among`, and what expires with it. Raises MalformedPayload,
    InvalidRequest, ShapeMismatch."""
    begin, end = header.payload_bytes, header.payload_bytes + header.rows_bytes
    if end + header.expired_bytes != len(payload):
        raise MalformedPayload(f"{header.name} with {len(payload)} bytes; its header says {end + header.expired_bytes}")
    if header.rows:
        check_pushed(layout.tables, header.rows, header.table_groups)
    for pushed in header.rows:
        if bool(pushed.now_ms) is not layout.tables[pushed.table].expiry.by_time:
            raise InvalidRequest(
                f"rows of table {layout.tables[pushed.table].name!r} with {len(pushed.now_ms)} times; expected"
                f" {0 if pushed.now_ms else len(pushed.partitions)}"
            )
    requested_bytes_max(layout.tables, header.expired)
    brought: dict[PartitionId, list[PushedTableRows]] = {}
    times = {
        (partition, each.table): now_ms
        for each in header.rows
        if each.now_ms
        for partition, now_ms in zip(each.partitions, each.now_ms, strict=True)
    }
    # a copy, since steps keep rows until they are complete, and the payload is of this record only
    for partition, rows in unpack_pushed(layout, header.rows, payload[begin:end].copy(), among):
        brought.setdefault(partition, []).append(rows._replace(now_ms=times.get((partition, rows.table))))
    gone: dict[PartitionId, list[ExpiredIds]] = {}
    for each in header.expired:
        ids = read_packed_ids(layout, each.table, each.partitions, each.rows, payload[end : end + each.nbytes])
        end += each.nbytes
        begin = 0
        for partition, n in zip(each.partitions, each.rows, strict=True):
            if partition in among:
                gone.setdefault(partition, []).append(ExpiredIds(each.table, ids[begin : begin + n]))
            begin += n
    return brought, gone
