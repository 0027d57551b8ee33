"""Tables against a dictionary: any sequence of what a table can be asked, bit by bit, with stripes and chunks so small
that they grow, split and end all the time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_optimizers import make_group
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard_ps_server.tables import cold_file, cuts, disk_tier, expiry, stripes
from shardyard_ps_server.tables.cuts import Chunk
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.tables.table import Table
from tests.support.plain_table import Entry, PlainTable

EDGES = [0, 1, -1, 2**63 - 1, -(2**63)]
IDS = st.one_of(st.integers(-300, 300), st.sampled_from(EDGES), st.integers(-(2**63), 2**63 - 1))
RULES = [
    ("sgd", {"lr": 0.1}),
    ("sgd", {"lr": 0.1, "weight_decay": 0.05, "maximize": 1.0}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": 1.0, "weight_decay": 0.05}),
    ("adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1, "lr_decay": 0.01, "weight_decay": 0.02}),
    ("rowwise_adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1, "weight_decay": 0.02}),
    ("adam", {"lr": 0.1, "weight_decay": 0.02}),
    ("adam", {"lr": 0.1, "beta1": 0.3, "amsgrad": 1.0}),
    ("adamw", {"lr": 0.1}),
    ("sparse_adam", {"lr": 0.1, "eps": 1e-3}),
    ("ftrl", {"lr": 0.1, "l1": 0.01, "l2": 0.1}),
]


@st.composite
def table_settings(draw: st.DrawFn) -> TableSettings:
    kind, given_settings = draw(st.sampled_from(RULES))
    admission = draw(
        st.one_of(
            st.builds(AdmissionSettings, zeros=st.booleans()),
            st.builds(AdmissionSettings, st.just(Admission.COUNT), st.integers(1, 5), zeros=st.booleans()),
        )
    )
    # ages in steps, or in time; units of one, and of several
    of_steps = st.builds(
        ExpirySettings,
        age_steps=st.sampled_from([0, 12, 100_000]),
        frequency_min=st.integers(0, 3),
        norm_min=st.sampled_from([0.0, 0.5]),
        grace_steps=st.sampled_from([0, 5, 50_000]),
    )
    of_time = st.builds(
        ExpirySettings,
        age_ms=st.sampled_from([0, 100, 300_000]),
        frequency_min=st.integers(0, 3),
        grace_ms=st.sampled_from([1, 40, 200_000]),
    )
    return TableSettings(
        draw(st.sampled_from(["users", "items"])),
        draw(st.sampled_from([1, 3, 8, 17])),
        kind,
        make_group(kind, given_settings),
        draw(st.integers(0, 9)),
        InitialValues(draw(st.sampled_from(InitialKind)), 0.5),
        rows_max=1 << 14,
        admission=admission,
        expiry=draw(st.one_of(st.just(ExpirySettings()), of_steps, of_time)),
    )


ROWS_IN_MEMORY = 6
SMALL_TIER = {
    "ROWS_LEAST": ROWS_IN_MEMORY,
    "HOMES_PER_STEP": 5,
    "AT_ONCE": 3,
    "_HOMES_PER_ROW": 20,
    "_HOMES_LEAST": 20,
    "_MORE": 10,
}


def bound() -> Budget:
    """Memory for hardly any row: the others lie in a file."""
    return Budget(1, lambda: os.memfd_create("rows"))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["push"] * 6
            + [
                "count",
                "look_up",
                "remove",
                "expire",
                "expire",
                "sweep",
                "copy",
                "load",
                "cut",
                "cut",
                "finish",
                "again",
            ]
        ),
        st.integers(0, 2**32),
        st.lists(IDS, max_size=80),
    ),
    max_size=30,
)


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    """Whatever happens only to large tables happens to these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stripes, "ENTRIES_MAX", 40)
        patch.setattr(stripes, "PARALLEL_ENTRIES", 10)
        patch.setattr(stripes, "HOMES_FIRST", 4)
        patch.setattr(stripes, "_DOUBLED_HOMES", 16)
        for module in (cuts, expiry):
            patch.setattr(module, "HOMES_PER_STEP", 5)
        patch.setattr(expiry, "HOMES_PER_SWEEP", 5)
        patch.setattr(cuts, "_STEP_ENTRIES", 7)
        patch.setattr(cuts, "CHUNK_ENTRIES", 11)
        patch.setattr(cold_file, "PIECE_BYTES_LEAST", 1_000)
        for name, value in SMALL_TIER.items():
            patch.setattr(disk_tier, name, value)
        yield


