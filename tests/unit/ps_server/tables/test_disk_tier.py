"""Rows that memory has no room for: they lie in a file, come back when they are pushed, and nobody can tell, not when
the disk is full either; a disk that is waited for keeps nobody else waiting."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.domain.errors import StorageUnavailable, TableFull
from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_optimizers import make_group
from shardyard.domain.tables.table_settings import ExpirySettings, TableSettings
from shardyard.runtime.clock import SystemClock
from shardyard_ps_server.rows.partition_tables import PartitionTables
from shardyard_ps_server.tables import cold_file, disk_tier, new_memory, stripes
from shardyard_ps_server.tables import table as table_module
from shardyard_ps_server.tables.loops import moves, walks
from shardyard_ps_server.tables.memory import heap
from shardyard_ps_server.tables.memory.budget import UNLIMITED, Budget, budget_in
from shardyard_ps_server.tables.table import Table
from tests.support import rows_in_steps as steps_of
from tests.support.disk_tiers import DIM, ROWS, few_rows, gradients, in_memory, make, many, settled, slots_in_use

__all__ = ["few_rows"]

ROW_BYTES = 2 * 4 * DIM
_SEAL_FUTURE_WRITE = 0x10


def look(table: Table, ids: np.ndarray) -> np.ndarray:
    out = np.full((ids.size, DIM), np.nan, np.float32)
    table.look_up(ids, out)
    return out


def test_rows_are_counted_right_while_the_limit_of_memory_moves() -> None:
    """A checkpoint has the number, and is damaged where it has other rows."""
    table, ids = make(Budget(UNLIMITED, in_memory)), many(ROWS)
    table.push(ids, gradients(ids.size), 1)
    table.remove(ids[::2])
    stop = threading.Event()

    def move() -> None:
        for limit in itertools.cycle((ROWS, ROWS // 4)):
            heap.set_limit(table.state.memory, limit)
            if stop.is_set():
                return

    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(move)
        seen = {table.rows for _ in range(20_000)}
        stop.set()
        moving.result(30)
    assert seen == {ids.size - ids[::2].size}


@pytest.mark.parametrize("seed", range(3))
def test_memory_stays_at_its_bound_while_the_index_grows_and_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Rows leave before the index needs their room, and its stripes, all of a size, do not grow with the same push:
    not by luck, whatever the seed by which ids are hashed."""
    seeds = np.random.default_rng(seed)
    monkeypatch.setattr(new_memory.os, "urandom", seeds.bytes)
    monkeypatch.setattr(stripes, "PARALLEL_STRIPES", 4)
    bound, piece, ids = 32 << 20, 1 << 14, np.random.default_rng(0).permutation(1 << 20)
    table = make(budget_in(tmp_path, bound))
    taken, counts = [], set()
    for begin in range(0, ids.size, piece):
        table.load(ids[begin : begin + piece], np.zeros((piece, DIM), np.float32))
        taken.append(table.use().nbytes)
        counts.add(table.state.stripes.count)
    assert max(counts) >= 6
    assert table.rows == ids.size
    assert 0.9 * bound < taken[-1]
    assert max(taken) < 1.05 * bound
    assert table.state.stripes.nbytes < 27 * ids.size
    assert table.state.stripes.nbytes == sum(room.nbytes for room in table.state.stripes._rooms)


def contents(table: Table) -> dict[int, tuple[bytes, int, int]]:
    return {
        number: (chunk.records[i].tobytes(), int(chunk.frequencies[i]), int(chunk.steps[i]))
        for chunk in table.cuts.items()
        for i, number in enumerate(chunk.ids.tolist())
    }


