"""Local steps: their numbers, the inner optimizer's state for each logical rank, rates at a round's start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardyard.config.settings import ConsistencySettings
from shardyard.domain import errors
from shardyard.domain.epochs import EpochPlan
from shardyard.domain.ids import Rank
from shardyard_worker.consistency.local_sgd import InnerOptimizer, LocalOptimizer, Rounds, outer_optimizer
from shardyard_worker.optimizers.lr_schedule import JobScheduler


def test_the_outer_optimizer_is_sgd_with_nesterov_momentum() -> None:
    (group,) = outer_optimizer(ConsistencySettings()).groups
    assert group == (0.7, 0.9, 0.0, 0.0, 1.0, 0.0)
    plain = ConsistencySettings(outer_lr=1.0, outer_momentum=0.0)
    assert outer_optimizer(plain).groups == ((1.0, 0.0, 0.0, 0.0, 0.0, 0.0),)


# ---- numbers


def test_steps_are_counted_as_they_are_taken() -> None:
    rounds = Rounds(10)
    assert [rounds.steps_before(each) for each in (0, 1, 7)] == [0, 10, 70]
    short = EpochPlan(110, 5, 2, drop_last=False, local_steps=10)  # 11 steps an epoch: rounds of 10 and 1
    rounds.add(0, short, epochs=2)
    assert [rounds.steps_before(each) for each in range(5)] == [0, 10, 11, 21, 22]
    assert rounds.steps_before(6) == 42, "what comes behind all that is known is whole"
    rounds.add(4, EpochPlan(30, 5, 2, drop_last=True, local_steps=10), epochs=1)
    assert [rounds.steps_before(each) for each in (3, 4, 5, 6)] == [21, 22, 25, 35]


def test_a_data_set_that_is_opened_again_is_the_same() -> None:
    rounds = Rounds(10)
    for _ in range(2):
        rounds.add(0, EpochPlan(110, 5, 2, drop_last=False, local_steps=10), epochs=1)
    assert rounds.steps_before(2) == 11


# ---- inner states


def adam(*, steps: int = 0) -> tuple[torch.nn.Parameter, InnerOptimizer]:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    for _ in range(steps):
        take(parameter, optimizer)
    return parameter, InnerOptimizer(optimizer)


def take(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, gradient: float = 1.0) -> None:
    parameter.grad = torch.full((3,), gradient)
    optimizer.step()


def count(inner: InnerOptimizer) -> float:
    return sum(float(state["step"]) for state in inner.optimizer.state.values())


def test_each_rank_goes_on_with_its_own_state() -> None:
    parameter, inner = adam()
    for round_ in range(3):
        for rank, steps in (Rank(0), 2), (Rank(1), 1):
            inner.begin(rank, round_)
            assert count(inner) == round_ * steps
            for _ in range(steps):
                take(parameter, inner.optimizer, gradient=1.0 + rank)
            inner.end(keeps=True)
    inner.begin(Rank(0), 3)
    (state,) = inner.optimizer.state.values()
    assert float(state["exp_avg"][0]) == pytest.approx(1 - 0.9**6)
    assert inner.lost == 0


@pytest.mark.parametrize("again", [1, 2])
def test_a_round_that_is_computed_again_begins_with_the_state_that_it_had(again: int) -> None:
    parameter, inner = adam()
    for round_ in range(2):
        inner.begin(Rank(0), round_)
        take(parameter, inner.optimizer)
        inner.end(keeps=True)
    for _ in range(again):
        inner.begin(Rank(0), 1)
        assert count(inner) == 1
        take(parameter, inner.optimizer, gradient=-5.0)
        inner.end(keeps=True)
    inner.begin(Rank(0), 2)
    assert count(inner) == 2
    (state,) = inner.optimizer.state.values()
    assert float(state["exp_avg"][0]) == pytest.approx(0.9 * 0.1 - 5 * 0.1)


def test_a_round_that_does_not_count_leaves_no_trace() -> None:
    parameter, inner = adam()
    inner.begin(Rank(0), 0)
    take(parameter, inner.optimizer)
    inner.end(keeps=True)
    inner.begin(Rank(0), 1)
    take(parameter, inner.optimizer, gradient=float("nan"))
    inner.end(keeps=False)
    inner.begin(Rank(0), 2)
    (state,) = inner.optimizer.state.values()
    assert float(state["exp_avg"][0]) == pytest.approx(0.1)
    assert count(inner) == 1


def test_a_rank_that_comes_from_elsewhere_begins_anew_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    parameter, inner = adam(steps=2)
    inner.begin(Rank(0), 0)
    assert count(inner) == 2, "what the optimizer had when it was prepared"
    take(parameter, inner.optimizer)
    inner.end(keeps=True)
    assert inner.lost == 0
    with caplog.at_level("WARNING"):
        inner.begin(Rank(1), 1)
        assert count(inner) == 2
        take(parameter, inner.optimizer)
        inner.end(keeps=True)
    assert inner.lost == 1
    assert "logical rank 1 began round 1 without the inner optimizer's state" in caplog.text


def test_an_optimizer_without_state_loses_none() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    inner = InnerOptimizer(torch.optim.SGD([parameter], lr=0.1))
    inner.begin(Rank(0), 5)
    take(parameter, inner.optimizer)
    inner.end(keeps=True)
    assert inner.lost == 0


def test_states_of_ranks_that_are_others_are_given_up() -> None:
    parameter, inner = adam()
    for rank, round_ in (Rank(0), 0), (Rank(1), 0), (Rank(1), 1), (Rank(1), 2):
        inner.begin(rank, round_)
        take(parameter, inner.optimizer)
        inner.end(keeps=True)
    assert set(inner._after) == set(inner._before) == {Rank(1)}


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adagrad([p], initial_accumulator_value=2.0),
        lambda p: torch.optim.LBFGS([p], history_size=3),
        lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9),
    ],
)
def test_any_optimizer_has_a_state_that_can_be_put_back(make: Any) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = (parameter - 3).square().sum()
        loss.backward()
        return float(loss.detach())

    found = []
    for interrupted in (False, True):
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = make(parameter)
        inner = InnerOptimizer(optimizer)
        for round_ in range(3):
            if interrupted:
                before = parameter.detach().clone()
                inner.begin(Rank(0), round_)
                optimizer.step(closure)
                inner.end(keeps=True)
                parameter.data = before
            inner.begin(Rank(0), round_)
            optimizer.step(closure)
            inner.end(keeps=True)
        found.append(parameter.detach())
    assert torch.equal(*found)


# ---- rates


def test_rates_go_back_to_where_a_round_began() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    at = [0]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    schedule = JobScheduler(scheduler, optimizer, lambda: at[0])
    steps = 0
    step = scheduler.step

    def counting() -> None:
        nonlocal steps
        steps += 1
        step()

    scheduler.step = counting  # type: ignore[method-assign]
    for first in (4, 8):
        at[0] = first
        schedule.follow()
        schedule.keep()
        for number in (*range(first, first + 4), *range(first, first + 4)):
            at[0] = number
            schedule.follow()
            assert optimizer.param_groups[0]["lr"] == 0.5**number
    assert steps == 8 + 3 + 3 + 3, "none of the steps before a round is taken again"
    at[0] = 2
    schedule.follow()
    assert optimizer.param_groups[0]["lr"] == 0.25


# ---- the optimizer that a script is given


def test_the_optimizer_given_back_refuses_what_would_be_lost() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    inner = torch.optim.Adam([parameter], lr=0.5)
    optimizer = LocalOptimizer(inner, lambda closure: None)
    with pytest.raises(errors.UnsupportedOptimizer, match=r"added after job\.prepare"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(errors.UnsupportedOptimizer, match="load_state_dict"):
        optimizer.load_state_dict({})
    parameter.grad = torch.ones(1)
    inner.step()
    assert optimizer.state_dict()["state"][0]["step"] == 1
    assert optimizer.param_groups is inner.param_groups
    optimizer.zero_grad()
    assert parameter.grad is None
