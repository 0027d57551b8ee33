"""Servers with logs: a job of two partitions, its pushes, and servers that continue where others have stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np

from shardyard.checkpoints.manifest import PartitionEntry
from shardyard.domain.consistency import NO_CLIPPING, Clipping, Durability, StaleRule, UpdateMode
from shardyard.domain.errors import (
    ShardyardError,
)
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Rank, Term, Token, Version
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.push_names import DataShardSource, PushName, RankSource, Source, SourceKey
from shardyard.domain.pushes import Outcome, PushHeader, PushKind, PushPart
from shardyard.domain.variables import DType, VariableSpec
from shardyard_ps_server.checkpoint.restore import NO_RESTORE, Restore
from shardyard_ps_server.checkpoint.saver import Saved, SaveRequest
from shardyard_ps_server.hosting import admission, orders, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.checkpoint_cuts import block_arrays, take_cut
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.values.versions import aligned_empty
from shardyard_ps_server.wal.segments import LogFiles, LogRoot

JOB, FIRST, SECOND, THIRD = JobId((1 << 32) | 1), Incarnation(3), Incarnation(5), Incarnation(7)
GENERATION, NEXT = Generation(4), Generation(5)
SGD = (make_group("sgd", {"lr": 0.3, "momentum": 0.9}),)
SHARD = DataShardSource(0, 0, 0)
OWNED = [PartitionId(0), PartitionId(1)]
LAYOUT = JobLayout(
    tuple(VariableSpec(name, DType.FLOAT64, (8,)) for name in "abcd"),
    OptimizerSpec("sgd", SGD),
    tuple(PartitionLayout(p, 128, (Block(2 * p, 0, 8, 0), Block(2 * p + 1, 0, 8, 64))) for p in OWNED),
)
WORKER = Incarnation(10)
COORDINATOR = Caller(JOB, term=Term(2))


class Yard:
    """Servers that share a folder of logs, and a folder of checkpoints."""

    def __init__(
        self,
        folder: Path,
        mode: UpdateMode = UpdateMode.ASYNC,
        clipping: Clipping = NO_CLIPPING,
        *,
        stale: StaleRule | None = None,
        layout: JobLayout = LAYOUT,
    ) -> None:
        self.layout = layout
        self.logs = LogRoot(folder / "wal")
        self.checkpoints = folder / "checkpoints"
        self.mode = mode
        self.rules = UpdateRules(mode, 2, Durability.WAL, stale, clipping)
        self.failures: list[ShardyardError] = []
        self._stores: list[Store] = []
        self.budget: Budget | None = None

    def empty(self, incarnation: Incarnation) -> Store:
        store = Store(logs=self.logs, on_failure=self.failures.append, budget=self.budget)
        self._stores.append(store)
        store.become(incarnation, Term(2))
        return store

    def first(self, incarnation: Incarnation = FIRST) -> Store:
        """With checkpoint 1, of zeros."""
        store = self.empty(incarnation)
        orders.create(store, CreateRequest(JOB, GENERATION, self.layout, OWNED, self.rules))
        orders.open_partitions(store, JOB, GENERATION)
        leases(store)
        self.save(store, 1)
        return store

    def begun(self, count: int = 0) -> tuple[Store, list[Saved]]:
        """A first server that counted `count` pushes after its checkpoint 2, and that checkpoint."""
        store = self.first()
        saved = self.save(store, 2)
        for sequence in range(count):
            push(store, sequence)
        return store, saved

    def save(self, store: Store, number: int, *, oldest: int = 1, logs: Sequence[Incarnation] = ()) -> list[Saved]:
        step = None if self.mode is UpdateMode.ASYNC else store.hosted()[0].partitions[OWNED[0]].describe()[0].number
        order = SaveRequest(number, step, 0, 0, oldest, frozenset(logs))
        generation = store.hosted()[0].generation
        return orders.save(store, COORDINATOR, store.incarnation, generation, order, str(self.checkpoints))

    def successor(
        self,
        saved: Sequence[Saved],
        number: int,
        *trail: Incarnation,
        incarnation: Incarnation = SECOND,
        life: int = 2,
        owned: Sequence[PartitionId] = OWNED,
        generation: Generation = NEXT,
        into: Store | None = None,
        job: JobId = JOB,
    ) -> Store:
        """A server that goes on where those in `trail` have stopped. `job`: who wrote the checkpoint."""
        store = into or self.empty(incarnation)
        entries = tuple(
            PartitionEntry(each.partition, Version(life, each.version.number), (each.file,), each.tables)
            for each in saved
            if each.partition in owned
        )
        restore = Restore(str(self.checkpoints), entries, number, dict.fromkeys(owned, trail), job)
        orders.create(store, CreateRequest(JOB, generation, self.layout, owned, self.rules, restore))
        return store

    def close(self) -> None:
        for store in self._stores:
            store.close()


@contextmanager
def yard_of(
    folder: Path,
    mode: UpdateMode = UpdateMode.ASYNC,
    clipping: Clipping = NO_CLIPPING,
    *,
    stale: StaleRule | None = None,
    layout: JobLayout = LAYOUT,
) -> Iterator[Yard]:
    made = Yard(folder, mode, clipping, stale=stale, layout=layout)
    try:
        yield made
    finally:
        made.close()


def create(
    store: Store,
    generation: Generation = GENERATION,
    owned: Sequence[PartitionId] = OWNED,
    restore: Restore = NO_RESTORE,
) -> None:
    """Creates the partitions of an asynchronous job with logs."""
    rules = UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL)
    orders.create(store, CreateRequest(JOB, generation, LAYOUT, owned, rules, restore))


def disk_full(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


def gone(_: str) -> NoReturn:
    raise OSError(5, "gone")


def leases(store: Store, token: int = 1) -> None:
    hosted = store.hosted()[0]
    sources: list[Source] = [SHARD]
    if hosted.mode is UpdateMode.SYNC:
        sources = [RankSource(Rank(rank)) for rank in range(2)]
    pushes.open_sources(hosted, [(SourceKey(source), Token(token)) for source in sources])


def order_of(
    store: Store,
    sequence: int,
    *,
    source: Source = SHARD,
    token: int = 1,
    absent: Sequence[int] = (),
    worker: Incarnation = WORKER,
    kind: PushKind = PushKind.GRADIENT,
) -> PushHeader:
    hosted = store.hosted()[0]
    parts = tuple(
        PushPart(p, 0)
        if kind is PushKind.EMPTY
        else PushPart(p, 128 - 64 * len(absent) * (p == 0), tuple(absent) if p == 0 else ())
        for p in sorted(hosted.partitions)
    )
    name = PushName(SourceKey(source), Token(token), sequence, sequence)
    counted = kind is PushKind.GRADIENT
    return PushHeader(
        Caller(JOB, worker),
        store.incarnation,
        hosted.generation,
        name,
        kind,
        parts,
        1.0 if counted else 0.0,
        SGD if counted else (),
    )


def payload_of(order: PushHeader) -> np.ndarray:
    """Whole partitions, in their order, of a gradient of its own for each name."""
    rank = order.name.key.source.rank if isinstance(order.name.key.source, RankSource) else 9
    gradient = np.random.default_rng([order.name.first, rank]).normal(size=32)
    payload = aligned_empty(order.payload_bytes)
    at = 0
    for part in order.parts:
        mine = gradient[16 * part.partition : 16 * part.partition + part.payload_bytes // 8]
        payload[at : at + part.payload_bytes] = mine.view(np.uint8)
        at += part.payload_bytes
    return payload


def send(store: Store, order: PushHeader) -> set[Outcome]:
    admitted = admission.admit_push(store, order)
    return {result.outcome for result in pushes.push(store, admitted, order, payload_of(order))}


def push(store: Store, sequence: int, **said: object) -> set[Outcome]:
    return send(store, order_of(store, sequence, **said))  # type: ignore[arg-type]


def step(store: Store, number: int) -> None:
    for rank in range(2):
        push(store, number, source=RankSource(Rank(rank)))


State = dict[int, tuple[int, bytes, bytes, tuple[object, ...]]]
Crashed = tuple[Yard, list[Saved], State]


def state(store: Store) -> State:
    """All that a partition is: version, values, optimizer state, ledger."""
    found = {}
    for number, each in sorted(store.hosted()[0].partitions.items()):
        cut = take_cut(each)
        cut.complete()
        slots = b"".join(
            array.tobytes()
            for index in range(len(each.payload.blocks))
            for name, array in sorted(block_arrays(each, index, cut).items())
            if name != "values"
        )
        values = b"".join(
            block_arrays(each, index, cut)["values"].tobytes() for index in range(len(each.payload.blocks))
        )
        marks = tuple(sorted(cut.marks, key=str))
        found[int(number)] = (cut.version.number, values, slots, marks)
        cut.release()
    return found


def log_of(yard: Yard, server: Incarnation = FIRST) -> LogFiles:
    return yard.logs.log(JOB, server)
