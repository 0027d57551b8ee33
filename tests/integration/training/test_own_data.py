"""A script's own data: random numbers and a number for each worker, steps for a schedule, samples in `status`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import shardyard as sy
from tests.support.alone import SYNC, SYNC_2, Connect, local_yard, status

pytestmark = pytest.mark.usefixtures("alone")

LOCAL = {"job.consistency.mode": "local", "job.consistency.logical_ranks": 2, "job.consistency.steps": 3}
HYBRID = SYNC_2 | {"job.consistency.mode": "hybrid"}


def prepared(job: sy.Job) -> tuple[torch.nn.Linear, Any]:
    model = torch.nn.Linear(2, 1)
    return job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def order_of(length: int = 100) -> list[int]:
    return [int(index) for (index,) in DataLoader(TensorDataset(torch.arange(length)), batch_size=1, shuffle=True)]


# ---- random numbers


def test_workers_begin_with_one_model_and_then_draw_numbers_of_their_own() -> None:
    firsts, orders = [], []
    with local_yard({}) as (_, join):
        jobs = []
        for _ in range(2):
            jobs.append(join())
            model, _ = prepared(jobs[-1])
            firsts.append(model.weight.tolist())
            orders.append(order_of())
        for job in jobs:
            job.close()
    assert firsts[0] == firsts[1]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("settings", [{}, SYNC])
def test_own_numbers_are_the_same_in_each_run_with_the_same_seed(connect: Connect, settings: dict[str, Any]) -> None:
    found = []
    for seed in (1, 1, 2):
        job = connect(settings=settings | {"job.seed": seed})
        prepared(job)
        found.append(order_of())
        job.close()
    assert found[0] == found[1] != found[2]


def test_registered_variables_end_the_common_numbers_too(connect: Connect) -> None:
    job = connect()
    common = torch.get_rng_state()
    job.register({"w": torch.zeros(1)})
    assert not torch.equal(torch.get_rng_state(), common)


# ---- a number for each worker


def test_each_living_worker_has_the_lowest_free_rank() -> None:
    with local_yard({"job.workers_expected": 2}) as (_, join):
        first, second, third = join(), join(), join()
        assert [job.rank for job in (first, second, third)] == [0, 1, 2]
        assert [job.world_size for job in (second, third)] == [2, 3]
        first._session.refresh()
        assert first.world_size == 3
        second.close("killed")
        fourth = join()
        assert fourth.rank == 1
        third.close("killed")
        first._session.refresh()
        assert (first.rank, first.world_size) == (0, 2)
        fourth.close()
        first.close()


# ---- steps of a schedule


@pytest.mark.parametrize("settings", [{}, SYNC_2, HYBRID, LOCAL, {"job.consistency.mode": "bounded"}])
@pytest.mark.parametrize("reads", [{}, {"accumulate": 3}, {"drop_last": True}, {"accumulate": 2, "drop_last": True}])
def test_cosine_ends_where_the_data_ends(connect: Connect, settings: dict[str, Any], reads: dict[str, Any]) -> None:
    job = connect(settings=settings)
    data = TensorDataset(torch.randn(75, 2))
    total = job.steps_total(data, batch_size=4, epochs=2, **reads)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    model, prepared, schedule = job.prepare(model, optimizer, schedule)
    rates = []
    for (x,) in job.batches(data, batch_size=4, epochs=2, **reads):
        model(x).sum().backward()
        if job.step_due:
            rates.append(schedule.get_last_lr()[0])
            prepared.step()
            prepared.zero_grad()
    assert job.step == total
    schedule.step()
    assert rates[0] == max(rates)
    assert min(rates) > 0
    assert schedule.get_last_lr()[0] == pytest.approx(0)


def test_steps_are_those_of_a_loader_or_of_so_many_samples(connect: Connect) -> None:
    job = connect()
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=4)
    assert job.steps_total(loader, epochs=2) == job.steps_total(10, batch_size=4, epochs=2) == 6
    assert job.steps_total(loader.dataset, batch_size=4, drop_last=True) == 2
    with pytest.raises(sy.errors.InvalidRequest, match="no length"):
        job.steps_total(each for each in range(3))  # type: ignore[arg-type]
    with pytest.raises(sy.errors.InvalidRequest, match="batch_size 0"):
        job.steps_total(10, batch_size=0)


# ---- samples, and samples that all workers read


@pytest.mark.parametrize("settings", [{}, SYNC, LOCAL | {"job.consistency.logical_ranks": 1}])
def test_status_counts_the_samples_of_a_loader_of_ones_own(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with local_yard(settings) as (yard, join):
        job = join()
        model, optimizer = prepared(job)
        with caplog.at_level("WARNING"):
            for (x,) in DataLoader(TensorDataset(torch.randn(64, 2)), batch_size=10, shuffle=True):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        job.close()
        assert status(yard).samples == 64
    assert sum("not leased" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("settings", [{}, SYNC])
def test_status_counts_the_samples_of_job_batches_as_before(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with local_yard(settings) as (yard, join):
        job = join()
        model, optimizer = prepared(job)
        with caplog.at_level("WARNING"):
            for (x,) in job.batches(DataLoader(TensorDataset(torch.randn(30, 2)), batch_size=8)):
                optimizer.zero_grad()
                (model(x) + model(x)).sum().backward()
                optimizer.step()
        job.close()
        assert status(yard).samples == 30
    assert "not leased" not in caplog.text