def train(table: Table, ids: np.ndarray, steps: int = 30, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        batch = np.unique(rng.choice(ids, 2_000))
        table.push(batch, gradients(batch.size, step), table.state.updates + 1)


# ---- where rows are


def test_rows_beyond_the_bound_lie_in_a_file_and_are_the_rows_that_they_were(tmp_path: Path) -> None:
    bounded, plain = make(budget_in(tmp_path, 400_000)), make(None)
    ids = many(ROWS)
    for table in (bounded, plain):
        table.push(ids, gradients(ids.size), 1)
        train(table, ids)
    settled(bounded, plain)
    assert bounded.rows == plain.rows == ids.size
    assert bounded.use().cold_rows > 0.8 * ids.size
    assert bounded.use().disk_bytes >= bounded.use().cold_rows * ROW_BYTES
    assert (plain.use().cold_rows, plain.use().disk_bytes) == (0, 0)
    assert look(bounded, ids).tobytes() == look(plain, ids).tobytes()
    assert contents(bounded) == contents(plain)


def test_a_table_that_fits_has_no_file(tmp_path: Path) -> None:
    budget = budget_in(tmp_path, 100 << 20)
    assert budget is not None
    opened: list[int] = []
    table = make(Budget(budget.bytes_max, lambda: opened.append(0) or in_memory()))  # type: ignore[func-returns-value]
    ids = many(ROWS)
    table.push(ids, gradients(ids.size), 1)
    assert (table.use().cold_rows, table.use().disk_bytes, opened) == (0, 0, [])


def test_memory_stays_within_the_bound_while_the_index_grows() -> None:
    bytes_max, dim = 6 << 20, 32
    group = make_group("adagrad", {"lr": 0.1})
    table = Table(TableSettings("t", dim, "adagrad", group, 1, rows_max=1 << 20), Budget(bytes_max, in_memory))
    ids = np.random.default_rng(1).permutation(many(60_000))
    for step, begin in enumerate(range(0, ids.size, 500), 1):
        batch = ids[begin : begin + 500]
        table.push(batch, np.zeros((batch.size, dim), np.float32), step)
        # a limit falls in steps, and the rows behind it leave over some pushes
        assert table.use().nbytes < 1.2 * bytes_max
    settled(table)
    assert table.use().nbytes <= bytes_max
    assert table.rows == ids.size
    index = table.state.stripes.nbytes
    assert table.use().nbytes - index > 0.8 * (bytes_max - index)


def is_cold(table: Table, ids: np.ndarray) -> np.ndarray:
    return np.array([moves.bring(table.state.memory, np.array([each])) > 0 for each in ids.tolist()])


def test_what_is_pushed_comes_into_memory_and_what_was_pushed_longest_ago_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk_tier, "ROWS_LEAST", 2_000)
    table = make(Budget(1, in_memory))
    ids = np.random.default_rng(2).permutation(many(ROWS))
    table.push(ids, gradients(ids.size), 1)
    hot, others = ids[:1_000], ids[1_000:15_000]
    for step, part in enumerate(np.array_split(others, 70), 2):
        batch = np.concatenate([hot, part])
        table.push(batch, gradients(batch.size), step)
    settled(table)
    assert table.rows - table.use().cold_rows <= 2_000
    assert is_cold(table, hot).mean() < 0.02
    assert is_cold(table, others[:10_000]).mean() > 0.98
    assert is_cold(table, ids[15_000:]).all()


def test_a_bound_that_is_raised_lets_rows_come_back_and_one_that_falls_gives_memory_back() -> None:
    budget = Budget(1 << 30, in_memory)
    table, plain = make(budget), make(None)
    ids = many(ROWS)
    for each in (table, plain):
        each.push(ids, gradients(ids.size), 1)
    whole = table.use().nbytes
    budget.bytes_max = table.state.stripes.nbytes + 100_000
    settled(table)
    assert table.use().nbytes <= budget.bytes_max < whole
    budget.bytes_max = 1 << 30
    for each in (table, plain):
        each.push(ids, gradients(ids.size, 1), 2)
    assert table.use().cold_rows == 0
    assert contents(table) == contents(plain)


def expire(table: Table, step: int) -> np.ndarray:
    gone = table.expiry.expiring(step, 1 << 20).ids
    table.remove_expired(gone)
    return gone


def test_a_table_that_may_lie_in_a_file_is_full_at_its_bound_too() -> None:
    group = make_group("sgd", {"lr": 1.0})
    table = Table(TableSettings("t", DIM, "sgd", group, rows_max=1_000), Budget(1, in_memory))
    ids = many(1_200)[:1_001]
    table.push(ids[:1_000], gradients(1_000), 1)
    settled(table)
    before = contents(table)
    with pytest.raises(TableFull):
        table.push(ids, gradients(1_001), 300)
    assert contents(table) == before
    table.remove(ids[:1])
    table.push(ids[1:], gradients(1_000), 301)
    assert table.rows == 1_000


