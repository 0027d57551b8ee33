"""Tables of every kind in the yard of servers_with_logs, and pushes of their rows.

The fixtures `clock` and `yard` go with them.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from shardyard.codecs.rows.row_ids import encode_ids
from shardyard.codecs.rows.row_values import RowCode, encode_rows
from shardyard.domain.ids import PartitionId
from shardyard.domain.push_names import Source
from shardyard.domain.pushes import Outcome, PushedRows, PushHeader
from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_ids import partition_of
from shardyard.domain.tables.row_optimizers import make_group
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard.runtime import failpoints
from shardyard.runtime.clock import SystemClock
from shardyard_ps_server.hosting import admission, pushes
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.tables import disk_tier
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.tables.table import Table
from tests.support.servers_with_logs import (
    LAYOUT,
    OWNED,
    SGD,
    SHARD,
    Yard,
    order_of,
    payload_of,
    state,
    yard_of,
)

NORMAL = InitialValues(InitialKind.NORMAL, 0.5)
TABLES = (
    TableSettings("all", 3, "adagrad", seed=3, rows_max=1 << 12),
    TableSettings("drawn", 2, "ftrl", make_group("ftrl", {"lr": 0.3}), 4, NORMAL, 1 << 12,
                  AdmissionSettings(Admission.CHANCE, chance=0.5)),
    TableSettings("counted", 2, "sgd", SGD[0], 5, NORMAL, 1 << 12, AdmissionSettings(Admission.COUNT, 3)),
    TableSettings("estimated", 1, "adam", seed=6, rows_max=1 << 12,
                  admission=AdmissionSettings(Admission.ESTIMATE, 2, cells=64)),
    TableSettings("aging", 2, "adamw", seed=7, initial=NORMAL, rows_max=1 << 12, expiry=ExpirySettings(age_steps=2)),
    TableSettings("few", 2, "rowwise_adagrad", seed=8, rows_max=1 << 12,
                  admission=AdmissionSettings(Admission.COUNT, 2), expiry=ExpirySettings(rows_kept=5)),
    TableSettings("timed", 2, "sgd", SGD[0], 9, NORMAL, 1 << 12, expiry=ExpirySettings(age_ms=200)),
)  # fmt: skip
ROWS = dataclasses.replace(LAYOUT, tables=TABLES)
AGING, TIMED = 4, 6


class Ticks:
    """A clock that goes on whenever it is asked: what is not recorded of it is another time in a replay."""

    def __init__(self) -> None:
        self.ms = 5_000_000
        self._lock = threading.Lock()

    def now_ms(self, _: object = None) -> int:
        with self._lock:
            self.ms += 3
            return self.ms


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    made = Ticks()
    monkeypatch.setattr(SystemClock, "now_ms", made.now_ms)
    return made


@pytest.fixture(params=[False, True], ids=["in memory", "on disk"])
def yard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Yard]:
    monkeypatch.setattr(disk_tier, "ROWS_LEAST", 4)
    with yard_of(tmp_path, layout=ROWS) as made:
        made.budget = Budget(1, lambda: os.memfd_create("rows")) if request.param else None
        yield made


Entry = tuple[int, PartitionId, np.ndarray]
"""Table, partition, ids."""


def order_with(
    store: Store, order: PushHeader, entries: Sequence[Entry], *, seed: int = 0, counted: bool = False
) -> tuple[PushHeader, np.ndarray]:
    """The order with rows, in a code of its own for each seed, and their bytes."""
    rng = np.random.default_rng([order.name.first, seed])
    tables = store.hosted()[0].layout.tables
    said, data = [], b""
    code = list(RowCode)[(order.name.first + seed) % 3]
    for table in sorted({entry[0] for entry in entries}):
        mine = [entry for entry in entries if entry[0] == table]
        lengths = []
        for _, _, ids in mine:
            values = rng.standard_normal((ids.size, tables[table].dim)).astype(np.float32)
            pieces = bytes(encode_ids(ids)), bytes(encode_rows(values, code))
            counts = rng.integers(1, 3, ids.size).astype("<u2").tobytes() if counted else b""
            data += pieces[0] + counts + pieces[1]
            lengths.append(tuple(map(len, pieces)))
        said.append(
            PushedRows(
                table,
                tuple(entry[1] for entry in mine),
                tuple(entry[2].size for entry in mine),
                tuple(ids for ids, _ in lengths),
                tuple(rows for _, rows in lengths),
                counted,
            )
        )
    groups = tuple(table.group for table in tables)
    if order.name.first % 2:  # a schedule moves rates
        groups = tuple((group[0] * 0.5, *group[1:]) for group in groups)
    return dataclasses.replace(order, rows=tuple(said), table_groups=groups), np.frombuffer(data, np.uint8)


def some(store: Store, sequence: int, seed: int = 0, tables: int = len(TABLES)) -> list[Entry]:
    """Ids for all tables, fewer ones again and again."""
    rng = np.random.default_rng([sequence, seed, 1])
    found = []
    for table in range(tables):
        ids = np.unique(rng.zipf(1.3, 12).clip(max=40) * 1_000_003 - 7)
        owners = partition_of(ids, len(OWNED))
        found += [(table, p, ids[owners == p]) for p in sorted(store.hosted()[0].partitions) if (owners == p).any()]
    return found


def send(store: Store, order: PushHeader, rows: np.ndarray) -> set[Outcome]:
    admitted = admission.admit_push(store, order)
    return {result.outcome for result in pushes.push(store, admitted, order, payload_of(order), rows)}


def push_rows(
    store: Store, sequence: int, entries: Sequence[Entry] | None = None, *, seed: int = 0, source: Source = SHARD
) -> set[Outcome]:
    order = order_of(store, sequence, source=source)
    entries = some(store, sequence, seed) if entries is None else entries
    return send(store, *order_with(store, order, entries, seed=seed, counted=bool(sequence % 3)))


def contents(table: Table) -> dict[int, tuple[bytes, int, int]]:
    found = {}
    for chunk in table.cuts.items():
        for i, number in enumerate(chunk.ids.tolist()):
            row = chunk.records[i].tobytes() if i < len(chunk.records) else b""
            found[number] = row, int(chunk.frequencies[i]), int(chunk.steps[i])
    return found


def everything(store: Store) -> object:
    """All that partitions are, rows with their optimizer state, counts, filters and ages."""
    tables = [
        (number, name, table.state.updates, table.rows, table.state.entries, contents(table), filter_of(table))
        for number, each in sorted(store.hosted()[0].partitions.items())
        for name, table in each.tables.items()
    ]
    return state(store), tables


def filter_of(table: Table) -> bytes:
    return b"" if table.state.filter is None else table.state.filter._cells.tobytes()


def table_of(store: Store, table: int, partition: int = 0) -> Table:
    return store.hosted()[0].partitions[OWNED[partition]].tables[ROWS.tables[table].name]


def ids_of(partition: int, count: int, begin: int = 0) -> np.ndarray:
    ids = np.arange(1_000, dtype=np.int64)
    return ids[partition_of(ids, len(OWNED)) == partition][begin : begin + count]


def hold(first: Store, name: str, work: Callable[[], object], meanwhile: Callable[[], object]) -> None:
    """Does `meanwhile` while `work` is at that failpoint."""
    there, go = threading.Event(), threading.Event()

    def wait(_: str) -> None:
        there.set()
        assert go.wait(30)

    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    with failpoints.armed(name, wait):
        thread = threading.Thread(target=guarded)
        thread.start()
        assert there.wait(30)
    try:
        meanwhile()
    finally:
        go.set()
        thread.join()
    assert not errors, errors


def timed(rows: Sequence[PushedRows]) -> tuple[PushedRows, ...]:
    """As a record has them."""
    return tuple(
        dataclasses.replace(each, now_ms=(7,) * len(each.partitions)) if each.table == TIMED else each for each in rows
    )
