"""Learning rates as a function of the job's step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, SequentialLR, StepLR

from shardyard.domain.errors import InvalidRequest, UnsupportedOptimizer
from shardyard_worker.optimizers.lr_schedule import JobScheduler


class Clock:
    """The job's step, as a worker sees it."""

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def __call__(self) -> int:
        return self.step


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)


def rates_of_torch(steps: int) -> list[float]:
    plain = optimizer()
    scheduler = CosineAnnealingLR(plain, T_max=20)
    rates = []
    for _ in range(steps):
        rates.append(plain.param_groups[0]["lr"])
        plain.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("calls", [0, 1, 2, 5])
def test_the_rate_does_not_depend_on_how_often_step_is_called(calls: int) -> None:
    plain, clock = optimizer(), Clock()
    schedule = JobScheduler(CosineAnnealingLR(plain, T_max=20), plain, clock)
    rates = []
    for _ in range(10):
        schedule.follow()
        rates.append(plain.param_groups[0]["lr"])
        clock.step += 1
        for _ in range(calls):
            schedule.step()
    assert rates == rates_of_torch(10)


def test_one_who_joins_late_has_the_rate_of_the_job() -> None:
    plain, clock = optimizer(), Clock()
    schedule = JobScheduler(CosineAnnealingLR(plain, T_max=20), plain, clock)
    clock.step = 7
    schedule.follow()
    assert plain.param_groups[0]["lr"] == rates_of_torch(8)[7]
    assert schedule.get_last_lr() == [plain.param_groups[0]["lr"]]


def test_job_that_goes_back_has_the_rate_of_the_earlier_step() -> None:
    plain, clock = optimizer(), Clock()
    schedule = JobScheduler(CosineAnnealingLR(plain, T_max=20), plain, clock)
    expected = rates_of_torch(10)
    for step in (7, 3, 9, 0, 5):
        clock.step = step
        schedule.follow()
        assert plain.param_groups[0]["lr"] == expected[step], step


def test_composed_schedulers_follow() -> None:
    plain, clock = optimizer(), Clock(3)
    parts = [StepLR(plain, 1, 0.5), StepLR(plain, 1, 0.1)]
    JobScheduler(SequentialLR(plain, parts, [2]), plain, clock)
    assert plain.param_groups[0]["lr"] == pytest.approx(0.5 * 0.1)


def test_torch_does_not_warn_of_the_order_of_steps() -> None:
    plain, clock = optimizer(), Clock()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = JobScheduler(CosineAnnealingLR(plain, T_max=20), plain, clock)
        for _ in range(3):
            clock.step += 1
            schedule.step()


def test_a_scheduler_that_looks_at_a_metric_is_refused() -> None:
    plain = optimizer()
    with pytest.raises(UnsupportedOptimizer, match="ReduceLROnPlateau") as caught:
        JobScheduler(ReduceLROnPlateau(plain), plain, Clock())
    assert caught.value.todo_text


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="another optimizer"):
        JobScheduler(StepLR(optimizer(), 1), optimizer(), Clock())


def test_its_state_can_be_read() -> None:
    plain, clock = optimizer(), Clock(4)
    assert JobScheduler(StepLR(plain, 1), plain, clock).state_dict()["last_epoch"] == 4