def test_a_step_that_has_room_by_its_settings_alone_is_refused_before_it_changes_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table that may lie in a file has fewer row numbers."""
    monkeypatch.setattr(table_module, "COLD_ROWS_MAX", 5)
    partition = steps_of.partition_of(2, budget=Budget(1, in_memory))
    steps_of.push(partition, 0, 0, steps_of.work(dict.fromkeys(range(4), 1.0)))
    with pytest.raises(TableFull, match="at most 5 are kept"):
        steps_of.push(partition, 1, 0, steps_of.work(dict.fromkeys(range(3, 7), 1.0)))
    assert partition.torn is None
    steps_of.push(partition, 1, 0, steps_of.work({4: 1.0}))
    assert partition.tables["wide"].rows == 5


def test_rows_that_await_their_turn_behind_a_log_are_many_where_row_numbers_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_module, "COLD_ROWS_MAX", 5)
    tables = PartitionTables(steps_of.LAYOUT, SystemClock(), recorded=True, budget=Budget(1, in_memory))
    few = steps_of.work(dict.fromkeys(range(3), 1.0)).rows
    assert not tables.is_close(few)
    tables.begin_logged(few, 1)
    assert tables.is_close(few)


# ---- who waits


@pytest.mark.parametrize("slow", ["bring", "write"])
def test_who_waits_for_the_disk_keeps_nobody_else_waiting(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    table = make(Budget(300_000, in_memory))
    ids = many(ROWS)
    table.push(ids, gradients(ids.size), 1)
    settled(table)
    hot = ids[~is_cold(table, ids)][:50]
    frozen = ids[is_cold(table, ids)]
    begun, free = threading.Event(), threading.Event()
    quick = getattr(moves, slow)

    def waits(*given: Any) -> Any:
        if threading.current_thread() is waiter:
            begun.set()
            assert free.wait(60)
        return quick(*given)

    monkeypatch.setattr(moves, slow, waits)
    waiter = threading.Thread(target=lambda: table.push(frozen, gradients(frozen.size), 300))
    waiter.start()
    assert begun.wait(60)
    done, seen = threading.Event(), list[np.ndarray]()

    def others() -> None:
        before = look(table, hot)
        table.push(hot, gradients(hot.size), 301)
        after = look(table, hot)
        assert (after != before).any()
        seen.append(after)
        assert sum(chunk.ids.size for chunk in table.cuts.items()) == ids.size
        table.remove(hot[:1])
        expire(table, 302)
        done.set()

    beside = threading.Thread(target=others)
    beside.start()
    beside.join(60)
    went_on = done.is_set()
    free.set()
    waiter.join(60)
    assert went_on
    assert table.rows == ids.size - 1
    assert (look(table, hot[1:]) == seen[0][1:]).all()
    assert slots_in_use(table) == table.use().cold_rows


def test_a_walk_reads_pages_of_the_file_before_it_takes_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make(Budget(1, in_memory), expiry=ExpirySettings(norm_min=1e-3))
    ids = many(5_000)
    table.push(ids, gradients(ids.size), 1)
    settled(table)
    done: list[tuple[str, int]] = []

    def noting(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(memory: Any, cursor: np.uint64, *given: Any, **named: Any) -> Any:
            done.append((what, int(cursor)))
            return function(memory, cursor, *given, **named)

        return note

    monkeypatch.setattr(moves, "bring_window", noting("bring", moves.bring_window))
    for name in ("copy_some", "expire_some"):
        monkeypatch.setattr(walks, name, noting("walk", getattr(walks, name)))
    for steps in (lambda: list(table.cuts.items()), lambda: table.expiry.expiring(300, 1 << 20)):
        done.clear()
        steps()
        assert len(done) > 8
        assert done[::2] == [("bring", cursor) for _, cursor in done[1::2]]
        assert done[1::2] == [("walk", cursor) for _, cursor in done[::2]]


def test_two_threads_push_while_a_third_reads_rows_that_move() -> None:
    group = make_group("sgd", {"lr": 1.0})
    initial = InitialValues(InitialKind.ZEROS)
    table = Table(TableSettings("t", 16, "sgd", group, 1, initial, 1 << 16), Budget(1, in_memory))
    halves = np.array_split(np.random.default_rng(3).permutation(many(4_000)), 2)
    stop = threading.Event()
    torn: list[np.ndarray] = []
    pushes = 40

    def push(ids: np.ndarray) -> None:
        for step in range(1, pushes + 1):
            for part in np.array_split(ids, 5):
                table.push(part, np.full((part.size, 16), -1, np.float32), step)

    def read() -> None:
        rng = np.random.default_rng(4)
        ids = np.concatenate(halves)
        while not stop.is_set():
            asked = rng.choice(ids, 700)
            out = np.full((asked.size, 16), np.nan, np.float32)
            table.look_up(asked, out)
            wrong = (out != out[:, :1]).any(axis=1) | (out[:, 0] < 0) | (out[:, 0] > pushes)
            if wrong.any():
                torn.append(out[wrong])

    reader = threading.Thread(target=read)
    reader.start()
    writers = [threading.Thread(target=push, args=(half,)) for half in halves]
    for each in writers:
        each.start()
    for each in writers:
        each.join(120)
    stop.set()
    reader.join(60)
    assert not torn
    assert slots_in_use(table) == table.use().cold_rows
    assert table.use().cold_rows > 0
    for half in halves:
        out = np.empty((half.size, 16), np.float32)
        table.look_up(half, out)
        assert (out == pushes).all()


# ---- a disk that refuses


def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cold_file.os, "posix_fallocate", full)


def test_a_full_disk_is_told_and_rows_stay_in_memory_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bounded, plain = make(budget_in(tmp_path, 400_000)), make(None)
    ids = many(ROWS)
    monkeypatch.setattr(cold_file, "PIECE_BYTES_LEAST", 0)
    first, second = ids[:10_000], ids[10_000:]
    for table in (bounded, plain):
        table.push(first, gradients(first.size), 1)
    settled(bounded, plain)
    assert bounded.use().cold_rows > 0
    assert bounded.use().disk_refused == ""
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "shardyard.server"):
        refusing(patch)
        patch.setattr(cold_file, "REFUSED_TURNS_MAX", 3)
        for table in (bounded, plain):
            for step in range(2, 8):
                table.push(second, gradients(second.size, step), step)
                train(table, ids, 5, step)
        assert bounded.use().disk_refused == os.strerror(errno.ENOSPC)
        assert bounded.use().nbytes > 400_000
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "the disk refuses them (No space left on device)" in caplog.text
        assert contents(bounded) == contents(plain)
    settled(bounded, plain)
    assert bounded.use().disk_refused == ""
    assert bounded.rows - bounded.use().cold_rows < 2_000
    assert contents(bounded) == contents(plain)


def test_a_file_that_cannot_be_opened_is_told_and_rows_stay_in_memory() -> None:
    def none_left() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    bounded, plain = make(Budget(1, none_left)), make(None)
    ids = many(ROWS)
    for table in (bounded, plain):
        table.push(ids, gradients(ids.size), 1)
        train(table, ids)
    assert bounded.use().disk_refused == os.strerror(errno.EMFILE)
    assert bounded.use().cold_rows == 0
    assert contents(bounded) == contents(plain)


def test_a_disk_that_refuses_is_asked_once_with_a_push() -> None:
    asked = 0

    def none_left() -> int:
        nonlocal asked
        asked += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    bounded = make(Budget(1, none_left))
    ids = many(2_000)
    turns = []
    for step in range(1, 20):
        before = asked
        bounded.push(ids, gradients(ids.size), step)
        turns.append(asked - before)
    # twice as many turns, and one more, pass without a question after each
    assert turns == [0, 1, 0, 1, *[0] * 3, 1, *[0] * 7, 1, *[0] * 3]


def test_a_write_that_is_refused_leaves_rows_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[int] = []

    def sealable() -> int:
        files.append(os.memfd_create("rows", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC))
        return files[-1]

    bounded, plain = make(Budget(1, sealable)), make(None)
    ids = many(5_000)
    for table in (bounded, plain):
        table.push(ids, gradients(ids.size), 1)
    settled(bounded, plain)
    assert bounded.use().cold_rows > 4_000
    fcntl.fcntl(files[0], fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)  # the kernel refuses pwrite from here on
    for table in (bounded, plain):
        train(table, ids)
    assert bounded.use().disk_refused == os.strerror(errno.EPERM)
    assert contents(bounded) == contents(plain)


def test_a_folder_that_takes_no_file_is_refused_before_a_server_serves(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageUnavailable, match="no file for rows of tables in") as caught:
        budget_in(tmp_path / "file", 1 << 20)
    assert "yard.cold" in str(caught.value)
    assert budget_in(tmp_path / "file", 0) is None
