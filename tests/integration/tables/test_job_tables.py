"""Tables of a model in a job: rows that are on servers, held against the same model that trains by itself.

Gradients are whole numbers and rates powers of two wherever bits are compared, so that no order of sums shows.
"""

from __future__ import annotations

import copy
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardyard as sy
from shardyard.domain import errors
from shardyard.domain.ids import PartitionId
from shardyard.domain.limits import ROWS_IN_FLIGHT_MAX
from shardyard_worker.exchange.row_reads import RowReads
from shardyard_worker.rows import row_codec
from shardyard_worker.rows.dedup import unique_ids
from tests.support.alone import SYNC, Connect
from tests.support.job_tables import (
    DIM,
    NEVER,
    Model,
    Yard,
    assert_same,
    backward,
    batches,
    begin,
    dense,
    train,
    trained_alone,
    yard,
)

__all__ = ["yard"]

pytestmark = pytest.mark.usefixtures("alone")


# ---- as without a job


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"worker.same_host": "never"},
        {"worker.exchange": "delayed"},
        {"worker.exchange": "overlapped", "worker.same_host": "never"},
        {"yard.servers": 1, "job.partitions": 1},
        {"job.consistency.mode": "bounded"},
        {"job.compression.push": "bf16"},
        SYNC,
        SYNC | {"worker.exchange": "overlapped", "worker.same_host": "never"},
        SYNC | {"job.clip.norm": 1e6},
        {"job.compression.rows_push": "bf16", "job.compression.rows_pull": "bf16"},
        {"job.consistency.staleness_scaling": "inverse"},
    ],
)
def test_rows_of_a_job_are_those_of_a_model_that_trains_by_itself(connect: Connect, given: dict[str, Any]) -> None:
    alone = trained_alone(12)
    job, model, optimizer = begin(connect, NEVER | given, Model())
    train(model, [optimizer], 12)
    job.pull()
    assert_same(model.state_dict(), alone.state_dict())
    assert len(model.author.table) == len(alone.author.table) > 20


@pytest.mark.parametrize("mode", [{}, SYNC], ids=["async", "sync"])
@pytest.mark.parametrize(
    "optimizer",
    [
        sy.tables.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
        sy.tables.Adagrad(lr=0.1, initial_accumulator_value=0.5),
        sy.tables.RowWiseAdagrad(lr=0.1),
        sy.tables.Adam(lr=0.1, betas=(0.8, 0.9)),
        sy.tables.AdamW(lr=0.1),
        sy.tables.SparseAdam(lr=0.1),
        sy.tables.FTRL(lr=0.1, l1=0.01, l2=0.1),
    ],
)
def test_each_optimizer_of_tables_is_the_same_on_servers(
    connect: Connect, optimizer: sy.tables.RowOptimizer, mode: dict[str, Any]
) -> None:
    alone = trained_alone(9, optimizer)
    job = connect(settings=NEVER | mode)
    model = Model(optimizer)
    model, moved = job.prepare(model, dense(model))
    train(model, [moved], 9)
    assert_same(model.state_dict(), alone.state_dict(), tolerance=1e-5)


@pytest.mark.parametrize(
    "admission",
    [sy.tables.AdmitAfter(3), sy.tables.AdmitAfter(3, cells=1 << 16, zeros=True), sy.tables.AdmitByChance(0.3)],
)
def test_ids_are_admitted_on_servers_as_in_the_process(connect: Connect, admission: Any) -> None:
    alone, every = Model(admission=admission), trained_alone(9)
    train(alone, [dense(alone), sy.tables.Optimizer(alone)], 9)
    _, model, optimizer = begin(connect, NEVER, Model(admission=admission))
    train(model, [optimizer], 9)
    assert_same(model.state_dict(), alone.state_dict())
    assert 0 < len(model.author.table) < len(every.author.table)


