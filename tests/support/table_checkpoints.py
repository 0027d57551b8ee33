"""Servers whose tables are saved and restored, in memory and on disk. The fixtures
`where_rows_lie` and `stores_end` go with `server`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import FileRef, Manifest, PartitionEntry
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Term
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.tables.row_ids import partition_of
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard.domain.variables import DType, VariableSpec
from shardyard.storage.storage import LocalStorage
from shardyard_coordinator.placement.placement import plan
from shardyard_ps_server.checkpoint import table_saver
from shardyard_ps_server.checkpoint.restore import NO_RESTORE, Restore
from shardyard_ps_server.checkpoint.saver import Saved, SaveRequest
from shardyard_ps_server.hosting import orders
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.tables import cuts, disk_tier
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.tables.table import Table

JOB, HERE, GENERATION, NEXT = JobId(1), Incarnation(3), Generation(4), Generation(5)
COORDINATOR = Caller(JOB, term=Term(2))
USERS = TableSettings("users", 4, "adam", seed=3, rows_max=1 << 16, expiry=ExpirySettings(age_steps=40_000))
WORDS = TableSettings(
    "words.in", 3, "rowwise_adagrad", rows_max=1 << 16,
    admission=AdmissionSettings(Admission.ESTIMATE, threshold=2, cells=1 << 12), expiry=ExpirySettings(age_ms=10**9),
)  # fmt: skip
DENSE = plan(
    [VariableSpec("w", DType.FLOAT32, (32,))],
    OptimizerSpec("sgd", (make_group("sgd", {"lr": 1.0}),)),
    partitions=2,
    block_bytes=64,
)
LAYOUT = dataclasses.replace(DENSE, tables=(USERS, WORDS))
OWNED = [part.partition for part in LAYOUT.partitions]
IDS = np.unique(np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 3_000))
MADE: list[Store] = []
BUDGETS: list[Budget | None] = []


@pytest.fixture(autouse=True, params=[False, True], ids=["in memory", "on disk"])
def where_rows_lie(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(disk_tier, "ROWS_LEAST", 50)
    BUDGETS.append(Budget(1, lambda: os.memfd_create("rows")) if request.param else None)
    yield
    BUDGETS.pop()


@pytest.fixture(autouse=True)
def stores_end() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_saver, "FILE_BYTES", 20_000)
    monkeypatch.setattr(cuts, "CHUNK_ENTRIES", 100)


def server(restore: Restore = NO_RESTORE, layout: JobLayout = LAYOUT) -> Store:
    store = Store(budget=BUDGETS[-1])
    MADE.append(store)
    store.become(HERE, Term(2))
    rules = UpdateRules(UpdateMode.ASYNC, 1)
    orders.create(store, CreateRequest(JOB, GENERATION, layout, OWNED, rules, restore))
    if restore == NO_RESTORE:
        orders.open_partitions(store, JOB, GENERATION)
    return store


def partitions(store: Store) -> list[Partition]:
    hosted = store.hosted()[0]
    return [hosted.partitions[number] for number in OWNED]


def train(store: Store, step: int, ids: np.ndarray = IDS) -> None:
    """An update of all tables, the same wherever it comes after the same ones."""
    where = partition_of(ids, len(OWNED))
    for partition in partitions(store):
        own = ids[where == partition.id]
        for name, table in partition.tables.items():
            gradients = np.random.default_rng((step, partition.id, len(name))).standard_normal(
                (own.size, table.settings.dim)
            )
            table.push(own, gradients.astype(np.float32), step, now_ms=max(table.state.now_ms, 70_000 * step))


def trained(steps: int = 1) -> Store:
    store = server()
    for step in range(1, steps + 1):
        train(store, step)
    return store


def rows(table: Table) -> dict[int, tuple[bytes | None, int, int]]:
    found = {}
    for chunk in table.cuts.items():
        for i, number in enumerate(chunk.ids.tolist()):
            row = chunk.records[i].tobytes() if i < len(chunk.records) else None
            found[number] = row, int(chunk.frequencies[i]), int(chunk.steps[i])
    return found


def contents(store: Store) -> list[object]:
    """All that tables are, as values that can be compared bit by bit."""
    return [
        (
            partition.id,
            name,
            table.state.updates,
            table.state.now_ms,
            table.rows,
            table.state.entries,
            rows(table),
            cells(table),
        )
        for partition in partitions(store)
        for name, table in partition.tables.items()
        for state in (table.state,)
    ]


def cells(table: Table) -> bytes | None:
    return None if table.state.filter is None else table.state.filter._cells.tobytes()


Entered = list[PartitionEntry]


def save(store: Store, folder: Path, number: int, base: int = 0, step: int | None = None) -> Entered:
    """What the manifest would say."""
    order = SaveRequest(number, step, base, 0)
    saved = orders.save(store, COORDINATOR, HERE, store.hosted()[0].generation, order, str(folder))
    return [entry_of(folder, each) for each in saved]


FORMER: dict[tuple[Path, PartitionId], PartitionEntry] = {}


def entry_of(folder: Path, saved: Saved) -> PartitionEntry:
    """The blocks that it lacks are in the one before."""
    if saved.file.blocks:
        found = PartitionEntry(saved.partition, saved.version, (saved.file,), saved.tables)
    else:
        former = FORMER[folder, saved.partition]
        found = former.incremental(saved.version, saved.file.file, (), saved.tables)
    FORMER[folder, saved.partition] = found
    return found


def entries(saved: Sequence[PartitionEntry], life: int = 2) -> tuple[PartitionEntry, ...]:
    return tuple(dataclasses.replace(each, version=each.version._replace(life=life)) for each in saved)


def restored(folder: Path, saved: Sequence[PartitionEntry], layout: JobLayout = LAYOUT) -> Store:
    return server(restore=Restore(str(folder), entries(saved)), layout=layout)


def go_back(store: Store, folder: Path, saved: Sequence[PartitionEntry]) -> None:
    rules = UpdateRules(UpdateMode.ASYNC, 1)
    orders.create(store, CreateRequest(JOB, NEXT, LAYOUT, OWNED, rules, Restore(str(folder), entries(saved))))


def new_files(saved: Sequence[PartitionEntry], number: int) -> list[FileRef]:
    return [file for each in saved for table in each.tables for file in table.files if file.number == number]


def increments(saved: Sequence[PartitionEntry]) -> list[int]:
    return [len(table.increments) for each in saved for table in each.tables]


def commit(library: CheckpointLibrary, store: Store, number: int, base: int = 0) -> Manifest:
    folder = Path(library.storage.url) / "job"
    found = save(store, folder, number, base=base)
    manifest = Manifest(
        number, "job", JOB, 3, {}, UpdateMode.ASYNC, 9, "2026-11-21T06:00:00+00:00", LAYOUT, tuple(found), {}
    )
    library.commit(manifest)
    return manifest


def chain(tmp_path: Path, links: int) -> tuple[CheckpointLibrary, Store]:
    library, store = CheckpointLibrary(LocalStorage(tmp_path)), server()
    for number in range(1, links + 1):
        train(store, number, IDS if number == 1 else IDS[number * 10 :][:10])
        commit(library, store, number, base=number - 1)
    return library, store
