"""A server with both partitions of an asynchronous job with two tables, and pushes with rows as they travel. The
fixture `closed` goes with `server`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from shardyard.codecs.rows.row_ids import encode_ids
from shardyard.codecs.rows.row_values import RowCode, encode_rows
from shardyard.domain.consistency import StaleRule, UpdateMode
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Term, Token
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import LookupRequest, RequestedRows
from shardyard.domain.push_names import PushName, SourceKey, WorkerSource
from shardyard.domain.pushes import PushedRows, PushHeader, PushKind, PushPart
from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_ids import partition_of
from shardyard.domain.tables.row_values import initial_rows, row_key
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.domain.variables import DType, VariableSpec
from shardyard.transport.interfaces import Context
from shardyard.wire import frames, methods, push_messages, table_messages
from shardyard.wire.frames import Frame
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_ps_server.hosting import orders
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.service.servicer import Servicer

JOB, HERE, GENERATION, WORKER = JobId(1), Incarnation(3), Generation(4), Incarnation(10)
RATE = make_group("sgd", {"lr": 1.0})
PARTS = (PartitionId(0), PartitionId(1))
WIDE, NARROW = (
    TableSettings("wide", 3, "sgd", RATE, 5, InitialValues(InitialKind.UNIFORM, 0.5), rows_max=1 << 12),
    TableSettings("narrow", 1, "sgd", RATE, 5, InitialValues(InitialKind.ZEROS, 0.0), rows_max=1 << 12),
)
LAYOUT = JobLayout(
    (VariableSpec("a", DType.FLOAT32, (16,)), VariableSpec("b", DType.FLOAT32, (16,))),
    OptimizerSpec("sgd", (RATE,)),
    tuple(PartitionLayout(p, 64, (Block(p, 0, 16, 0),)) for p in PARTS),
    (WIDE, NARROW),
)
IDS = np.array([-(2**63), -77, -1, 0, 1, 5, 1_000_003, 2**63 - 1], np.int64)
OWNER = partition_of(IDS, 2)
CONTEXT = Context(peer="", is_active=lambda: True)


_STORES: list[Store] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _STORES:
        _STORES.pop().close()


def made(**more: Any) -> Store:
    """A server without a job."""
    store = Store(shareable=False, **more)
    _STORES.append(store)
    store.become(HERE, Term(1))
    return store


def server(layout: JobLayout = LAYOUT, *, opened: bool = True, stale: StaleRule | None = None, **more: Any) -> Store:
    store = made(**more)
    orders.create(
        store, CreateRequest(JOB, GENERATION, layout, list(PARTS), UpdateRules(UpdateMode.ASYNC, 1, stale=stale))
    )
    if opened:
        orders.open_partitions(store, JOB, GENERATION)
    return store


Entry = tuple[int, int, np.ndarray, np.ndarray]
"""A table, a partition, ids, and their gradients."""


def ones(table: int = 0, scale: float = 1.0) -> list[Entry]:
    """Gradients for all ids."""
    dim = LAYOUT.tables[table].dim
    return [(table, p, IDS[p == OWNER], np.full(((p == OWNER).sum(), dim), scale, np.float32)) for p in PARTS]


def coded(
    entries: Sequence[Entry], counts: Sequence[Sequence[int]] | None = None
) -> tuple[tuple[PushedRows, ...], bytes]:
    said, data = [], b""
    for table in dict.fromkeys(entry[0] for entry in entries):
        mine = [entry for entry in entries if entry[0] == table]
        codes = [(bytes(encode_ids(e[2])), bytes(encode_rows(e[3], RowCode.FLOAT32))) for e in mine]
        for at, (ids, rows) in enumerate(codes):
            data += ids + (b"" if counts is None else np.array(counts[at], "<u2").tobytes()) + rows
        said.append(
            PushedRows(
                table,
                tuple(PartitionId(e[1]) for e in mine),
                tuple(e[2].size for e in mine),
                tuple(len(ids) for ids, _ in codes),
                tuple(len(rows) for _, rows in codes),
                counts is not None,
            )
        )
    return tuple(said), data


def packed(
    entries: Sequence[Entry], counts: Sequence[Sequence[int]] | None = None
) -> tuple[tuple[PushedRows, ...], bytes]:
    said, data = [], b""
    for table in dict.fromkeys(entry[0] for entry in entries):
        mine = [entry for entry in entries if entry[0] == table]
        blocks = [
            b"".join(e[2].astype("<i8").tobytes() for e in mine),
            b"" if counts is None else b"".join(np.array(each, "<u2").tobytes() for each in counts),
            b"".join(e[3].astype("<f4").tobytes() for e in mine),
        ]
        data += b"".join(blocks)
        partitions, rows = tuple(PartitionId(e[1]) for e in mine), tuple(e[2].size for e in mine)
        said.append(PushedRows(table, partitions, rows, (), (len(blocks[2]),), counts is not None))
    return tuple(said), data


def push_order(sequence: int, rows: tuple[PushedRows, ...] = (), **more: Any) -> PushHeader:
    name = PushName(SourceKey(WorkerSource(WORKER)), Token(0), sequence, sequence)
    parts = tuple(PushPart(p, 64) for p in PARTS)
    order = PushHeader(
        Caller(JOB, WORKER), HERE, GENERATION, name, PushKind.GRADIENT, parts, 1.0, (RATE,), rows=rows,
        table_groups=(RATE, RATE) if rows else (),
    )  # fmt: skip
    return dataclasses.replace(order, **more)


DENSE = np.ones(32, np.float32).tobytes()


def push(store: Store, order: PushHeader, data: bytes, *, frame_bytes: int = 50) -> wire.PushReply:
    header = push_messages.push_to_wire(order).SerializeToString()
    stream = (frames.decode(frames.encode(each)) for each in frames.cut(header, [data], frame_bytes))
    return Servicer(store).push(stream, CONTEXT)


def look_up(store: Store, table: int = 0, ids: np.ndarray = IDS, **more: Any) -> np.ndarray:
    """The rows, in the order of `ids`, which must ascend."""
    owners = partition_of(ids, 2)
    present = [p for p in PARTS if (owners == p).any()]
    requested = RequestedRows(table, tuple(present), tuple(int((owners == p).sum()) for p in present))
    asked = LookupRequest(Caller(JOB), HERE, GENERATION, (requested,))
    asked = dataclasses.replace(asked, **more)
    frame = Frame(table_messages.look_up_to_header(asked), 0, b"".join([ids[owners == p].tobytes() for p in present]))
    method = methods.LOOK_UP
    answer = method.response.decode(
        method.response.encode(Servicer(store).look_up(method.request.decode(method.request.encode(frame)), CONTEXT))
    )
    dim = LAYOUT.tables[table].dim
    found = np.frombuffer(bytes(answer.data), np.float32).reshape(-1, dim)
    rows = np.empty((ids.size, dim), np.float32)
    rows[np.argsort(owners, kind="stable")] = found
    return rows


def state(store: Store) -> object:
    """Everything that a refused request must leave as it is."""
    found = []
    for hosted in store.hosted():
        for number, partition in sorted(hosted.partitions.items()):
            version, sources = partition.describe()
            rows = {
                (name, int(i)): (record.tobytes(), int(f), int(s))
                for name, table in partition.tables.items()
                for chunk in table.cuts.items()
                for i, record, f, s in zip(chunk.ids, chunk.records, chunk.frequencies, chunk.steps, strict=False)
            }
            found.append((number, version, sources, partition.versions.values.tobytes(), rows))
    return found


INITIAL = initial_rows(IDS, 3, WIDE.initial, row_key(5, "wide"))
GOOD, GOOD_DATA = coded([*ones(), *ones(1)])
PACKED, PACKED_DATA = packed([*ones(), *ones(1)])