def test_rows_expire_on_servers_as_the_job_goes_on(connect: Connect) -> None:
    job = connect(settings=NEVER | {"job.partitions": 2})
    model = sy.Embedding(
        1,
        optimizer=sy.tables.SGD(lr=1.0),
        initial=sy.tables.zeros(),
        expiry=sy.tables.Expiry(age_steps=3),
    )
    model, optimizer = job.prepare(model, dense(model))
    often, once = torch.arange(20), torch.arange(20, 60)
    for ids in (once, *[often] * 3):
        optimizer.zero_grad()
        model(ids).sum().backward()
        optimizer.step()
    assert len(model.table) == 60
    assert (model(once) == -1).all()
    for more in (2, ROWS_IN_FLIGHT_MAX):  # it might be a step in flight that has looked these up
        assert len(model.table) == 60
        for _ in range(more):
            optimizer.zero_grad()
            model(often).sum().backward()
            optimizer.step()
    assert len(model.table) == 20
    assert (model(once) == 0).all()


def test_a_model_of_tables_alone_is_trained(connect: Connect) -> None:
    job = connect(settings=NEVER)
    model = sy.Embedding(2, optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
    model, optimizer = job.prepare(model, dense(model))
    ids = torch.tensor([3, -5, 3])
    for _ in range(2):
        optimizer.zero_grad()
        model(ids).sum().backward()
        optimizer.step()
    assert model(ids).tolist() == [[-4.0, -4.0], [-2.0, -2.0], [-4.0, -4.0]]


def test_gradients_of_several_batches_are_one_push(connect: Connect) -> None:
    alone = Model()
    optimizers = [dense(alone), sy.tables.Optimizer(alone)]
    job = connect(settings=NEVER)
    model = Model()
    model, moved = job.prepare(model, dense(model))
    for step, batch in enumerate(batches(8)):
        backward(alone, batch, step)
        with job.no_sync():
            backward(model, batch, step)
        if step % 4 == 3:
            for optimizer in (*optimizers, moved):
                optimizer.step()
                optimizer.zero_grad()
    assert job.step == 2
    assert_same(model.state_dict(), alone.state_dict())


def test_zero_grad_forgets_gradients_of_rows(connect: Connect) -> None:
    _, model, optimizer = begin(connect, NEVER, Model())
    batch = next(batches(1))
    backward(model, batch, 0)
    optimizer.zero_grad()
    optimizer.step()
    assert len(model.author.table) == 0


def test_a_schedule_moves_the_rates_of_tables(connect: Connect) -> None:
    job = connect(settings=NEVER)
    model = sy.Embedding(1, optimizer=sy.tables.SGD(lr=8.0), initial=sy.tables.zeros())
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    model, optimizer, schedule = job.prepare(model, plain, schedule)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
        schedule.step()
    assert model(torch.tensor([1])).item() == -(8.0 + 4.0 + 2.0)


def test_clipping_takes_rows_into_the_norm(connect: Connect) -> None:
    job = connect(settings=NEVER | {"job.clip.norm": 1.0})
    model = sy.Embedding(4, optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
    model, optimizer = job.prepare(model, dense(model))
    (model(torch.tensor([1, 2, 3, 4])) * 3.0).sum().backward()
    optimizer.step()
    assert job.gradient_norm == pytest.approx(12.0)
    torch.testing.assert_close(model(torch.tensor([2])), torch.full((1, 4), -0.25), rtol=1e-4, atol=0)


# ---- loss scaling


def scaled_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    loss: torch.Tensor,
    *,
    explicit: bool = False,
) -> None:
    scaler.scale(loss).backward()
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("mode", [{}, {"job.consistency.mode": "bounded"}, SYNC], ids=["async", "bounded", "sync"])
@pytest.mark.parametrize("explicit", [False, True])
def test_gradients_of_rows_are_unscaled_with_the_others(connect: Connect, mode: dict[str, Any], explicit: bool) -> None:
    """A scale that is a power of two leaves no trace."""
    alone = trained_alone(8)
    job = connect(settings=NEVER | mode)
    scaler = job.scaler(init_scale=1024.0, growth_interval=3)
    model = Model()
    model, optimizer = job.prepare(model, dense(model))
    for step, batch in enumerate(batches(8)):
        loss = (model(*batch) * float(step % 3 - 1)).sum()
        scaled_step(model, optimizer, scaler, loss, explicit=explicit)
    job.pull()
    assert_same(model.state_dict(), alone.state_dict())
    assert scaler.get_scale() == 1024.0 * 2**2


def test_rows_of_a_model_in_float16_are_unscaled_with_the_others(connect: Connect) -> None:
    """Its own gradients are widened before they are unscaled, and scaler.unscale_ is never called."""
    job = connect(settings=NEVER)
    scaler = job.scaler(init_scale=8.0)
    rows = sy.Embedding(2, optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
    model = torch.nn.ModuleDict({"rows": rows, "top": torch.nn.Linear(2, 1, bias=False)}).half()
    with torch.no_grad():
        model["top"].weight.fill_(1.0)
    model, optimizer = job.prepare(model, dense(model))
    for _ in range(2):
        scaled_step(model, optimizer, scaler, model["top"](model["rows"](torch.tensor([3, -5, 3]))).sum())
    assert model["rows"](torch.tensor([3, -5])).tolist() == [[-4.0, -4.0], [-2.0, -2.0]]


INF = float("inf")


@pytest.mark.parametrize("mode", [{}, SYNC], ids=["async", "sync"])
@pytest.mark.parametrize("explicit", [False, True])
def test_an_overflow_in_a_rows_gradient_is_one_of_the_step(
    connect: Connect, mode: dict[str, Any], explicit: bool
) -> None:
    """Nothing moves, rows and parameters, and the scale falls; the work is counted."""
    job = connect(settings=NEVER | mode)
    scaler = job.scaler(init_scale=1024.0)
    rows = sy.Embedding(2, optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
    model = torch.nn.ModuleDict({"rows": rows, "beside": torch.nn.Linear(1, 1, bias=False)})
    with torch.no_grad():
        model["beside"].weight.fill_(1.0)
    model, optimizer = job.prepare(model, dense(model, lr=1.0))

    def loss(factor: float) -> torch.Tensor:
        return (model["rows"](torch.tensor([1, 2])) * factor).sum() + model["beside"](torch.ones(1, 1)).sum()

    for factor in (1.0, INF, 1.0):
        scaled_step(model, optimizer, scaler, loss(factor), explicit=explicit)
    assert model["rows"](torch.tensor([1, 2])).tolist() == [[-2.0, -2.0], [-2.0, -2.0]]
    assert model["beside"].weight.item() == -1.0
    assert scaler.get_scale() == 512.0
    assert job.step == 3
    assert len(model["rows"].table) == 2


def test_a_model_of_tables_alone_is_scaled(connect: Connect) -> None:
    job = connect(settings=NEVER)
    scaler = job.scaler(init_scale=1024.0)
    model = sy.Embedding(1, optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
    model, optimizer = job.prepare(model, dense(model))
    for factor in (1.0, INF, 1.0):
        scaled_step(model, optimizer, scaler, (model(torch.tensor([4])) * factor).sum())
    assert model(torch.tensor([4])).item() == -2.0
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("explicit", [False, True])
def test_torchs_own_scaler_is_refused_with_tables(connect: Connect, explicit: bool) -> None:
    """It does not see rows."""
    job, model, optimizer = begin(connect, NEVER, Model())
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    with pytest.raises(errors.UnsupportedModel, match=r"use job\.scaler\(\)"):
        scaled_step(model, optimizer, scaler, model(*next(batches(1))).sum(), explicit=explicit)
    assert (job.step, len(model.author.table)) == (0, 0)


# ---- codes


@pytest.mark.parametrize("code", ["bf16", "int8"])
def test_rows_in_codes_are_learned_as_without(connect: Connect, code: str) -> None:
    """Gradients are rounded without a bias, so a row comes to where it would have come, but for a few roundings."""
    job = connect(settings=NEVER | {"job.compression.rows_push": code, "job.compression.rows_pull": code})
    model = sy.Embedding(8, optimizer=sy.tables.SGD(lr=0.25), initial=sy.tables.zeros())
    model, optimizer = job.prepare(model, dense(model))
    goal = torch.randn(30, 8, generator=torch.Generator().manual_seed(2))
    for _ in range(60):
        optimizer.zero_grad()
        (model(torch.arange(30)) - goal).square().sum().backward()
        optimizer.step()
    exact = model.state_dict()["table.rows"]
    seen = model(torch.arange(30)).detach()
    step = 1 / 250 if code == "int8" else 2.0**-7
    assert (seen - exact).abs().max() <= step * goal.abs().max()
    assert not torch.equal(seen, exact), "look-ups are coded, and state_dict is not"
    assert (exact - goal).abs().max() < 3 * step * goal.abs().max()


# ---- looked up


def test_ids_that_nobody_has_pushed_read_the_same_for_all_workers(yard: Yard) -> None:
    seen = []
    with yard.connect() as first, yard.connect() as second:
        for seed, job in enumerate((first, second)):
            model = sy.Embedding(DIM, table=sy.tables.Table(DIM, name="t", seed=seed))
            model, _ = job.prepare(model, dense(model))
            seen.append(model(torch.arange(-50, 50)).detach())
    assert torch.equal(*seen)
    assert seen[0].unique().numel() > 200


def test_look_ups_that_are_large_are_asked_for_in_pieces(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_codec.questions, "__defaults__", (1_000,))
    alone = trained_alone(3)
    _, model, optimizer = begin(connect, NEVER, Model())
    train(model, [optimizer], 3)
    ids = torch.arange(-40, 40) * 0x1_0000_0001
    assert torch.equal(model.author(ids), alone.author(ids))
    assert len(row_codec.questions([(0, unique_ids(ids.numpy()), DIM)], [0])) > 1


def test_evaluation_reads_the_newest_rows_and_makes_none(connect: Connect) -> None:
    _, model, optimizer = begin(connect, NEVER, Model())
    twin = copy.deepcopy(model)
    train(model, [optimizer], 2)
    rows = len(model.author.table)
    with torch.no_grad():
        assert torch.equal(twin.author(torch.arange(9)), model.author(torch.arange(9)))
    assert len(model.author.table) == rows
    with pytest.raises(errors.InvalidRequest, match="rows are on servers"):
        pickle.dumps(model)


# ---- first values, and what is kept


def test_rows_that_were_loaded_before_are_the_first(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_codec, "PUSH_BYTES_EACH", 600)
    job = connect(settings=NEVER)
    model = Model()
    weights = torch.arange(400.0).reshape(100, DIM)
    model.author.table.load(weights)
    model, _ = job.prepare(model, dense(model))
    assert torch.equal(model.author(torch.arange(100)), weights)
    assert len(model.author.table) == 100
    with pytest.raises(errors.InvalidRequest, match="of a job"):
        model.author.table.load(weights)
    with pytest.raises(RuntimeError, match="of a job"):
        model.load_state_dict(model.state_dict())
    assert torch.equal(model.author(torch.arange(100)), weights)


def test_rows_are_exported_and_go_on_in_another_model(connect: Connect, tmp_path: Path) -> None:
    job, model, optimizer = begin(connect, NEVER, Model())
    train(model, [optimizer], 4)
    model.words.table.export(tmp_path / "words.safetensors")
    saved = model.state_dict()
    job.close()
    other = Model()
    other.load_state_dict(saved)
    assert_same(other.state_dict(), saved)
    again = sy.tables.Table(2)
    again.load(tmp_path / "words.safetensors")
    assert len(again) == len(other.words.table)
    with pytest.raises(errors.InvalidRequest, match="whose job has been left"):
        model.author(torch.tensor([1]))


@pytest.mark.parametrize("name", ["words.safetensors", "words.parquet"])
def test_an_export_has_the_rows_of_one_partition_at_a_time(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A table may be larger than its worker."""
    _, model, optimizer = begin(connect, {**NEVER, "job.partitions": 4}, Model())
    train(model, [optimizer], 4)
    words = model.words.table
    read, asked, rows_read = RowReads.read_rows, [], []

    def reading(self: RowReads, table: int, dim: int, partition: PartitionId) -> list[tuple[np.ndarray, np.ndarray]]:
        assert sum(each() is not None for each in rows_read) <= 1  # what is written now
        found = read(self, table, dim, partition)
        asked.append(partition)
        rows_read.extend(weakref.ref(rows) for _, rows in found)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(RowReads, "read_rows", reading)
        words.export(tmp_path / name)
    assert asked == [0, 1, 2, 3]
    again = sy.tables.Table(2)
    again.load(tmp_path / name)
    every, expected = again.everything(), words.everything()
    assert every.ids.tolist() == expected.ids.tolist()
    assert every.rows.tobytes() == expected.rows.tobytes()
    assert len(rows_read) >= 3
