"""Messages that create a job on a server, as a client with generated classes would send them: a job with two partitions
on this server. This module makes the messages, and the caller sends them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from shardyard.domain import optimizers
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.wire import common_messages, layout_messages
from shardyard.wire.table_messages import table_to_wire
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import parameter_server_pb2 as wire

JOB, WORKER, SERVER, TERM = 7, 9, 2, 1
DIM = 2
GROUPS = (optimizers.make_group("sgd", {"lr": 0.5}),)
CALLER = common.Caller(job=JOB, incarnation=WORKER)
ORDERS = common.Caller(job=JOB, term=TERM)
VALUES = struct.pack("<16f", *range(16)) + struct.pack("<4f", *range(16, 20)) + bytes(48)
GRADIENT = struct.pack("<16f", *[1.0] * 16) + struct.pack("<4f", *[2.0] * 4) + bytes(48)


def layout(*, tables: bool = False) -> common.JobLayout:
    """ "w", 20 float32: 16 in partition 0; 4 in partition 1; nothing in partition 2, which the server does not own."""
    table = TableSettings("t", DIM, "sgd", GROUPS[0], rows_max=1 << 12)
    return common.JobLayout(
        variables=[{"name": "w", "dtype": common.DTYPE_FLOAT32, "shape": [20], "kind": common.VARIABLE_KIND_PARAMETER}],
        optimizer=layout_messages.optimizer_to_wire(OptimizerSpec("sgd", GROUPS)),
        partitions=[
            {"partition": 0, "payload_bytes": 64, "blocks": [{"length": 16}]},
            {"partition": 1, "payload_bytes": 64, "blocks": [{"offset": 16, "length": 4}]},
            {"partition": 2},
        ],
        tables=[table_to_wire(table)] if tables else [],
    )


def header(sequence: int = 0, kind: int = wire.PUSH_KIND_GRADIENT, **more: Any) -> wire.PushHeader:
    return wire.PushHeader(
        caller=CALLER,
        server=SERVER,
        generation=1,
        name={"source": {"worker": WORKER}, "first": sequence, "last": sequence},
        kind=kind,
        parts=[{"partition": 0, "payload_bytes": 64}, {"partition": 1, "payload_bytes": 64}],
        weight=8.0,
        groups=layout_messages.groups_to_wire(GROUPS) if kind == wire.PUSH_KIND_GRADIENT else [],
        **more,
    )


def wish(number: int = 0) -> wire.PullRequest:
    return wire.PullRequest(caller=CALLER, server=SERVER, generation=1, partitions=[0, 1], number=number)


def creation(mode: UpdateMode = UpdateMode.ASYNC, *, tables: bool = False) -> wire.CreatePartitionsRequest:
    """A synchronous job has one logical rank."""
    return wire.CreatePartitionsRequest(
        caller=ORDERS,
        generation=1,
        layout=layout(tables=tables),
        partitions=[0, 1],
        mode=common_messages.UPDATE_MODES.to_wire(mode),
        logical_ranks=1 if mode is UpdateMode.SYNC else 0,
        server=SERVER,
    )


def stock(send: Callable[..., object], mode: UpdateMode = UpdateMode.ASYNC, *, tables: bool = False) -> None:
    """`send(METHOD, *MESSAGES)` to a server that is SERVER, in TERM: creates the job, gives it values, opens it."""
    send("CreatePartitions", creation(mode, tables=tables))
    send("Initialize", wire.PushFrame(header=header(kind=wire.PUSH_KIND_VALUES), data=VALUES))
    send("OpenPartitions", wire.OpenPartitionsRequest(caller=ORDERS, generation=1))
    if mode is UpdateMode.SYNC:
        sources = [wire.SourceToken(source={"logical_rank": 0}, token=1)]
        send("OpenSources", wire.OpenSourcesRequest(caller=CALLER, server=SERVER, generation=1, sources=sources))
