"""An optimizer's state in torch's format: out of a job into plain torch, and from plain torch into a job."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import shardyard as sy
from shardyard.domain import errors
from shardyard_worker.exchange.optimizer_exchange import OptimizerExchange
from shardyard_worker.training.trainer import Trainer
from tests.support.alone import SYNC, SYNC_2, Connect, local_yard
from tests.support.torch_optimizers import TORCH

OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "dampening": 0.1},
    "adam": {"amsgrad": True},
    "adagrad": {"initial_accumulator_value": 0.1},
    "rmsprop": {"momentum": 0.5, "centered": True},
}
STEPS = 6
CUT = {"job.block_bytes": 64, "job.partitions": 5}


class Net(torch.nn.Module):
    """`idle` never has a gradient, `rare` has one in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 2, bias=False), torch.nn.BatchNorm2d(4), torch.nn.Flatten()
        )
        self.head = torch.nn.Linear(4 * 16, 3)
        self.idle, self.rare = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, rarely: bool) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x))
        return found * self.rare if rarely else found

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"params": self.body.parameters()},
            {"params": [*self.head.parameters(), self.idle, self.rare], "lr": 0.02},
        ]


def made(kind: str, model: Net) -> torch.optim.Optimizer:
    return TORCH[kind](model.groups(), lr=0.01, **OPTIONS.get(kind, {}))


def train(model: Net, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    generator = torch.Generator().manual_seed(7)
    for step in range(last):
        x = torch.randn(8, 3, 5, 5, generator=generator, dtype=torch.float64)
        if step >= first:
            optimizer.zero_grad()
            model(x, rarely=step % 3 == 1).square().mean().backward()
            optimizer.step()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for ours, theirs in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert {name: ours[name] for name in theirs} == theirs
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert found["state"][index].keys() == state.keys()
        for name, tensor in state.items():
            ours = found["state"][index][name]
            assert (ours.shape, ours.dtype) == (tensor.shape, tensor.dtype), (index, name)
            torch.testing.assert_close(ours, tensor, rtol=1e-9 if tensor.dtype is torch.float64 else 1e-6, atol=1e-12)


def assert_same_values(model: Net, plain: Net) -> None:
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9, msg=name)


