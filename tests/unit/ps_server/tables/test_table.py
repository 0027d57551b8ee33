"""A table: what it is asked, what it refuses, and what its contents do not depend on."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from shardyard.domain.errors import DTypeMismatch, ShapeMismatch, ShardyardError, TableError, TableFull, TooLarge
from shardyard.domain.tables.row_optimizers import make_group
from shardyard.domain.tables.table_settings import ExpirySettings, TableSettings
from shardyard_ps_server.tables import checks
from shardyard_ps_server.tables.memory.layout import WINDOW_UNITS
from shardyard_ps_server.tables.table import Table

DIM = 4
IDS = np.array([7, -7, 0, 2**63 - 1, -(2**63)], np.int64)
SGD = make_group("sgd", {"lr": 1.0})


def make(rows_max: int = 1 << 16, kind: str = "sgd", **more: object) -> Table:
    group = SGD if kind == "sgd" else ()
    return Table(TableSettings("t", DIM, kind, group, 1, rows_max=rows_max, **more))  # type: ignore[arg-type]


def ones(n: int) -> np.ndarray:
    return np.ones((n, DIM), np.float32)


def look(table: Table, ids: np.ndarray) -> np.ndarray:
    out = np.full((ids.size, DIM), np.nan, np.float32)
    table.look_up(ids, out)
    return out


def contents(table: Table) -> dict[int, tuple[bytes, int, int]]:
    return {
        number: (chunk.records[i].tobytes(), int(chunk.frequencies[i]), int(chunk.steps[i]))
        for chunk in table.cuts.items()
        for i, number in enumerate(chunk.ids.tolist())
    }


def many(n: int, seed: int = 0) -> np.ndarray:
    return np.unique(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, n))


# ---- reading and changing


def test_counts_are_counted_and_stop_at_the_most_that_a_bucket_holds() -> None:
    table = make()
    table.push(IDS, ones(5), 3, counts=np.array([1, 5, 65_535, 2**63 - 1, 2], np.int64))
    table.count(IDS, np.array([1, 1, 1, 2**63 - 1, 1]), 4)
    assert [contents(table)[number][1:] for number in IDS.tolist()] == [
        (2, 4), (6, 4), (65_535, 4), (65_535, 4), (3, 4)
    ]  # fmt: skip


def test_rows_that_are_removed_begin_anew_and_their_memory_is_used_again() -> None:
    table = make(kind="adagrad", rows_max=50_000)
    ids = many(40_000)
    seen = look(table, ids)
    for step in range(1, 4):
        table.push(ids, ones(ids.size), step)
        nbytes = table.use().nbytes
        gone = table.remove(np.concatenate([ids[::-1], np.array([3], np.int64)]))
        assert sorted(gone.tolist()) == ids.tolist()
        assert (table.rows, table.state.entries) == (0, 0)
        assert (look(table, ids) == seen).all()
    table.push(ids, ones(ids.size), 4)
    assert table.use().nbytes == nbytes


def test_the_last_step_never_goes_back() -> None:
    table = make()
    table.push(IDS, ones(5), 9)
    table.push(IDS, ones(5), 2)
    assert {step for _, _, step in contents(table).values()} == {9}


def test_the_last_step_is_told_as_far_back_as_a_bucket_tells_it() -> None:
    """Also when many units have passed, and to the unit of the expiry settings."""
    table = make()
    far = WINDOW_UNITS
    for i, step in enumerate([1, far, 2 * far + 5, 2 * far + 10, 40 * far]):
        table.push(IDS[i : i + 1], ones(1), step)
        told = [contents(table)[number][2] for number in IDS[: i + 1].tolist()]
        pushed = [1, far, 2 * far + 5, 2 * far + 10, 40 * far][: i + 1]
        assert told == [max(each, step - far + 1) for each in pushed]
    coarse = make(expiry=ExpirySettings(age_steps=1_000_000))
    coarse.push(IDS, ones(5), 12_345)
    unit = coarse.settings.expiry.age_unit
    assert unit == 64
    assert {step for _, _, step in contents(coarse).values()} == {12_345 // unit * unit}


# ---- what contents do not depend on


def test_contents_depend_on_no_private_seed_and_no_number_of_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 30_000, 3_000) for _ in range(20)]
    gradients = rng.standard_normal((3_000, DIM)).astype(np.float32)
    made = []
    for limit in (250_000, 500):
        monkeypatch.setattr("shardyard_ps_server.tables.stripes.ENTRIES_MAX", limit)
        table = make(kind="adam")
        for step, ids in enumerate(batches, start=1):
            table.push(ids, gradients, step)
        made.append(table)
    assert made[1].state.stripes.count > 2 * made[0].state.stripes.count >= 32
    assert contents(made[0]) == contents(made[1])


def test_the_seed_of_the_index_is_drawn_for_each_table(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[bytes] = []
    monkeypatch.setattr(os, "urandom", lambda n, real=os.urandom: drawn.append(real(n)) or drawn[-1])
    make(), make()
    assert len(set(drawn)) == 2
    assert {len(each) for each in drawn} == {16}


def test_a_table_grows_to_many_stripes_and_keeps_everything() -> None:
    table, ids = make(rows_max=700_000, kind="adagrad"), many(600_000)
    for begin in range(0, ids.size, 50_000):
        part = ids[begin : begin + 50_000]
        table.push(part, np.repeat(part[:, None], DIM, axis=1).astype(np.float32), 1)
    assert (table.rows, table.state.entries) == (ids.size, ids.size)
    assert table.state.stripes.count >= 16
    index_bytes = table.use().nbytes - ids.size * 2 * DIM * 4
    assert index_bytes / ids.size <= 30
    missing = 0
    for chunk in table.cuts.items():
        squares = chunk.ids.astype(np.float32) ** 2
        missing += chunk.ids.size
        assert (chunk.state == squares[:, None]).all()
    assert missing == ids.size


# ---- rows as they were


def test_rows_are_put_in_as_they_are_given() -> None:
    table = make(kind="adagrad")
    values, state = 2 * ones(5), 3 * ones(5)
    table.load(IDS, values, state, np.arange(1, 6), np.arange(5))
    table.load(IDS[:2], 4 * ones(2))
    assert (look(table, IDS)[:, 0] == [4, 4, 2, 2, 2]).all()
    assert [contents(table)[number][1:] for number in IDS.tolist()] == [(1, 0), (1, 0), (3, 2), (4, 3), (5, 4)]
    assert table.rows == 5


def test_state_that_is_not_given_is_that_of_new_rows() -> None:
    group = make_group("ftrl", {"beta": 2.0, "lr": 0.5})
    table = Table(TableSettings("t", DIM, "ftrl", group, rows_max=4_096))
    table.load(IDS, 3 * ones(5))
    (chunk,) = table.cuts.items()
    assert (chunk.state == [-12.0] * DIM + [0.0] * DIM).all()


# ---- what is refused


def bad_calls() -> dict[str, tuple[type[ShardyardError], str, Callable[[Table], object]]]:
    good = ones(5)
    counts = np.ones(5, np.int64)
    nan = good.copy()
    nan[3, 1] = np.nan
    frozen = ones(5)
    frozen.flags.writeable = False
    half = good.astype(np.float16)
    return {
        "ids of int32": (DTypeMismatch, "int32", lambda t: t.push(IDS.astype(np.int32), good, 1)),
        "ids of uint64": (DTypeMismatch, "uint64", lambda t: t.look_up(IDS.view(np.uint64), good)),
        "ids of two dimensions": (ShapeMismatch, r"\(1, 5\)", lambda t: t.remove(IDS[None])),
        "too many ids": (TooLarge, "6 ids", lambda t: t.look_up(np.arange(6), np.empty((6, DIM), np.float32))),
        "gradients of float64": (DTypeMismatch, "float64", lambda t: t.push(IDS, good.astype(np.float64), 1)),
        "gradients too few": (ShapeMismatch, r"\(4, 4\)", lambda t: t.push(IDS, good[:4], 1)),
        "gradients too long": (ShapeMismatch, r"\(5, 5\)", lambda t: t.push(IDS, np.ones((5, 5), np.float32), 1)),
        "gradients flat": (ShapeMismatch, r"\(20,\)", lambda t: t.push(IDS, good.ravel(), 1)),
        "gradients not finite": (TableError, "not all finite", lambda t: t.push(IDS, nan, 1, finite=True)),
        "step 0": (TableError, "update number 0", lambda t: t.push(IDS, good, 0)),
        "step of 2**47": (TableError, "140737488355328", lambda t: t.push(IDS, good, 1 << 47)),
        "counts of 0": (TableError, "0 times", lambda t: t.push(IDS, good, 1, counts=counts - 1)),
        "counts too few": (ShapeMismatch, "counts", lambda t: t.count(IDS, counts[:4], 1)),
        "counts of int32": (DTypeMismatch, "counts", lambda t: t.count(IDS, counts.astype(np.int32), 1)),
        "out read-only": (TableError, "read-only", lambda t: t.look_up(IDS, frozen)),
        "out in pieces": (TableError, "one piece", lambda t: t.look_up(IDS, np.ones((5, 8), np.float32)[:, ::2])),
        "values of float16": (DTypeMismatch, "values", lambda t: t.load(IDS, half)),
        "values of another dim": (ShapeMismatch, "values", lambda t: t.load(IDS, np.ones((5, 3), np.float32))),
        "more values than ids": (ShapeMismatch, "values", lambda t: t.load(IDS[:2], good)),
        "state of another rule": (ShapeMismatch, "state", lambda t: t.load(IDS, good, good)),
        "frequency 0": (TableError, "frequencies from 0", lambda t: t.load(IDS, good, None, counts - 1)),
        "frequency too high": (TableError, "to 65536", lambda t: t.load(IDS, good, None, counts * 65_536)),
        "steps below 0": (TableError, "steps from -1", lambda t: t.load(IDS, good, None, None, -counts)),
        "a filter where there is none": (TableError, "filter", lambda t: t.load_cells(np.zeros(64, np.uint8))),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_what_does_not_fit_is_refused_and_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make()
    table.push(IDS, ones(5), 1)
    before, nbytes = contents(table), table.use().nbytes
    monkeypatch.setattr(checks, "BATCH_IDS_MAX", 5)
    kind, match, call = bad_calls()[name]
    with pytest.raises(kind, match=match) as caught:
        call(table)
    assert type(caught.value) is kind
    assert (contents(table), table.use().nbytes) == (before, nbytes)


def test_more_rows_than_the_table_may_have_are_refused_whole() -> None:
    table = make(rows_max=1_000)
    ids = np.arange(1_000, dtype=np.int64)
    table.push(ids[:990], ones(990), 1)
    before = contents(table)
    for change in (
        lambda: table.push(np.arange(980, 1_001), ones(21), 2),
        lambda: table.count(np.arange(980, 1_001), None, 2),
        lambda: table.load(np.arange(980, 1_001), ones(21)),
    ):
        with pytest.raises(TableFull, match="11 more rows in table 't', which has 990; at most 1000"):
            change()
        assert contents(table) == before
    # those that are there, and some that are named twice, need no room
    table.push(np.concatenate([ids, ids]), ones(2_000), 2)
    assert table.rows == 1_000
    table.remove(ids[:1])
    table.push(np.array([5_000]), ones(1), 3)
    assert table.rows == 1_000


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"dim": 0}, "rows of 0 values"),
        ({"dim": 1 << 17}, "rows of 131072 values"),
        ({"rows_max": 0}, "at most 0 rows"),
        ({"rows_max": 1 << 30}, "at most 1073741824 rows"),
    ],
)
def test_tables_that_cannot_be_are_refused(given: dict[str, int], match: str) -> None:
    with pytest.raises(TableError, match=match):
        TableSettings(**{"name": "t", "dim": 4, **given})  # type: ignore[arg-type]


def test_address_space_that_is_refused_is_told() -> None:
    with pytest.raises(TableError, match="GiB of address space"):
        Table(TableSettings("t", 1 << 16, rows_max=(1 << 30) - 1))


def test_arrays_may_be_read_only_or_lie_apart() -> None:
    table, other = make(), make()
    wide = np.random.default_rng(0).standard_normal((10, 2 * DIM)).astype(np.float32)
    ids = np.arange(10, dtype=np.int64)
    table.push(ids[::2], wide[::2, ::2], 1)
    frozen_ids, frozen = ids[::2].copy(), wide[::2, ::2].copy()
    frozen_ids.flags.writeable = frozen.flags.writeable = False
    other.push(frozen_ids, frozen, 1)
    assert contents(table) == contents(other)
    assert (look(other, frozen_ids) == look(table, ids[::2])).all()
