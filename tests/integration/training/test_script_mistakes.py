"""Mistakes in scripts that would train nothing, or something else, without a word: each is an error or a warning."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import shardyard as sy
from shardyard.domain import errors
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.session.drain import Drained
from tests.support.alone import SYNC, SYNC_2, Connect, Counted, local_yard, status

LOCAL = {"job.consistency.mode": "local", "job.consistency.steps": 2, "job.consistency.logical_ranks": 1}
TWICE = r"^a second job\.prepare or job\.register in one job"
DATA = TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))


def mlp() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def adam(model: torch.nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


# ---- the optimizer belongs to another model


@pytest.mark.parametrize("settings", [{}, LOCAL])
def test_a_model_that_is_built_again_after_its_optimizer_is_refused(
    connect: Connect, settings: dict[str, object]
) -> None:
    optimizer = adam(mlp())
    with pytest.raises(errors.UnsupportedModel, match=r"^all of the optimizer's 4 parameters .*optimizer\.0\.0 of sh"):
        connect(settings=settings).prepare(mlp(), optimizer)


def test_a_layer_that_is_replaced_after_the_optimizer_was_built_is_refused(connect: Connect) -> None:
    model = mlp()
    optimizer = adam(model)
    model[2] = torch.nn.Linear(8, 5)
    with pytest.raises(errors.UnsupportedModel, match=r"^2 of the optimizer's 4 .*not in the optimizer \(2\.we"):
        connect().prepare(model, optimizer)


def test_parameters_that_are_left_out_of_the_optimizer_stay_as_in_torch(connect: Connect) -> None:
    model = mlp()
    before = model[2].weight.detach().clone()
    model, optimizer = connect().prepare(model, adam(model[0]))
    step(model, optimizer)
    assert torch.equal(model[2].weight, before)


def test_model_and_optimizer_that_changed_places_are_refused(connect: Connect) -> None:
    model = mlp()
    with pytest.raises(
        errors.InvalidRequest, match=r"^job\.prepare\(Adam, Sequential\).*a model and then its optimizer"
    ):
        connect().prepare(adam(model), model)  # type: ignore[type-var]


# ---- job.prepare is missing


def test_training_without_prepare_is_an_error_and_the_job_has_failed(
    alone: None, caplog: pytest.LogCaptureFixture
) -> None:
    with local_yard({}) as (yard, join):
        model = mlp()
        optimizer = adam(model)
        job = join()
        for _ in range(3):
            step(model, optimizer)
        with pytest.raises(errors.InvalidRequest, match=r"^3 optimizer steps in this process, and no job\.prepare"):
            job.close()
        assert status(yard).state == wire.JOB_STATE_FAILED
    assert sum("an optimizer takes a step before job.prepare" in each for each in warnings_in(caplog)) == 1


def test_a_script_that_only_looks_at_the_job_is_told_that_it_trained_nothing(
    alone: None, caplog: pytest.LogCaptureFixture
) -> None:
    with local_yard({}) as (yard, join):
        with join() as job:
            assert job.step == 0
        job = status(yard)
        assert (job.state, "nothing was trained" in job.failure.what) == (wire.JOB_STATE_FAILED, True)
    assert any("without job.prepare or job.register: nothing was trained" in each for each in warnings_in(caplog))


def drained(job: sy.Job) -> None:
    job.drain()
    with pytest.raises(Drained):
        job.prepare(model := mlp(), adam(model))


@pytest.mark.parametrize("leaves", [sy.Job.stop, drained])
def test_a_worker_that_is_told_to_leave_before_prepare_is_not_told_that_it_trained_nothing(
    connect: Connect, caplog: pytest.LogCaptureFixture, leaves: Callable[[sy.Job], None]
) -> None:
    job = connect()
    leaves(job)
    job.close()
    assert not any("nothing was trained" in each for each in warnings_in(caplog))


def test_steps_before_prepare_and_after_the_job_are_the_scripts_own(connect: Connect) -> None:
    model = mlp()
    optimizer = adam(model)
    job = connect()
    own = torch.nn.Linear(4, 1)
    step(own, adam(own))
    job.prepare(model, optimizer)
    job.close()
    step(model, optimizer)
    step(own, adam(own))
    assert job._loop.unprepared.count == 1


# ---- the result of job.prepare is not used


@pytest.mark.parametrize("settings", [{}, SYNC, LOCAL])
def test_a_step_of_the_optimizer_that_was_given_to_prepare_is_refused(
    connect: Connect, settings: dict[str, object]
) -> None:
    model = mlp()
    optimizer = adam(model)
    connect(settings=settings).prepare(model, optimizer)
    with pytest.raises(errors.InvalidRequest, match=r"step\(\) of the Adam that was given to job\.prepare"):
        step(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    with pytest.raises(errors.InvalidRequest, match=r"use the optimizer that job\.prepare returned"):
        scaler.step(optimizer)


def test_a_scheduler_that_is_built_on_it_follows_without_a_warning_of_torch(connect: Connect) -> None:
    model = mlp()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, moved = connect().prepare(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            step(model, moved)
            scheduler.step()
    assert moved.param_groups[0]["lr"] == 0.0025


# ---- job.prepare twice


@pytest.mark.parametrize("settings", [{}, LOCAL])
def test_a_second_prepare_says_that_there_was_a_first(connect: Connect, settings: dict[str, object]) -> None:
    job, model = connect(settings=settings), mlp()
    optimizer = adam(model)
    prepared = job.prepare(model, optimizer)
    for given in (prepared, (model, optimizer), (mlp(), None)):
        with pytest.raises(errors.InvalidRequest, match=TWICE):
            job.prepare(given[0], given[1] or adam(given[0]))
    if not settings:
        with pytest.raises(errors.InvalidRequest, match=TWICE):
            job.register({"w": torch.zeros(1)})


def test_the_optimizer_of_another_job_is_refused(connect: Connect) -> None:
    job, model = connect(), mlp()
    model, optimizer = job.prepare(model, adam(model))
    job.close()
    with pytest.raises(errors.UnsupportedOptimizer, match=r"an optimizer that job\.prepare of another job"):
        connect().prepare(model, optimizer)


# ---- loaders of unequal length


def test_a_step_that_lacks_a_rank_at_the_end_is_warned_about(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """One worker computes both ranks, and its own loader has an odd number of batches."""
    job, model = connect(settings=SYNC_2), mlp()
    model, optimizer = job.prepare(model, adam(model))
    for x, y in DataLoader(DATA, batch_size=7):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert job.step == 2
    job.close()
    (said,) = [each for each in warnings_in(caplog) if "leaves in the middle of step" in each]
    assert "step 2: it lacks logical rank 1, so this worker's last batch does not count" in said


def test_the_worker_with_the_longer_loader_is_warned(alone: None, caplog: pytest.LogCaptureFixture) -> None:
    given = SYNC_2 | {"job.workers_expected": 2, "job.rank_grace_ms": 0}
    with local_yard(given) as (_, join), ThreadPoolExecutor(2) as pool:
        met = threading.Barrier(2)

        def train(job: sy.Job, steps: int) -> None:
            with job:
                counted = Counted(job, 4)
                job._session.refresh()  # each has one rank from the first step on
                met.wait(20)
                for _ in range(steps):
                    counted.step(torch.tensor([0]))

        jobs = [join(), join()]
        for done in [pool.submit(train, job, steps) for job, steps in zip(jobs, (3, 4), strict=True)]:
            done.result(30)
    assert sum("leaves in the middle of step 3" in each for each in warnings_in(caplog)) == 1


def test_equally_long_loaders_are_not_warned_about(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    job, model = connect(settings=SYNC_2), mlp()
    model, optimizer = job.prepare(model, adam(model))
    for x, y in DataLoader(DATA, batch_size=8):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    job.close()
    assert not any("leaves in the middle" in each for each in warnings_in(caplog))


# ---- values that are changed in this process


def changes_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in warnings_in(caplog) if "the script has changed parameter" in each]


@pytest.mark.parametrize("settings", [{}, SYNC_2])
def test_values_that_are_loaded_after_prepare_are_warned_about_once(
    connect: Connect, caplog: pytest.LogCaptureFixture, settings: dict[str, object]
) -> None:
    model = mlp()
    model, optimizer = connect(settings=settings).prepare(model, adam(model))
    step(model, optimizer)
    for _ in range(2):
        model.load_state_dict(mlp().state_dict())
        step(model, optimizer)
    (said,) = changes_in(caplog)
    assert "parameter '0.weight'" in said


def test_values_that_are_put_back_are_not_warned_about(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """As with an average of the weights that is only evaluated."""
    model = mlp()
    model, optimizer = connect().prepare(model, adam(model))
    for _ in range(3):
        step(model, optimizer)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(mlp().state_dict())
        model.load_state_dict(kept)
    step(model, optimizer)
    assert changes_in(caplog) == []


@pytest.mark.parametrize("settings", [LOCAL, {"worker.exchange": "overlapped"}, {"worker.exchange": "delayed"}, SYNC_2])
def test_training_alone_is_not_warned_about(
    connect: Connect, caplog: pytest.LogCaptureFixture, settings: dict[str, object]
) -> None:
    model = torch.nn.Sequential(mlp(), torch.nn.BatchNorm1d(3)).bfloat16()
    model, optimizer = connect(settings=settings).prepare(model, adam(model))
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 4).bfloat16()).square().sum().backward()
        optimizer.step()
    assert changes_in(caplog) == []