def saved(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As a user saves and loads them."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


@pytest.mark.parametrize("settings", [{}, SYNC], ids=["async", "sync"])
@pytest.mark.parametrize("kind", TORCH)
def test_training_goes_from_torch_into_a_job_and_back_into_torch(
    connect: Connect, kind: str, settings: dict[str, Any]
) -> None:
    plain = Net().double()
    start = copy.deepcopy(plain)
    theirs = made(kind, plain)
    train(plain, theirs, 0, 3 * STEPS)

    theirs = made(kind, start)
    train(start, theirs, 0, STEPS)
    file = saved(start, theirs)

    model = Net().double()
    model.load_state_dict(file["model"])
    optimizer = made(kind, model)
    optimizer.load_state_dict(file["optimizer"])
    job = connect(settings=CUT | settings)
    model, moved = job.prepare(model, optimizer)
    assert_same(moved.state_dict(), file["optimizer"])
    train(model, moved, STEPS, 2 * STEPS)
    train(start, theirs, STEPS, 2 * STEPS)
    file = saved(model, moved)
    assert_same(file["optimizer"], theirs.state_dict())
    job.close()

    after = Net().double()
    after.load_state_dict(file["model"])
    optimizer = made(kind, after)
    optimizer.load_state_dict(file["optimizer"])
    train(after, optimizer, 2 * STEPS, 3 * STEPS)
    assert_same_values(after, plain)


@pytest.mark.parametrize("kind", TORCH)
def test_before_the_first_step_the_state_is_that_of_torch(connect: Connect, kind: str) -> None:
    model = Net().double()
    theirs = made(kind, copy.deepcopy(model))
    _, optimizer = connect(settings=CUT).prepare(model, made(kind, model))
    assert_same(optimizer.state_dict(), theirs.state_dict())
    assert not optimizer.state


def test_narrow_parameters_have_the_state_of_their_float32_masters(connect: Connect) -> None:
    model = torch.nn.Linear(3, 2).bfloat16()
    model, optimizer = connect().prepare(model, torch.optim.Adam(model.parameters()))
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert state["state"][0]["exp_avg"].dtype is torch.float32
    torch.testing.assert_close(state["state"][0]["exp_avg"], torch.full((2, 3), 0.1))
    torch.optim.Adam(model.parameters()).load_state_dict(state)


def test_in_a_synchronous_job_state_and_values_are_of_one_step_while_another_worker_waits(alone: None) -> None:
    with (
        local_yard(SYNC_2 | CUT | {"job.workers_expected": 2, "yard.servers": 2}) as (_, join),
        ThreadPoolExecutor(1) as pool,
    ):
        first, second = join(), join()

        def begin(job: sy.Job) -> tuple[Net, torch.optim.Optimizer]:
            torch.manual_seed(5)
            model = Net().double()
            return job.prepare(model, made("adam", model))

        theirs = pool.submit(begin, second)
        model, optimizer = begin(first)
        for _ in range(3):  # the other worker is a step ahead each time, and waits
            step = pool.submit(train, *theirs.result(20), 0, 1)
            file = saved(model, optimizer)
            count = first.step
            assert all(state["step"] == count for state in file["optimizer"]["state"].values())
            assert file["model"]["idle"].equal(model.idle.detach())
            train(model, optimizer, 0, 1)
            step.result(20)
        pool.submit(second.close)
        first.close()


def test_state_that_a_dead_initializer_gave_is_gone(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that gives first values dies before it has committed them; the next one has no state."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    give, given = Trainer._give_values, []

    def twice(trainer: Trainer, state: Any, router: Any) -> None:
        give(trainer, state, router)
        given.append(len(state))
        give(trainer, {}, router)

    monkeypatch.setattr(Trainer, "_give_values", twice)
    _, moved = connect().prepare(model, optimizer)
    assert given == [2]
    assert moved.state_dict()["state"] == {}


def test_state_that_is_given_is_in_checkpoints(tmp_path: Any, alone: None) -> None:
    settings = {"job.checkpoint.url": str(tmp_path), "yard.servers": 1}
    with local_yard(settings) as (_, join):
        with join() as job:
            model = torch.nn.Linear(3, 2)
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            expected = copy.deepcopy(optimizer.state_dict())
            _, moved = job.prepare(model, optimizer)
            job.checkpoint()
            assert_same(moved.state_dict(), expected)
    assert any(b"exp_avg_sq/0" in each.read_bytes() for each in tmp_path.rglob("partition-*.safetensors"))


# ---- what cannot be


def adam_with(change: Callable[[dict[str, Any]], None]) -> tuple[torch.nn.Linear, torch.optim.Adam]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    change(optimizer.state[model.weight])
    return model, optimizer


def test_state_of_another_optimizer_or_model_is_refused(connect: Connect) -> None:
    job = connect()
    with pytest.raises(errors.UnsupportedOptimizer, match=r"of 'weight' without exp_avg_sq; it has exp_avg, step"):
        job.prepare(*adam_with(lambda state: state.pop("exp_avg_sq")))
    with pytest.raises(errors.UnsupportedOptimizer, match="without step"):
        job.prepare(*adam_with(lambda state: state.pop("step")))
    with pytest.raises(errors.ShapeMismatch, match=r"exp_avg of 'weight' has shape \(3, 2\); expected \(2, 3\)"):
        job.prepare(*adam_with(lambda state: state.update(exp_avg=torch.ones(3, 2))))
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.NAdam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    with pytest.raises(errors.UnsupportedOptimizer, match="mu_product"):
        job.prepare(model, optimizer)
    job.prepare(*adam_with(lambda _: None))


def test_state_is_loaded_before_prepare_and_saved_before_the_job_is_left(connect: Connect) -> None:
    job = connect()
    _, optimizer = job.prepare(*adam_with(lambda _: None))
    state = optimizer.state_dict()
    with pytest.raises(errors.UnsupportedOptimizer, match=r"optimizer\.load_state_dict before job\.prepare"):
        optimizer.load_state_dict(state)
    job.close()
    with pytest.raises(errors.InvalidRequest, match=r"call it inside of `with sy\.connect\(\) as job:`"):
        optimizer.state_dict()


def test_servers_refuse_state_for_an_open_job_and_state_of_other_arrays(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = adam_with(lambda _: None)
    give = OptimizerExchange.give

    names_in = OptimizerExchange._names_in

    def other(exchange: OptimizerExchange, states: Any) -> None:
        monkeypatch.setattr(OptimizerExchange, "_names_in", lambda *_: ("exp_avg", "exp_avg_sq", "sum"))
        with pytest.raises(errors.InvalidRequest, match=r"'sum'\]; expected .* \['exp_avg', 'exp_avg_sq'\]"):
            give(exchange, {})
        monkeypatch.setattr(OptimizerExchange, "_names_in", names_in)
        give(exchange, states)

    monkeypatch.setattr(OptimizerExchange, "give", other)
    job = connect()
    job.prepare(model, optimizer)
    monkeypatch.undo()
    trainer = job._loop.trainer
    assert trainer is not None
    with pytest.raises(errors.InvalidRequest, match="which is open"):
        trainer.router.optimizer.give({})
    with pytest.raises(errors.NotFound, match="at version 7 of partition") as caught:
        trainer.router.optimizer.read([0], 7)
    assert caught.value.facts == {"newest": "0"}
