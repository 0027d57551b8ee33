"""The rows that a worker keeps, against a plain dictionary: how old they may be, and what they lack of its own pushes.

A row's value is (what others have pushed, what this worker has pushed), so a lack of either shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.domain.tables.row_optimizers import make_group
from shardyard.domain.tables.row_rules import rule_of
from shardyard.domain.tables.table_settings import TableSettings
from shardyard_ps_server.tables.table import Table
from shardyard_worker.rows.frequency_cache import INDEX_BYTES
from shardyard_worker.rows.row_cache import CacheRules, RowCache

DIM, TABLES = 2, 2
ROW_BYTES = 4 * DIM + INDEX_BYTES
IDS = st.lists(st.one_of(st.integers(-4, 9), st.sampled_from([-(2**63), 2**63 - 1])), max_size=8, unique=True)
DOES = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(0, 1), IDS),
        st.tuples(st.just("push"), st.integers(0, 1), IDS),
        st.tuples(st.just("others push"), st.integers(0, 1), IDS),
        st.tuples(st.just("step"), st.just(0), st.just([])),
        st.tuples(st.just("clear"), st.just(0), st.just([])),
    ),
    max_size=60,
)
Row = tuple[int, int]


@dataclass
class Servers:
    """What each row is, and was at the end of each step; of this worker's pushes the last may be missing."""

    theirs: dict[Row, int] = field(default_factory=dict)
    own: dict[Row, list[int]] = field(default_factory=dict)
    """The steps of this worker's pushes of each."""

    def read(self, row: Row, below: int) -> tuple[float, float]:
        """With this worker's pushes of the steps below that."""
        return float(self.theirs.get(row, 0)), float(sum(step < below for step in self.own.get(row, ())))


@settings(max_examples=300, deadline=None)
@given(DOES, st.integers(1, 3), st.integers(0, 1), st.booleans(), st.booleans(), st.integers(1, 40))
def test_a_row_is_young_enough_and_has_all_that_this_worker_has_pushed(
    does: list[tuple[str, int, list[int]]], staleness: int, under_way: int, includes: bool, known: bool, room: int
) -> None:
    cache = RowCache(CacheRules(room * ROW_BYTES, staleness, includes, under_way))
    servers, step, expected_hits = Servers(), 0, 0
    read: dict[Row, tuple[int, float, float]] = {}
    """When a row was read last, and what it was then, of what it would be now where changes are known."""
    rule = rule_of("sgd", make_group("sgd", {"lr": 1.0}), 1) if known else None
    for what, table, chosen in does:
        ids = np.array(chosen, np.int64)
        if what == "read":
            out = np.full((ids.size, DIM), np.nan, np.float32)
            lacks = cache.take(table, ids, out, step)
            missing = np.zeros(ids.size, np.bool_) if lacks is None else lacks
            for number, row, lacking in zip(chosen, out.tolist(), missing, strict=True):
                if lacking:
                    continue
                expected_hits += 1
                at, theirs, own = read[table, number]
                assert step - at <= staleness
                assert row == [theirs, own]
                if includes:
                    assert own >= servers.read((table, number), step - under_way)[1]
            fresh = [servers.read((table, int(number)), step - under_way) for number in ids[missing]]
            cache.put(table, ids[missing], np.array(fresh, np.float32).reshape(-1, DIM), step, since=step - under_way)
            for number, (theirs, own) in zip(ids[missing].tolist(), fresh, strict=True):
                row_id = (table, number)
                if includes and any(pushed >= step - under_way for pushed in servers.own.get(row_id, ())):
                    read.pop(row_id, None)
                else:
                    read[row_id] = step, theirs, own
        elif what == "push" and ids.size:
            pushed = [number for number in chosen if step not in servers.own.get((table, number), ())]
            ids = np.array(pushed, np.int64)
            # rows fall by their gradient: the worker's own count grows
            cache.pushed(table, ids, np.tile(np.array([0, -1], np.float32), (ids.size, 1)), rule)
            for number in pushed:
                row_id = (table, number)
                servers.own.setdefault(row_id, []).append(step)
                if includes and row_id in read:
                    if known:
                        at, theirs, own = read[row_id]
                        read[row_id] = at, theirs, own + 1
                    else:
                        del read[row_id]
        elif what == "others push":
            for number in chosen:
                servers.theirs[table, number] = servers.theirs.get((table, number), 0) + 1
        elif what == "step":
            step += 1
            cache.begin(step)
        elif what == "clear":
            cache.clear()
            read = {}
        assert cache.nbytes <= room * ROW_BYTES
    assert cache.counts.hits == expected_hits
    assert cache.counts.age <= staleness


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_row_is_given_for_so_many_steps_after_its_own_and_then_read_anew(staleness: int) -> None:
    cache, ids, out = RowCache(CacheRules(1 << 20, staleness)), np.array([3], np.int64), np.empty((1, DIM), np.float32)
    cache.put(0, ids, np.zeros((1, DIM), np.float32), 0, since=0)
    for step in range(staleness + 1):
        cache.begin(step)
        assert cache.take(0, ids, out, step) is None
    assert (cache.counts.hits, cache.counts.misses, cache.counts.age) == (staleness + 1, 0, staleness)
    assert cache.take(0, ids, out, staleness + 1) is not None
    assert cache.counts.misses == 1


