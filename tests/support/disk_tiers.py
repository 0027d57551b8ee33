"""Tables with a disk tier, and their rows. The fixture `few_rows` goes with them."""

from __future__ import annotations

import os

import numpy as np
import pytest

from shardyard.domain.tables.row_optimizers import make_group
from shardyard.domain.tables.table_settings import TableSettings
from shardyard_ps_server.tables import disk_tier
from shardyard_ps_server.tables.memory import layout
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.tables.table import Table

DIM = 4
ROWS = 20_000
LEAST = 64


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "ROWS_LEAST", LEAST)


def in_memory() -> int:
    return os.memfd_create("rows")


def make(budget: Budget | None, **more: object) -> Table:
    group = make_group("adagrad", {"lr": 0.1})
    settings = TableSettings("t", DIM, "adagrad", group, 1, rows_max=1 << 20, **more)  # type: ignore[arg-type]
    return Table(settings, budget)


def many(n: int, seed: int = 0) -> np.ndarray:
    return np.unique(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, n))


def gradients(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, DIM)).astype(np.float32)


def slots_in_use(table: Table) -> int:
    shared = table.state.memory.shared
    return int(shared[layout.NEXT_SLOT] - shared[layout.SLOTS_FREE])


def settled(*tables: Table) -> None:
    """A little of what is too much leaves with each push."""
    for table in tables * 200:
        table.count(np.empty(0, np.int64), None, table.state.updates + 1)