def contents(chunks: list[Chunk]) -> dict[int, tuple[bytes | None, int, int]]:
    found = {}
    for chunk in chunks:
        for i, number in enumerate(chunk.ids.tolist()):
            assert number not in found
            row = chunk.records[i].tobytes() if i < len(chunk.records) else None
            found[number] = (row, int(chunk.frequencies[i]), int(chunk.steps[i]))
    return found


def expected(plain: PlainTable) -> dict[int, tuple[bytes | None, int, int]]:
    return {
        number: (None if entry.row is None else entry.row.tobytes(), entry.frequency, entry.step)
        for number, entry in plain.entries.items()
    }


def load_all(table: Table, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        table.load(chunk.ids, chunk.values.copy(), chunk.state.copy(), chunk.frequencies, chunk.steps)


class Pair:
    """A table and its dictionary, and cuts on their way. `base`: what the last whole cut restores."""

    def __init__(self, given_settings: TableSettings, budget: Budget | None) -> None:
        self.settings, self.budget = given_settings, budget
        self.table, self.plain = Table(given_settings, budget), PlainTable(given_settings)
        self.step = self.now_ms = 0
        self.cut: cuts.TableCut | None = None
        self.chunks: list[Chunk] = []
        self.then: dict[int, tuple[bytes | None, int, int]] = {}
        self.restored: Table | None = None
        """A table that is made anew from each cut."""

    def do(self, what: str, seed: int, ids: list[int]) -> None:
        rng = np.random.default_rng(seed)
        array = np.array(ids, np.int64)
        if what in ("push", "count"):
            self.step += int(rng.integers(1, 4 * self.settings.expiry.age_unit))
            self.now_ms += int(rng.integers(0, 40 * self.settings.expiry.age_unit))
            counts = rng.integers(1, 4, array.size) if seed % 2 else None
            told = [1] * array.size if counts is None else counts.tolist()
            gradients = rng.standard_normal((array.size, self.settings.dim)).astype(np.float32)
            if what == "push":
                self.table.push(array, gradients, self.step, counts=counts, now_ms=self.now_ms)
            else:
                self.table.count(array, counts, self.step, self.now_ms)
            self.plain.push(ids, gradients if what == "push" else None, self.step, told, self.now_ms)
        elif what == "look_up":
            out = np.full((array.size, self.settings.dim), np.nan, np.float32)
            self.table.look_up(array, out)
            assert out.tobytes() == self.plain.look_up(ids).tobytes()
        elif what == "remove":
            gone = self.table.remove(np.unique(array))
            assert sorted(gone.tolist()) == sorted(set(ids) & set(self.plain.entries))
            for number in gone.tolist():
                del self.plain.entries[number]
        elif what == "sweep" or (what == "expire" and self.settings.expiry.rows_kept):
            self.sweep(ids)
        elif what == "expire":
            self.expire()
        elif what == "load":
            self.load(array, rng)
        elif what == "copy" and self.cut is None:
            chunks = list(self.table.cuts.items())
            assert contents(chunks) == expected(self.plain)
            updates, now_ms = self.table.state.updates, self.table.state.now_ms
            self.table = Table(self.settings, self.budget)
            self.restored = None
            rng.shuffle(chunks)
            load_all(self.table, chunks)
            self.table.resume(updates, now_ms)
        elif what == "cut" and self.cut is None:
            since = self.table.cuts.generation if self.restored is not None else None
            self.cut, self.chunks, self.then = self.table.cuts.take(since), [], expected(self.plain)
        elif what == "again" and self.cut is not None:
            # the number first: a chunk that is taken after the last one would be lost
            self.chunks.extend(chunk for _, chunk in zip(range(1 + seed % 3), self.cut, strict=False))
        elif what == "finish" and self.cut is not None:
            self.finish()

    def load(self, array: np.ndarray, rng: np.random.Generator) -> None:
        ids = np.unique(array)
        values = rng.standard_normal((ids.size, self.settings.dim)).astype(np.float32)
        expiry, now = self.settings.expiry, self.now_ms if self.settings.expiry.by_time else self.step
        now -= now % expiry.age_unit
        frequencies = rng.integers(1, 65_536, ids.size)
        steps = rng.integers(max(0, now - 20_000 * expiry.age_unit), now + 1, ids.size)
        steps -= steps % expiry.age_unit
        self.table.load(ids, values, None, frequencies, steps)
        for i, number in enumerate(ids.tolist()):
            row = np.concatenate([values[i], self.plain.fresh(values[i])])
            self.plain.entries[number] = Entry(row, int(frequencies[i]), int(steps[i]))

    def expire(self) -> None:
        """In one walk, and what that leaves."""
        gone: list[int] = []
        over = False
        while not over:
            done = self.table.expiry.expiring(self.step, 1, now_ms=self.now_ms)
            self.table.remove_expired(done.ids)
            gone += done.ids.tolist()
            over = done.over
        assert set(gone) == self.plain.expired(self.step, self.now_ms)
        assert len(gone) == len(set(gone))
        for number in gone:
            del self.plain.entries[number]

    def sweep(self, besides: list[int]) -> None:
        gone = self.table.expiry.sweep(self.step, [np.array(besides, np.int64)])
        has_row = [number for number in gone.tolist() if self.plain.entries[number].row is not None]
        assert self.table.having_row(gone).tolist() == has_row
        assert gone.tolist() == sorted(self.plain.swept(self.step, self.now_ms, set(besides)))
        self.table.remove_expired(gone)
        for number in gone.tolist():
            del self.plain.entries[number]

    def finish(self) -> None:
        assert self.cut is not None
        self.chunks.extend(self.cut)
        if self.restored is None:
            self.restored = Table(self.settings, self.budget)
            assert contents(self.chunks) == self.then
        else:
            assert contents(self.chunks).items() <= self.then.items()
            self.restored.remove(self.cut.removed)
        load_all(self.restored, self.chunks)
        self.restored.resume(self.cut.updates, self.cut.now_ms)
        assert contents(list(self.restored.cuts.items())) == self.then
        self.cut = None

    def check(self) -> None:
        if self.cut is not None:
            self.finish()
        rows = sum(entry.row is not None for entry in self.plain.entries.values())
        assert (self.table.rows, self.table.state.entries) == (rows, len(self.plain.entries))
        assert contents(list(self.table.cuts.items())) == expected(self.plain)
        if self.budget is not None:
            self.come_down()
            assert contents(list(self.table.cuts.items())) == expected(self.plain)

    def come_down(self) -> None:
        """All rows but a few leave memory, a little with each push, also one of nothing."""
        for _ in range(10_000):
            if self.table.rows - self.table.use().cold_rows <= ROWS_IN_MEMORY:
                return
            self.table.count(np.empty(0, np.int64), None, self.step + 1, self.now_ms)
        raise AssertionError(f"{self.table.rows - self.table.use().cold_rows} rows are in memory")


@pytest.mark.parametrize("bounded", [False, True])
@settings(max_examples=150, deadline=None)
@given(given_settings=table_settings(), operations=OPERATIONS)
def test_a_table_is_a_dictionary(
    bounded: bool, given_settings: TableSettings, operations: list[tuple[str, int, list[int]]]
) -> None:
    pair = Pair(given_settings, bound() if bounded else None)
    for what, seed, ids in operations:
        pair.do(what, seed, ids)
    pair.check()


@pytest.mark.parametrize("bounded", [False, True])
@settings(max_examples=100, deadline=None)
@given(given_settings=table_settings(), operations=OPERATIONS, rows_kept=st.integers(1, 60))
def test_a_sweep_takes_the_least_frequent_by_entries_alone(
    bounded: bool, given_settings: TableSettings, operations: list[tuple[str, int, list[int]]], rows_kept: int
) -> None:
    expiry_too = replace(given_settings.expiry, rows_kept=rows_kept)
    pair = Pair(replace(given_settings, expiry=expiry_too), bound() if bounded else None)
    for what, seed, ids in operations:
        pair.do(what, seed, ids)
    pair.sweep([])
    pair.check()
