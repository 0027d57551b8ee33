"""Admission and expiry as users set them, for tables whose rows are in the process; and a partition's share of rows."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch

import shardyard as sy
from shardyard.domain.errors import InvalidRequest, TableError
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.tables.table_settings import AdmissionSettings, ExpirySettings, TableSettings
from shardyard_ps_server.rows.table_states import make_tables

IDS = torch.arange(6)


class Clock:
    """A clock that is told the time."""

    def __init__(self) -> None:
        self.ms = 5_000_000

    def now_ms(self) -> int:
        return self.ms


class Trained:
    """One table, each push of which takes 1 from each value."""

    def __init__(self, **given: Any) -> None:
        self.model = sy.Embedding(2, **(given if "table" in given else _of(given)))
        self.clock = Clock()
        self.optimizer = sy.tables.Optimizer(self.model, clock=self.clock)

    def push(self, *ids: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.tensor(ids)).sum().backward()
        self.optimizer.step()

    @property
    def values(self) -> list[float]:
        return self.model(IDS)[:, 0].tolist()

    def __len__(self) -> int:
        return len(self.model.table)


# ---- who gets a row


@pytest.mark.parametrize("cells", [None, 1 << 12])
def test_an_id_has_a_row_from_so_many_pushes_on(cells: int | None) -> None:
    trained = Trained(admission=sy.tables.AdmitAfter(3, cells=cells))
    for _ in range(2):
        trained.push(0, 1)
    assert (len(trained), trained.values) == (0, [0] * 6)
    trained.push(1, 1)
    # gradients before are dropped, and an id that is twice in a batch is pushed once
    assert (len(trained), trained.values) == (1, [0, -2, 0, 0, 0, 0])


def test_an_id_without_a_row_reads_as_the_row_would_begin_or_as_zeros() -> None:
    began = sy.tables.normal(1.0)
    plain = sy.Embedding(2, initial=began, admission=sy.tables.AdmitAfter(2))
    zeros = sy.Embedding(2, initial=began, admission=sy.tables.AdmitAfter(2, zeros=True))
    assert plain(IDS).abs().min() > 0
    assert not zeros(IDS).any()
    assert not sy.Embedding(2, initial=began, admission=sy.tables.AdmitAll(zeros=True))(IDS).any()
    zeros.table.put(IDS[:1], torch.ones(1, 2))
    assert zeros(IDS)[:, 0].tolist() == [1, 0, 0, 0, 0, 0]


def test_a_share_of_the_pushes_makes_rows() -> None:
    torch.manual_seed(0)
    trained = Trained(admission=sy.tables.AdmitByChance(0.25))
    trained.push(*range(1_000))
    assert abs(len(trained) - 250) < 6 * math.sqrt(1_000 * 0.25 * 0.75)
    for _ in range(60):
        trained.push(*range(1_000))
    assert len(trained) == 1_000


# ---- who loses it


def test_rows_go_when_they_were_not_pushed_for_long() -> None:
    trained = Trained(expiry=sy.tables.Expiry(age_steps=2))
    trained.push(0, 1, 2)
    for _ in range(2):
        trained.push(0)
    assert len(trained) == 3
    for _ in range(3):
        trained.push(0)
    assert (len(trained), trained.values) == (1, [-6, 0, 0, 0, 0, 0])
    trained.push(1)
    # what comes again begins anew
    assert trained.values == [-6, -1, 0, 0, 0, 0]


def test_rows_go_by_the_clock() -> None:
    trained = Trained(expiry=sy.tables.Expiry(age_seconds=60))
    trained.push(0, 1, 2)
    trained.clock.ms += 59_000
    for _ in range(100):
        trained.push(0)
    assert len(trained) == 3
    trained.clock.ms += 2_000
    for _ in range(3):
        trained.push(0)
    assert len(trained) == 1
    trained.clock.ms += 3_600_000
    # nothing goes from a table that is not trained
    assert len(trained) == 1


def test_a_grace_in_seconds_keeps_small_rows() -> None:
    trained = Trained(expiry=sy.tables.Expiry(norm_min=100.0, grace_seconds=0.5))
    trained.push(0)
    trained.push(0)
    trained.clock.ms += 499
    trained.model.table.put(torch.tensor([1]), torch.ones(1, 2))
    trained.push(2)
    assert sorted(trained.model.table.state_dict()["ids"].tolist()) == [0, 1, 2]
    trained.clock.ms += 2
    trained.push(2)
    trained.push(2)
    assert sorted(trained.model.table.state_dict()["ids"].tolist()) == [2]


def test_ages_go_on_from_what_was_saved() -> None:
    table = {"table": sy.tables.Table(2, name="t", seed=1, **_of({"expiry": sy.tables.Expiry(age_seconds=10)}))}
    trained, other = Trained(**copy.deepcopy(table)), Trained(**copy.deepcopy(table))
    trained.push(0, 1)
    trained.clock.ms += 6_000
    trained.push(0)
    saved = trained.model.state_dict(), trained.optimizer.state_dict()
    other.clock.ms = 40
    other.push(3)
    other.model.load_state_dict(saved[0])
    other.optimizer.load_state_dict(saved[1])
    other.clock.ms += 4_000
    for _ in range(3):
        other.push(0)
    assert len(other) == 2
    other.clock.ms += 1
    for _ in range(3):
        other.push(0)
    assert len(other) == 1


def test_the_least_frequent_go_beyond_the_rows_that_are_kept() -> None:
    trained = Trained(expiry=sy.tables.Expiry(rows_kept=2))
    trained.push(1, 3)
    trained.push(1, 3)
    trained.push(0, 1, 2, 3)
    assert (len(trained), trained.values) == (2, [0, -3, 0, -3, 0, 0])


def test_small_and_seldom_rows_go_after_their_grace() -> None:
    trained = Trained(expiry=sy.tables.Expiry(norm_min=2.5, frequency_min=2, grace_steps=3))
    trained.push(0, 1)
    for _ in range(2):
        trained.push(0)
    assert len(trained) == 2
    for _ in range(3):
        trained.push(0)
    assert (len(trained), trained.values[:2]) == (1, [-6, 0])


def test_rows_that_are_put_count_as_pushed_then() -> None:
    trained = Trained(expiry=sy.tables.Expiry(age_steps=3))
    for _ in range(5):
        trained.push(0)
    trained.model.table.put(torch.tensor([1, 2]), torch.ones(2, 2))
    for _ in range(3):
        trained.push(0)
    assert len(trained) == 3
    for _ in range(3):
        trained.push(0)
    assert len(trained) == 1


# ---- saved, copied


@pytest.mark.parametrize(
    "given",
    [
        {"admission": sy.tables.AdmitAfter(3)},
        {"admission": sy.tables.AdmitAfter(3, cells=256)},
        {"admission": sy.tables.AdmitByChance(0.4), "expiry": sy.tables.Expiry(age_steps=3)},
        {"expiry": sy.tables.Expiry(frequency_min=3, grace_steps=2)},
    ],
)
def test_what_was_saved_goes_on_as_it_would_have(given: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 40, (12,), generator=generator).tolist() for _ in range(16)]
    trained = Trained(table=sy.tables.Table(2, name="t", seed=1, **_of(given)))
    for batch in batches[:8]:
        trained.push(*batch)
    saved = pickle.loads(pickle.dumps((trained.model.state_dict(), trained.optimizer.state_dict())))
    other = Trained(table=sy.tables.Table(2, name="t", seed=2, **_of(given)))
    other.push(99)
    other.model.load_state_dict(saved[0])
    other.optimizer.load_state_dict(saved[1])
    for batch in batches[8:]:
        trained.push(*batch)
        other.push(*batch)
    mine, theirs = trained.model.state_dict(), other.model.state_dict()
    assert len(trained) > 3
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def _of(given: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": sy.tables.SGD(lr=1.0), "initial": sy.tables.zeros(), **given}


def test_entries_that_make_no_sense_are_refused() -> None:
    trained = Trained(admission=sy.tables.AdmitAfter(2))
    trained.push(0, 1)
    trained.push(0)
    (name,) = trained.optimizer.state_dict()["entries"]
    for wrong in (
        {"frequencies": torch.tensor([0, 1])},
        {"frequencies": torch.tensor([1])},
        {"times": torch.tensor([1, -1])},
        {"ids": torch.tensor([1, 1])},
        {"ids": torch.tensor([1.0, 2.0])},
        {"cells": torch.zeros(4)},
        {"pushed": torch.tensor([], dtype=torch.int64)},
        {"more": torch.zeros(4)},
    ):
        saved = trained.optimizer.state_dict()
        saved["entries"][name] |= wrong
        with pytest.raises(InvalidRequest, match="entries of table"):
            trained.optimizer.load_state_dict(saved)
    with pytest.raises(InvalidRequest, match="at -1 ms"):
        trained.optimizer.load_state_dict(trained.optimizer.state_dict() | {"now_ms": -1})
    trained.push(1)
    assert trained.values[:2] == [-1, -1]


def test_a_copy_counts_on_by_itself() -> None:
    trained = Trained(admission=sy.tables.AdmitAfter(2))
    trained.push(0)
    other = copy.deepcopy(trained.model)
    trained.push(0)
    assert (len(trained), len(other.table)) == (1, 0)


# ---- what is refused


@pytest.mark.parametrize(
    "make",
    [
        lambda: sy.tables.AdmitAfter(0),
        lambda: sy.tables.AdmitAfter(1 << 16),
        lambda: sy.tables.AdmitAfter(2.0),  # type: ignore[arg-type]
        lambda: sy.tables.AdmitAfter(True),
        lambda: sy.tables.AdmitAfter(256, cells=64),
        lambda: sy.tables.AdmitAfter(2, cells=100),
        lambda: sy.tables.AdmitByChance(0),
        lambda: sy.tables.AdmitByChance(1.5),
        lambda: sy.tables.AdmitByChance(math.nan),
        lambda: sy.tables.AdmitByChance("often"),  # type: ignore[arg-type]
        lambda: sy.tables.Expiry(age_steps=-1),
        lambda: sy.tables.Expiry(age_steps=1.5),  # type: ignore[arg-type]
        lambda: sy.tables.Expiry(norm_min=math.inf),
        lambda: sy.tables.Expiry(norm_min=None),  # type: ignore[arg-type]
        lambda: sy.tables.Expiry(rows_kept=1 << 60),
        lambda: sy.tables.Expiry(age_seconds=-1),
        lambda: sy.tables.Expiry(age_seconds=1e-4),
        lambda: sy.tables.Expiry(age_seconds=math.nan),
        lambda: sy.tables.Expiry(age_seconds=math.inf),
        lambda: sy.tables.Expiry(age_seconds="1 h"),  # type: ignore[arg-type]
        lambda: sy.tables.Expiry(age_seconds=1, age_steps=1),
        lambda: sy.tables.Expiry(age_seconds=1, grace_steps=1),
        lambda: sy.tables.Expiry(age_steps=1, grace_seconds=1),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(TableError, match="expected"):
        make()


def test_settings_of_another_type_are_refused() -> None:
    for given in ({"admission": 3}, {"admission": sy.tables.Expiry()}, {"expiry": 7}):
        with pytest.raises(InvalidRequest, match="of a table is"):
            sy.Embedding(2, **given)  # type: ignore[arg-type]


def test_a_table_that_is_there_has_its_own() -> None:
    table = sy.tables.Table(2)
    for given in ({"admission": sy.tables.AdmitAll()}, {"expiry": sy.tables.Expiry()}):
        with pytest.raises(InvalidRequest, match="is there already"):
            sy.EmbeddingBag(2, table=table, **given)  # type: ignore[arg-type]


# ---- on servers


def test_rows_that_are_kept_are_those_of_all_partitions_together() -> None:
    parts = tuple(PartitionLayout(PartitionId(number), 0, ()) for number in range(3))
    settings = TableSettings("t", 2, rows_max=64, expiry=ExpirySettings(rows_kept=10))
    layout = JobLayout((), OptimizerSpec("sgd", ()), parts, (settings,))
    assert make_tables(layout)["t"].settings.expiry == ExpirySettings(rows_kept=4)


def test_settings_that_no_partition_changes_are_one_object() -> None:
    parts = tuple(PartitionLayout(PartitionId(number), 0, ()) for number in range(3))
    layout = JobLayout((), OptimizerSpec("sgd", ()), parts, (TableSettings("t", 2, rows_max=64),))
    assert make_tables(layout)["t"].settings is layout.tables[0]


def test_settings_are_those_of_servers() -> None:
    assert sy.tables.AdmitAll().settings == AdmissionSettings()
    assert sy.tables.Expiry().settings == ExpirySettings()
