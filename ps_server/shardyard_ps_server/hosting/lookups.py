"""Looks up rows of tables on this server, or reads whole tables.

In: requests, with the ids of rows as bytes. Out: the rows, concatenated, float32 or encoded. A look-up has one
side effect: the rows that a worker looked up do not expire before its push (`rows_in_flight`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from shardyard.codecs.rows.row_values import encode_rows
from shardyard.domain.errors import MalformedPayload
from shardyard.domain.ids import Caller, Generation, Incarnation, PartitionId
from shardyard.domain.pulls import LookupRequest, RequestedRows, RowCode
from shardyard.domain.tables.row_ids import Ids
from shardyard_ps_server.hosting.admission import admit, check_requested_rows
from shardyard_ps_server.hosting.hosted_job import HostedJob
from shardyard_ps_server.hosting.pulls import now_ms
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.reads import (
    look_up_pinned,
    look_up_rows,
    read_pinned_table,
    read_table,
)
from shardyard_ps_server.rows.lookups_in_flight import TablePart
from shardyard_ps_server.rows.partition_tables import RowsToRead
from shardyard_ps_server.rows.pushed_rows import Floats, RowQuery, read_packed_ids, table_at
from shardyard_ps_server.values.versions import Bytes, aligned_empty

NO_WORKER: Final = Incarnation(0)


def look_up(store: Store, request: LookupRequest, packed_ids: Bytes) -> Bytes:
    """Returns the rows of a request outside of an exchange, like `find_rows`. Raises InvalidRequest, MalformedPayload,
    TooLarge, NotReady if there are no first values or a version does not come in time, NotFound if it has passed."""
    hosted = admit(store, request.caller, request.server, request.generation, reads=True)
    hosted.check_open()
    check_requested_rows(hosted, request.requested, code=request.code)
    until = time.monotonic() + request.wait_ms / 1000
    queries = read_queries(hosted, request.requested, packed_ids)
    worker = request.caller.incarnation
    found = find_rows(store, hosted, queries, request.number, until, request.code, request.pin, worker=worker)
    store.count_sent(len(found))
    hosted.check_generation(request.generation)  # meanwhile partitions may have been restored or moved
    return found


def read_queries(hosted: HostedJob, requested: Sequence[RequestedRows], packed_ids: Bytes) -> list[RowQuery]:
    """Reads the ids of a look-up, which it keeps as views. Raises MalformedPayload, InvalidRequest."""
    announced = sum([each.nbytes for each in requested])
    if announced != len(packed_ids):
        raise MalformedPayload(f"{len(packed_ids)} bytes of ids; announced {announced}")
    found, at = [], 0
    for each in requested:
        block = packed_ids[at : at + each.nbytes]
        ids, begin = read_packed_ids(hosted.layout, each.table, each.partitions, each.rows, block), 0
        for partition, rows in zip(each.partitions, each.rows, strict=True):
            found.append(RowQuery(each.table, partition, ids[begin : begin + rows]))
            begin += rows
        at += len(block)
    return found


def find_rows(
    store: Store,
    hosted: HostedJob,
    queries: Sequence[RowQuery],
    number: int | None = None,
    until: float = 0.0,
    code: RowCode = RowCode.FLOAT32,
    pin: bytes = b"",
    into: Bytes | None = None,
    *,
    worker: Incarnation = NO_WORKER,
) -> Bytes:
    """Returns the rows, concatenated, float32 or encoded. In a synchronous job all rows of a partition have one
    version.

    `number`: that version, for which the call waits until `until` (time.monotonic); None: the newest. `pin`: the
    version that a reader has pinned. `into`: the worker's memory for rows that are not encoded, of exactly their size.
    `worker`: may push the rows later; until then they do not expire. Raises what look_up_rows and look_up_pinned raise.
    """
    if worker != NO_WORKER and hosted.protects_looked_up_rows:
        hosted.rows_in_flight.begin(worker, [(TablePart(partition, table), ids) for table, partition, ids in queries])
        if store.is_fenced(worker):  # it may have been fenced since it was admitted
            hosted.rows_in_flight.forget([worker])
    dims = [hosted.layout.tables[each.table].dim for each in queries]
    nbytes = 4 * sum([dim * each.ids.size for dim, each in zip(dims, queries, strict=True)])
    found, at = aligned_empty(nbytes) if into is None else into, 0
    by_partition: dict[PartitionId, list[RowsToRead]] = {}
    answers: list[Floats] = []
    for dim, (table, partition, ids) in zip(dims, queries, strict=True):
        rows = found[at : at + 4 * dim * ids.size].view(np.float32).reshape(ids.size, dim)
        by_partition.setdefault(partition, []).append(RowsToRead(table, ids, rows))
        answers.append(rows)
        at += rows.nbytes
    if pin:
        pinned = hosted.pins.rows(pin, list(by_partition), now_ms())
        for partition, of_partition in by_partition.items():
            holder, version = pinned[partition]
            look_up_pinned(holder, of_partition, version)
    else:
        asked = [(hosted.find(partition), of_partition) for partition, of_partition in by_partition.items()]
        look_up_rows(asked, number, until)
    if code is not RowCode.FLOAT32:
        found = np.frombuffer(b"".join([encode_rows(rows, code) for rows in answers]), np.uint8)
    return found


def read_rows(
    store: Store,
    caller: Caller,
    server: Incarnation,
    generation: Generation,
    number: PartitionId,
    table: int,
    pin: bytes = b"",
) -> Iterator[tuple[Ids, Floats]]:
    """Yields all rows of a table in one partition, in pieces, as they are between two updates. `pin`: as they were in
    the version that a reader has pinned. Raises NotReady while another caller reads them, NotFound, VersionPassed."""
    hosted = admit(store, caller, server, generation, reads=True)
    hosted.check_open()
    table_at(hosted.layout.tables, table)
    if pin:
        holder, version = hosted.pins.rows(pin, [number], now_ms())[number]
        yield from read_pinned_table(holder, table, version)
        return
    for chunk in read_table(hosted.find(number), table):
        yield chunk.ids[: chunk.values.shape[0]], chunk.values
