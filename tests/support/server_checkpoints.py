"""Servers of a job with two partitions, which are saved and restored. The fixture `stores_end` goes with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from shardyard.checkpoints.manifest import PartitionEntry
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Rank, Term, Token
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import PullHeader
from shardyard.domain.push_names import (
    DataShardSource,
    DoneDataShards,
    PushName,
    RankSource,
    Source,
    SourceKey,
)
from shardyard.domain.pushes import Outcome, PushHeader, PushKind, PushPart
from shardyard.domain.variables import DType, VariableSpec
from shardyard_ps_server.checkpoint.restore import NO_RESTORE, Restore
from shardyard_ps_server.checkpoint.saver import Saved, SaveRequest
from shardyard_ps_server.hosting import admission, orders, pulls, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.values.versions import Bytes, aligned_empty

WORKER = Incarnation(10)
JOB, HERE, GENERATION, NEXT = JobId(1), Incarnation(3), Generation(4), Generation(5)
RATE = (make_group("adam", {"lr": 0.5}),)
SHARD = DataShardSource(0, 0, 0)
DONE = [DoneDataShards(SHARD.feed, 1 + SHARD.index, (1 + SHARD.epoch) * (1 + SHARD.index))]
OWNED = [PartitionId(0), PartitionId(1)]
LAYOUT = JobLayout(
    tuple(VariableSpec(name, DType.FLOAT64, (8,)) for name in "abcd"),
    OptimizerSpec("adam", RATE),
    tuple(PartitionLayout(p, 128, (Block(2 * p, 0, 8, 0), Block(2 * p + 1, 0, 8, 64))) for p in OWNED),
)
COORDINATOR = Caller(JOB, term=Term(2))
MADE: list[Store] = []
"""The stores of a test, which ends with them."""


@pytest.fixture(autouse=True)
def stores_end() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


def made() -> Store:
    MADE.append(Store())
    return MADE[-1]


def create(
    store: Store,
    restore: Restore = NO_RESTORE,
    *,
    generation: Generation = GENERATION,
    owned: Sequence[PartitionId] = OWNED,
    mode: UpdateMode = UpdateMode.ASYNC,
    **more: int,
) -> None:
    orders.create(store, CreateRequest(JOB, generation, LAYOUT, owned, UpdateRules(mode, 2), restore, **more))  # type: ignore[arg-type]


def server(mode: UpdateMode = UpdateMode.ASYNC, owned: Sequence[PartitionId] = OWNED) -> Store:
    found = made()
    found.become(HERE, Term(2))
    create(found, owned=owned, mode=mode)
    orders.open_partitions(found, JOB, GENERATION)
    return found


def leased(store: Store, generation: Generation = GENERATION) -> Store:
    """What the mode leases is open under token 1."""
    hosted = store.hosted()[0]
    sources: list[Source] = [SHARD]
    if hosted.mode is UpdateMode.SYNC:
        sources = [RankSource(Rank(rank)) for rank in range(2)]
    pushes.open_sources(hosted, [(SourceKey(source), Token(1)) for source in sources])
    return store


def push(
    store: Store,
    sequence: int,
    *,
    source: Source = SHARD,
    absent: Sequence[int] = (),
    generation: Generation = GENERATION,
    owned: Sequence[PartitionId] = OWNED,
) -> set[Outcome]:
    """A gradient of its own for each sequence; `absent`: blocks of partition 0 without one."""
    order = pushed(sequence, source, absent=absent, generation=generation, owned=owned)
    admitted = admission.admit_push(store, order)
    return {result.outcome for result in pushes.push(store, admitted, order, gradient(order))}


def pushed(
    sequence: int,
    source: Source,
    *,
    absent: Sequence[int] = (),
    generation: Generation = GENERATION,
    owned: Sequence[PartitionId] = OWNED,
) -> PushHeader:
    parts = tuple(PushPart(p, 128 - 64 * len(absent) * (p == 0), tuple(absent) if p == 0 else ()) for p in owned)
    name = PushName(SourceKey(source), Token(1), sequence, sequence)
    return PushHeader(Caller(JOB, Incarnation(10)), HERE, generation, name, PushKind.GRADIENT, parts, 1.0, RATE)


def gradient(order: PushHeader) -> Bytes:
    payload = aligned_empty(order.payload_bytes)
    payload.view(np.float64)[:] = np.random.default_rng(order.name.first).normal(size=len(payload) // 8)
    return payload


def trained(updates: int) -> Store:
    """An asynchronous server, after so many pushes."""
    store = leased(server())
    for sequence in range(updates):
        push(store, sequence)
    return store


def push_step(store: Store, number: int, generation: Generation = GENERATION) -> None:
    for rank in range(2):
        push(store, number, source=RankSource(Rank(rank)), generation=generation)


def values(
    store: Store, owned: Sequence[PartitionId] = OWNED, generation: Generation = GENERATION
) -> tuple[bytes, ...]:
    wish = PullHeader(Caller(JOB, Incarnation(10)), HERE, generation, tuple(owned), 0, exactly=False)
    _, held = pulls.hold(admission.admit_pull(store, wish), wish)
    found = tuple(buffer.tobytes() for _, buffer in held.buffers)
    held.release()
    return found


def save(
    store: Store,
    folder: Path,
    number: int,
    *,
    step: int | None = None,
    base: int = 0,
    wait_ms: int = 0,
    attempt: int = 0,
) -> list[Saved]:
    order = SaveRequest(number, step, base, wait_ms, attempt=attempt)
    return orders.save(store, COORDINATOR, HERE, GENERATION, order, str(folder))


def entries(saved: Sequence[Saved], life: int = 2) -> tuple[PartitionEntry, ...]:
    return tuple(PartitionEntry(each.partition, each.version._replace(life=life), (each.file,)) for each in saved)


def restored(
    folder: Path,
    found: tuple[PartitionEntry, ...],
    mode: UpdateMode = UpdateMode.ASYNC,
    owned: Sequence[PartitionId] = OWNED,
) -> Store:
    store = made()
    store.become(HERE, Term(2))
    create(store, Restore(str(folder), found), owned=owned, mode=mode)
    return store