@pytest.mark.parametrize("seed", [0, 3])
def test_what_is_read_again_and_again_is_here_and_the_rest_goes(seed: int) -> None:
    """Under a bound on bytes: 10 rows of a thousand are asked for with each step, then 10 others."""
    cache = RowCache(CacheRules(40 * ROW_BYTES, 1_000))
    random, found = np.random.default_rng(seed), 0
    for step in range(200):
        hot = np.arange(10, dtype=np.int64) + (2_000 if step < 100 else 1_000)
        cache.begin(step)
        ids = np.concatenate([hot, random.choice(990, 10, replace=False)])
        out = np.empty((ids.size, DIM), np.float32)
        lacks = cache.take(0, ids, out, step)
        missing = np.zeros(ids.size, np.bool_) if lacks is None else lacks
        found += int((~missing[:10]).sum())
        cache.put(0, ids[missing], np.zeros((int(missing.sum()), DIM), np.float32), step, since=step)
    assert found >= 10 * 180
    assert 20 * ROW_BYTES < cache.nbytes <= 40 * ROW_BYTES


def test_room_goes_to_the_rows_that_are_asked_for_most_for_their_bytes() -> None:
    """Of two tables: rows of a large one make way for as many asks of small ones."""
    large = 4 * 100 + INDEX_BYTES
    cache = RowCache(CacheRules(20 * large, 10))
    for _ in range(8):
        for table, dim in (0, 100), (1, 1):
            ids = np.arange(10, dtype=np.int64)
            lacks = cache.take(table, ids, np.empty((10, dim), np.float32), 0)
            if lacks is not None:
                cache.put(table, ids, np.zeros((10, dim), np.float32), 0, since=0)
    for begin in 100, 110:  # asked for once
        cache.put(0, np.arange(begin, begin + 10), np.zeros((10, 100), np.float32), 0, since=0)
    assert cache.take(1, np.arange(10), np.empty((10, 1), np.float32), 0) is None
    assert len(cache) < 30


def test_a_row_that_came_late_does_not_take_the_place_of_a_newer_one() -> None:
    cache, ids = RowCache(CacheRules(1 << 20, 5)), np.array([3], np.int64)
    cache.put(0, ids, np.full((1, DIM), 7, np.float32), 4, since=4)
    cache.put(0, ids, np.full((1, DIM), 6, np.float32), 2, since=2)
    out = np.empty((1, DIM), np.float32)
    cache.begin(5)
    assert cache.take(0, ids, out, 5) is None
    assert out.tolist() == [[7, 7]]
    assert cache.counts.age == 1


def test_a_step_back_begins_anew() -> None:
    cache, ids = RowCache(CacheRules(1 << 20, 5)), np.array([3], np.int64)
    cache.begin(9)
    cache.put(0, ids, np.zeros((1, DIM), np.float32), 9, since=9)
    cache.begin(7)
    assert cache.take(0, ids, np.empty((1, DIM), np.float32), 7) is not None
    assert cache.cleared == 1


@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_a_change_that_is_known_has_the_bits_of_the_servers(decay: float) -> None:
    group = make_group("sgd", {"lr": 0.37, "weight_decay": decay})
    random = np.random.default_rng(5)
    ids = np.arange(50, dtype=np.int64)
    rows, gradients = random.standard_normal((2, 50, 7)).astype(np.float32)
    table = Table(TableSettings("t", 7, "sgd", group, rows_max=1_000))
    table.load(ids, rows)
    table.push(ids, gradients, 1, group=group)
    there = np.empty((50, 7), np.float32)
    table.look_up(ids, there)
    cache = RowCache(CacheRules(1 << 20, 5))
    cache.put(0, ids, rows, 0, since=0)
    cache.pushed(0, ids, gradients, rule_of("sgd", group, 1))
    out = np.empty((50, 7), np.float32)
    assert cache.take(0, ids, out, 0) is None
    assert out.tobytes() == there.tobytes()
