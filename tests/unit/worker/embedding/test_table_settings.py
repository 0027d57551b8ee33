"""Who gets a row, and who loses it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardyard.domain.errors import TableError
from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_optimizers import make_group
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard_ps_server.tables.table import Table

DIM = 4
IDS = np.arange(1_000, dtype=np.int64) * 7_919


def make(admission: AdmissionSettings | None = None, expiry: ExpirySettings | None = None, seed: int = 1) -> Table:
    return Table(
        TableSettings(
            "t",
            DIM,
            "sgd",
            make_group("sgd", {"lr": 1.0}),
            seed,
            InitialValues(InitialKind.ZEROS),
            1 << 16,
            admission or AdmissionSettings(),
            expiry or ExpirySettings(),
        )
    )


def push(table: Table, ids: np.ndarray, step: int, value: float = -1.0) -> None:
    table.push(ids, np.full((ids.size, DIM), value, np.float32), step)


def values(table: Table, ids: np.ndarray = IDS) -> list[float]:
    out = np.empty((ids.size, DIM), np.float32)
    table.look_up(ids, out)
    return out[:, 0].tolist()


def expire(table: Table, step: int, budget: int = 1 << 40) -> list[int]:
    gone = table.expiry.expiring(step, budget).ids
    table.remove_expired(gone)
    return gone.tolist()


# ---- admission


def test_admission_by_chance_depends_on_seed_id_and_step_alone() -> None:
    chance = AdmissionSettings(Admission.CHANCE, chance=0.25)
    table, same, other = make(chance), make(chance), make(chance, seed=2)
    push(table, IDS, 7)
    push(same, IDS[::-1].copy(), 7)
    push(other, IDS, 7)
    assert values(table) == values(same) != values(other)
    assert abs(table.rows - 250) < 6 * math.sqrt(1_000 * 0.25 * 0.75)
    assert table.state.entries == table.rows
    for step in range(8, 60):
        push(same, IDS, step)
    assert same.rows == 1_000


def test_admission_by_estimate_is_never_late_and_seldom_early() -> None:
    table = make(AdmissionSettings(Admission.ESTIMATE, threshold=3, cells=1 << 14))
    for step in (1, 2):
        push(table, IDS, step)
    assert table.rows < 10
    assert table.state.entries == table.rows
    push(table, IDS, 3)
    assert table.rows == 1_000
    crowded = make(AdmissionSettings(Admission.ESTIMATE, threshold=3, cells=64))
    push(crowded, IDS, 1)
    assert crowded.rows > 500


def test_the_filter_is_in_cuts_and_comes_back() -> None:
    table, other = (make(AdmissionSettings(Admission.ESTIMATE, threshold=3, cells=1 << 14)) for _ in range(2))
    for step in (1, 2):
        push(table, IDS[:100], step)
    with table.cuts.take() as cut:
        push(table, IDS[100:200], 3)
        assert cut.cells is not None
        other.load_cells(cut.cells)
    push(other, IDS[:200], 4)
    assert values(other, IDS[:200]) == [1] * 100 + [0] * 100
    with pytest.raises(TableError, match="filter"):
        other.load_cells(np.zeros(64, np.uint8))


def test_a_row_stays_admitted() -> None:
    for kind in Admission:
        table = make(AdmissionSettings(kind, threshold=2, chance=0.5))
        table.load(IDS, np.ones((1_000, DIM), np.float32))
        push(table, IDS, 1)
        assert values(table) == [2] * 1_000


@pytest.mark.parametrize(
    "given",
    [
        {"threshold": 0},
        {"threshold": 65_536},
        {"chance": 0.0},
        {"chance": 1.5},
        {"chance": math.nan},
        {"cells": 100},
        {"cells": 32},
        {"kind": Admission.ESTIMATE, "threshold": 256},
    ],
)
def test_admission_that_makes_no_sense_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(TableError):
        AdmissionSettings(**given)  # type: ignore[arg-type]


# ---- expiry


def test_rows_of_pushes_on_their_way_are_not_among_what_expires() -> None:
    table = make(expiry=ExpirySettings(age_steps=1))
    push(table, IDS, 1)

    def expiring(*besides: np.ndarray) -> list[int]:
        return table.expiry.expiring(10, 1 << 40, besides).ids.tolist()

    assert expiring(IDS[50:200], IDS[:100]) == IDS[200:].tolist()
    assert table.rows == IDS.size, "it is told, and somebody else takes it out"
    table.remove_expired(IDS[200:])
    assert expiring(IDS[50:200]) == IDS[:50].tolist()
    assert expire(table, 10) == IDS[:200].tolist()


def test_expiry_goes_on_where_it_stopped_while_others_push() -> None:
    table = make(expiry=ExpirySettings(age_steps=10))
    rng = np.random.default_rng(0)
    ids = np.unique(rng.integers(0, 1 << 40, 40_000))
    old, fresh = ids[::2].copy(), ids[1::2].copy()
    push(table, old, 1)
    gone: list[int] = []
    calls, over = 0, False
    while not over:
        if calls < fresh.size // 1_000:
            push(table, fresh[calls * 1_000 :][:1_000], 20)
        done = table.expiry.expiring(20, 1)
        table.remove_expired(done.ids)
        gone.extend(done.ids.tolist())
        over = done.over
        calls += 1
    assert calls > 20
    assert sorted(gone) == old.tolist()
    assert table.rows == min(calls * 1_000, fresh.size)


def test_what_expires_and_stays_is_told_once_however_crowded_its_place() -> None:
    """A record of a log has ids that ascend strictly."""
    table = make(expiry=ExpirySettings(age_steps=10))
    ids = np.arange(60_000)
    push(table, ids, 1)
    assert table.expiry.expiring(20, 1 << 30, [ids[:7]]).ids.tolist() == ids[7:].tolist()
    assert table.rows == 60_000


def test_a_sweep_tells_the_same_whatever_the_private_seed() -> None:
    first, second = (make(expiry=ExpirySettings(rows_kept=350, frequency_min=2)) for _ in range(2))
    for step in range(1, 9):
        push(first, IDS[: step * 100], step)
        push(second, IDS[: step * 100][::-1].copy(), step)
    gone = first.expiry.sweep(9, [])
    assert gone.tolist() == second.expiry.sweep(9, []).tolist() == sorted(gone.tolist())
    # of 800 as many go as are too many; those of one frequency by no order of their own
    assert gone.size == 450
    kept = np.setdiff1d(IDS[:800], gone)
    assert set(kept.tolist()) > set(IDS[:300].tolist())
    assert set(kept.tolist()) < set(IDS[:400].tolist())
    assert kept[300:].tolist() != IDS[300:350].tolist()
    besides = gone[::2].copy()
    assert not set(first.expiry.sweep(9, [besides]).tolist()) & set(besides.tolist())
    first.remove_expired(gone)
    assert (first.rows, first.use().expired) == (350, 450)
    assert first.expiry.sweep(9, []).size == 0


@pytest.mark.parametrize(
    "given", [{"age_steps": -1}, {"frequency_min": -1}, {"norm_min": -1.0}, {"norm_min": math.inf}, {"rows_kept": -1}]
)
def test_expiry_that_makes_no_sense_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(TableError):
        ExpirySettings(**given)  # type: ignore[arg-type]
