"""A partition of a synchronous or hybrid job with two tables, and a server that has only this partition. Tests that use
`server` also need the fixture `closed` of rows_in_pushes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import Caller, Generation, PartitionId, Rank, Token
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.pulls import LookupRequest
from shardyard.domain.push_names import PushName, RankSource, SourceKey
from shardyard.domain.pushes import Outcome, StepVerdict
from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_values import initial_rows, row_key
from shardyard.domain.tables.table_settings import ExpirySettings, TableSettings
from shardyard.domain.variables import DType, VariableSpec
from shardyard_ps_server.checkpoint.restore import NO_RESTORE, Restore
from shardyard_ps_server.hosting import orders, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.contribution import Contribution
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.push import apply_push, check_push
from shardyard_ps_server.partition.reads import look_up_rows
from shardyard_ps_server.partition.sync_step import gathered_part, take_verdict
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows.partition_tables import RowsToRead
from shardyard_ps_server.rows.pushed_rows import PushedTableRows
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.values.versions import aligned_empty
from tests.support.rows_in_pushes import GENERATION, HERE, JOB, RATE, made

HALF = (0.5, *RATE[1:])
WIDE = TableSettings("wide", 2, "sgd", RATE, 5, InitialValues(InitialKind.UNIFORM, 0.5), rows_max=1 << 12)
NARROW = TableSettings("narrow", 1, "sgd", RATE, 5, InitialValues(InitialKind.ZEROS, 0.0), rows_max=1 << 12)
EXPIRING = dataclasses.replace(NARROW, expiry=ExpirySettings(age_steps=5))
IN_SECONDS = dataclasses.replace(NARROW, expiry=ExpirySettings(age_ms=5_000))
PARTITION = PartitionId(0)
LAYOUT = JobLayout(
    (VariableSpec("a", DType.FLOAT32, (16,)),),
    OptimizerSpec("sgd", (RATE,)),
    (PartitionLayout(PARTITION, 64, (Block(0, 0, 16, 0),)),),
    (WIDE, NARROW),
)
IDS = np.arange(-4, 12, dtype=np.int64) * 1_000_003
INITIAL = initial_rows(IDS, 2, WIDE.initial, row_key(5, "wide"))


def current() -> None:
    """The generation has not changed."""


def partition_of(ranks: int, layout: JobLayout = LAYOUT, budget: Budget | None = None, **more: Any) -> Partition:
    """A partition in which all ranks are open."""
    made = Partition(layout, PARTITION, UpdateRules(UpdateMode.SYNC, ranks, **more), budget=budget)
    for rank in range(ranks):
        made.open_source(SourceKey(RankSource(Rank(rank))), Token(1))
    made.open()
    return made


def work(
    given: Mapping[int, float] | None = None,
    *,
    weight: float = 1.0,
    table: int = 0,
    dense: float = 0.0,
    groups: tuple[tuple[float, ...], ...] = (RATE, RATE),
) -> Contribution:
    """A contribution. `given`: for an id, named by its place in IDS, the value of all elements of its gradient."""
    payload = aligned_empty(64)
    payload.view(np.float32)[:] = dense
    if not given:
        return Contribution(weight, (RATE,), payload, (True,))
    places = sorted(given)
    dim = LAYOUT.tables[table].dim
    values = np.array([[given[place]] * dim for place in places], np.float32)
    return Contribution(
        weight, (RATE,), payload, (True,), rows=(PushedTableRows(table, IDS[places], values),), table_groups=groups
    )


EMPTY = Contribution(0.0, None, aligned_empty(0), (False,))


def push(partition: Partition, rank: int, step: int, contribution: Contribution) -> Outcome:
    name = PushName(SourceKey(RankSource(Rank(rank))), Token(1), step, step)
    check_push(partition, name, contribution)
    return apply_push(partition, name, contribution, current).outcome


def judge(partition: Partition, step: int) -> None:
    """Takes the step, if it waits for a verdict."""
    told = gathered_part(partition, step)
    if told is not None:
        take_verdict([partition], StepVerdict(step, told.square_norm), current)


def read(partition: Partition, number: int | None = None, *, table: int = 0, wait_s: float = 0.0) -> np.ndarray:
    """The rows of all IDS."""
    out = np.full((IDS.size, LAYOUT.tables[table].dim), np.nan, np.float32)
    look_up_rows([(partition, [RowsToRead(table, IDS, out)])], number, time.monotonic() + wait_s)
    return out


def moved(partition: Partition, number: int | None = None) -> dict[int, float]:
    """By how much the rows of "wide" have changed, for those that have."""
    by = (read(partition, number) - INITIAL)[:, 0]
    return {place: float(by[place]) for place in np.flatnonzero(by).tolist()}


def full(rows: int) -> JobLayout:
    return dataclasses.replace(LAYOUT, tables=(dataclasses.replace(WIDE, rows_max=rows), NARROW))


def server(
    restore: Restore = NO_RESTORE,
    ranks: int = 2,
    *,
    on_failure: Any = None,
    generation: Generation = GENERATION,
    layout: JobLayout = LAYOUT,
    **rules: Any,
) -> Store:
    store = made(on_failure=on_failure)
    orders.create(
        store,
        CreateRequest(JOB, generation, layout, [PARTITION], UpdateRules(UpdateMode.SYNC, ranks, **rules), restore),
    )
    if restore is NO_RESTORE:
        orders.open_partitions(store, JOB, generation)
    leased = [(SourceKey(RankSource(Rank(rank))), Token(1)) for rank in range(ranks)]
    pushes.open_sources(store.hosted()[0], leased)
    return store


def only(store: Store) -> Partition:
    return store.hosted()[0].partitions[PARTITION]


def asked(**more: Any) -> LookupRequest:
    return dataclasses.replace(LookupRequest(Caller(JOB), HERE, GENERATION, ()), **more)
