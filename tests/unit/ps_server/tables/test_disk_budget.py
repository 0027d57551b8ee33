"""The disk tier of a table: nothing is left of it, and its memory stays within a budget, also in a job."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardyard as sy
from shardyard_ps_server.rows.partition_tables import warm
from shardyard_ps_server.tables import cold_file, disk_tier
from shardyard_ps_server.tables.memory import budget as budgets
from shardyard_ps_server.tables.memory.budget import UNLIMITED, Budget, budget_in, open_unnamed
from tests.support import rows_in_steps as steps_of
from tests.support.disk_tiers import (
    ROWS,
    few_rows,
    gradients,
    in_memory,
    make,
    many,
    settled,
    slots_in_use,
)

__all__ = ["few_rows"]

# ---- nothing is left


def open_files() -> set[str]:
    found = set()
    for each in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{each}"))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("unnamed", [True, False])
def test_the_file_has_no_name_and_goes_with_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unnamed: bool
) -> None:
    opened = os.open

    def without(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return opened(path, flags, *more, **named)

    if not unnamed:
        monkeypatch.setattr(budgets.os, "open", without)
    table = make(budget_in(tmp_path, 1))
    ids = many(ROWS)
    table.push(ids, gradients(ids.size), 1)
    settled(table)
    assert table.use().cold_rows > 0
    assert any(str(tmp_path) in each for each in open_files())
    assert list(tmp_path.iterdir()) == []
    del table
    gc.collect()
    assert not any(str(tmp_path) in each for each in open_files())


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    script = """
import sys, time
from pathlib import Path
import numpy as np
from shardyard.domain.tables.table_settings import TableSettings
from shardyard_ps_server.tables.memory.budget import budget_in
from shardyard_ps_server.tables.table import Table
table = Table(TableSettings("t", 4, rows_max=1 << 20), budget_in(Path(sys.argv[1]), 1))
table.push(np.arange(20_000), np.ones((20_000, 4), np.float32), 1)
for step in range(2, 20):
    table.push(np.arange(10), np.ones((10, 4), np.float32), step)
print(table.use().cold_rows, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert int(found) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_server_without_memory_to_move_rows_leaves_them_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = steps_of.partition_of(1, budget=Budget(1, in_memory))
    monkeypatch.setattr(disk_tier, "ROWS_LEAST", 2)
    everything = steps_of.work(dict.fromkeys(range(steps_of.IDS.size), 1.0))
    steps_of.push(partition, 0, 0, everything)
    table = partition.tables["wide"]

    def none_left(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as short:
        short.setattr(cold_file.ColdFile, "write", none_left)
        for step in range(1, 5):
            steps_of.push(partition, 0, step, everything)
    assert partition.torn is None
    assert (table.use().cold_rows, slots_in_use(table)) == (0, 0)
    steps_of.push(partition, 0, 5, steps_of.work({0: 1.0}))
    assert table.use().cold_rows == slots_in_use(table) > 0
    assert partition.describe()[0].number == 6


# ---- the budget


class Someone:
    def shrink(self) -> None:
        raise AssertionError("not asked")


def limit(budget: Budget, member: Someone, rows: int, index_bytes: int = 0) -> int:
    return budget.limit_of(member, index_bytes=index_bytes, rows=rows, record_bytes=10)


def test_tables_share_by_their_rows_what_the_indexes_leave() -> None:
    budget = Budget(1_000, in_memory)
    one, two = Someone(), Someone()
    budget.join(one)
    budget.join(two)
    assert limit(budget, one, 60) == UNLIMITED
    assert limit(budget, two, 40) == UNLIMITED
    assert limit(budget, two, 140) == 70
    assert limit(budget, one, 60) == 30
    assert limit(budget, one, 60, index_bytes=500) == 15
    assert limit(budget, one, 60, index_bytes=1_500) == 0
    del two
    gc.collect()
    assert limit(budget, one, 60) == UNLIMITED
    assert budget.next_to_shrink(one) is None


def test_a_table_that_nobody_pushes_makes_room_for_others() -> None:
    budget = Budget(2 << 20, in_memory)
    idle, busy = make(budget), make(budget)
    ids = many(60_000)
    idle.push(ids[:20_000], gradients(20_000), 1)
    whole = idle.use().nbytes
    assert idle.use().cold_rows == 0
    for step, begin in enumerate(range(20_000, ids.size, 500), 1):
        batch = ids[begin : begin + 500]
        busy.push(batch, gradients(batch.size), step)
    assert idle.use().cold_rows > 0
    assert idle.use().nbytes < whole
    assert idle.use().nbytes + busy.use().nbytes < 1.1 * (2 << 20)


def test_an_unnamed_file_is_private(tmp_path: Path) -> None:
    file = open_unnamed(tmp_path)
    try:
        assert os.fstat(file).st_mode & 0o777 == 0o600
        assert not os.get_inheritable(file)
    finally:
        os.close(file)


# ---- in a job


def trained(settings: dict[str, object]) -> tuple[dict[str, torch.Tensor], int]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    with sy.connect(settings={"log.level": "error", "job.consistency.mode": "sync", **settings}) as job:
        model = torch.nn.ModuleDict({"words": sy.Embedding(8), "top": torch.nn.Linear(8, 1)})
        model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters()))
        for _ in range(40):
            ids = torch.randint(3_000, (300,), generator=generator)
            optimizer.zero_grad()
            model["top"](model["words"](ids)).square().mean().backward()
            optimizer.step()
        return model.state_dict(), len(model["words"].table)


@pytest.fixture
def spilled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """How many rows have gone to files."""
    warm()  # which writes rows too
    written = [0]
    write = cold_file.ColdFile.write

    def counting(self: cold_file.ColdFile, slots: np.ndarray, records: np.ndarray) -> int:
        done = write(self, slots, records)
        written[0] += done
        return done

    monkeypatch.setattr(cold_file.ColdFile, "write", counting)
    return lambda: written[0]


def test_a_job_trains_to_the_same_bits_with_rows_in_files(tmp_path: Path, spilled: Callable[[], int]) -> None:
    plain, rows = trained({})
    assert spilled() == 0
    bounded, rows_bounded = trained({"yard.memory_bytes_max": 1, "yard.cold": str(tmp_path)})
    assert spilled() > 1_000
    assert rows == rows_bounded > 2_000
    assert plain.keys() == bounded.keys()
    assert all(torch.equal(plain[name], bounded[name]) for name in plain)
    assert list(tmp_path.iterdir()) == []
