"""`job.train_step`: the same steps as a script takes with backward and optimizer.step(), in every mode and strategy."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.domain import errors
from tests.support.alone import Connect

pytestmark = pytest.mark.usefixtures("alone")

RANKS = {"job.consistency.mode": "sync", "job.consistency.logical_ranks": 2}
MODES: Mapping[str, dict[str, Any]] = {
    "async": {},
    "bounded": {"job.consistency.mode": "bounded", "job.consistency.staleness": 2},
    "sync": RANKS,
    "hybrid": {**RANKS, "job.consistency.mode": "hybrid"},
    "local": {**RANKS, "job.consistency.mode": "local", "job.consistency.steps": 3},
    "overlapped": {**RANKS, "worker.exchange": "overlapped"},
    "mirrored": {**RANKS, "job.strategy": "multi_worker_mirrored"},
}
SAMPLES, BATCH = 48, 4


def twins() -> tuple[torch.nn.Module, torch.nn.Module, TensorDataset]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
    x = torch.randn(SAMPLES, 3, dtype=torch.float64)
    return model, copy.deepcopy(model), TensorDataset(x, x.sum(1, keepdim=True).cos())


def by_hand(job: sy.Job, model: torch.nn.Module, data: TensorDataset, *, accumulate: int) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, prepared, schedule = job.prepare(model, optimizer, scheduler)
    losses = []
    for x, y in job.batches(data, batch_size=BATCH, accumulate=accumulate):
        loss = F.mse_loss(model(x), y)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if job.step_due:
            prepared.step()
            prepared.zero_grad()
            schedule.step()
    return losses


def by_train_step(job: sy.Job, model: torch.nn.Module, data: TensorDataset, *, accumulate: int) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    job.prepare(model, optimizer, scheduler, loss=F.mse_loss)
    batches = job.batches(data, batch_size=BATCH, accumulate=accumulate)
    return [job.train_step(*batch).item() for batch in batches]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_its_steps_are_those_of_a_script(connect: Connect, mode: str, accumulate: int) -> None:
    model, other, data = twins()
    with contextlib.closing(connect(settings=MODES[mode])) as job:
        expected = by_hand(job, model, data, accumulate=accumulate)
    with contextlib.closing(connect(settings=MODES[mode])) as job:
        found = by_train_step(job, other, data, accumulate=accumulate)
    assert found == expected
    assert [*map(torch.Tensor.tolist, model.parameters())] == [*map(torch.Tensor.tolist, other.parameters())]


@pytest.mark.parametrize("settings", [{}, {"job.consistency.mode": "sync"}], ids=["async", "sync"])
def test_the_jobs_scaler_scales_its_loss(connect: Connect, settings: dict[str, Any]) -> None:
    model, plain, data = twins()
    job = connect(settings=settings)
    scaler = job.scaler(init_scale=1024.0, growth_interval=2)
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss)
    x, y = data.tensors
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        broken = float("inf") if step == 1 else 1.0
        job.train_step(x, y * broken)
        if step != 1:
            optimizer.zero_grad()
            F.mse_loss(plain(x), y).backward()
            optimizer.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert scaler.get_scale() == 1024.0


def test_autocast_around_the_loop_is_for_the_forward(connect: Connect) -> None:
    """torch keeps what it has cast until the outermost block ends, but parameters change with each step."""
    torch.manual_seed(5)
    model = torch.nn.Linear(3, 1)
    plain, x = copy.deepcopy(model), torch.randn(8, 3)
    y, rates = x.sum(1, keepdim=True), {"lr": 0.1}
    job = connect()
    job.prepare(model, torch.optim.SGD(model.parameters(), **rates), loss=F.mse_loss)
    optimizer, losses = torch.optim.SGD(plain.parameters(), **rates), []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [job.train_step(x, y).item() for _ in range(5)]
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(plain(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert found == losses


def test_a_shorter_step_has_the_mean_of_its_batches(connect: Connect) -> None:
    """The last step of an epoch has one batch of the two, and job.no_sync adds three."""
    model, plain, data = twins()
    job = connect()
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, y = data.tensors

    def expect(*spans: slice) -> None:
        optimizer.zero_grad()
        (sum(F.mse_loss(plain(x[span]), y[span]) for span in spans) / len(spans)).backward()
        optimizer.step()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)

    for batch in job.batches(TensorDataset(x[:12], y[:12]), batch_size=4, shuffle=False, accumulate=2):
        job.train_step(*batch)
        if job.step == 1 and job.step_due:
            expect(slice(0, 4), slice(4, 8))
    expect(slice(8, 12))
    with job.no_sync():
        job.train_step(x[:4], y[:4])
        job.train_step(x[4:8], y[4:8])
    job.train_step(x[8:12], y[8:12])
    expect(slice(0, 4), slice(4, 8), slice(8, 12))


def test_what_it_cannot_do_is_refused(connect: Connect) -> None:
    model, _, data = twins()
    x, y = data.tensors
    job = connect()
    with pytest.raises(errors.InvalidRequest, match=r"call job\.prepare"):
        job.train_step(x, y)
    parameters = model.parameters()
    job.prepare(model, torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(errors.InvalidRequest, match=r"job.train_step in a job without a loss.*loss=f"):
        job.train_step(x, y)


def test_variables_without_a_model_have_no_train_step(connect: Connect) -> None:
    job = connect()
    job.register({"w": torch.zeros(2)})
    with pytest.raises(errors.InvalidRequest, match="without a model"):
        job.train_step(torch.zeros(2), torch.zeros(2))


def sum_of(output: torch.Tensor, target: torch.Tensor) -> Any:
    return float(output.sum() - target.sum())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, target: (output - target).square(), r"a loss of shape \(48, 1\)"),
        (lambda output, target: (output - target).square().mean().detach(), "does not depend on the model"),
        (lambda output, target: (target + 0 * output.detach()).requires_grad_().mean(), "does not depend on the model"),
        (sum_of, "a loss of type float"),
    ],
    ids=["not_scalar", "detached", "of_others", "number"],
)
def test_a_loss_without_a_gradient_is_refused(connect: Connect, loss: Any, message: str) -> None:
    model, _, data = twins()
    job = connect()
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    with pytest.raises(errors.InvalidRequest, match=message):
        job.train_step(*data.tensors)
    assert job.step == 0


def test_a_loss_is_a_function_and_a_batch_has_a_target(connect: Connect) -> None:
    model, _, data = twins()
    job = connect()
    wrong: Any = 0.5
    with pytest.raises(errors.InvalidRequest, match="loss=float"):
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=wrong)
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss)
    with pytest.raises(errors.InvalidRequest, match="of 1 values"):
        job.train_step(data.tensors[0])
