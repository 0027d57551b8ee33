"""The translation of optimizers of torch and shardyard.optim, and the optimizer that takes their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardyard.domain.errors import UnsupportedOptimizer
from shardyard.domain.optimizers import OptimizerSpec, check_spec, make_group, setting_names
from shardyard_worker.optimizers import extra
from shardyard_worker.optimizers.server_optimizer import ServerOptimizer, translate

Make = Callable[..., torch.optim.Optimizer]
DEFAULTS: list[tuple[type[torch.optim.Optimizer], str]] = [
    (torch.optim.SGD, "sgd"),
    (torch.optim.Adam, "adam"),
    (torch.optim.AdamW, "adamw"),
    (torch.optim.Adagrad, "adagrad"),
    (torch.optim.RMSprop, "rmsprop"),
    (torch.optim.Adamax, "adamax"),
    (torch.optim.NAdam, "nadam"),
    (torch.optim.RAdam, "radam"),
    (extra.LAMB, "lamb"),
    (extra.Lion, "lion"),
    (extra.FTRL, "ftrl"),
]
EVERY_KIND = pytest.mark.parametrize(("kind", "name"), DEFAULTS, ids=[name for _, name in DEFAULTS])
# How torch runs an update, not what it computes.
WITHOUT_MEANING = {"foreach", "fused", "capturable", "differentiable"}


def parameters(count: int = 2) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3)) for _ in range(count)]


def values(spec: OptimizerSpec, group: int = 0) -> dict[str, float]:
    return dict(zip(setting_names(spec.kind), spec.groups[group], strict=True))


def moved(optimizer: torch.optim.Optimizer, log: list[Any] | None = None) -> ServerOptimizer:
    pushed: list[Any] = [] if log is None else log
    return ServerOptimizer(optimizer, translate(optimizer).kind, lambda o, _: pushed.append(o.settings()))


@EVERY_KIND
def test_torchs_defaults_are_the_servers(kind: Make, name: str) -> None:
    spec = translate(kind(parameters()))
    assert spec.kind == name
    check_spec(spec)
    assert spec.groups == (make_group(name, {}),)


@EVERY_KIND
def test_every_option_of_torch_has_a_setting_or_no_meaning(kind: Make, name: str) -> None:
    options = set(kind(parameters()).defaults)
    settings = set(setting_names(name))
    if "betas" in options:
        options = options - {"betas"} | {"beta1", "beta2"}
    if name in ("adam", "adamw"):  # the one by the kind, which the other's class sets, and refused
        options -= {"decoupled_weight_decay"}
    assert options - WITHOUT_MEANING == settings


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8, weight_decay=0.1, nesterov=True, maximize=True),
            {"lr": 0.3, "momentum": 0.8, "dampening": 0, "weight_decay": 0.1, "nesterov": 1, "maximize": 1},
        ),
        (
            lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8, dampening=0.4),
            {"lr": 0.3, "momentum": 0.8, "dampening": 0.4, "weight_decay": 0, "nesterov": 0, "maximize": 0},
        ),
        (
            lambda p: torch.optim.Adam(p, 0.3, (0.7, 0.8), eps=1e-3, weight_decay=0.1, amsgrad=True, maximize=True),
            {"lr": 0.3, "beta1": 0.7, "beta2": 0.8, "eps": 1e-3, "weight_decay": 0.1, "amsgrad": 1, "maximize": 1},
        ),
        (
            lambda p: torch.optim.AdamW(p, 0.3, (0.7, 0.8), eps=1e-3, weight_decay=0.1, amsgrad=True, maximize=True),
            {"lr": 0.3, "beta1": 0.7, "beta2": 0.8, "eps": 1e-3, "weight_decay": 0.1, "amsgrad": 1, "maximize": 1},
        ),
        (
            lambda p: torch.optim.Adagrad(p, 0.3, 0.2, 0.1, initial_accumulator_value=0.4, eps=1e-3, maximize=True),
            {
                "lr": 0.3,
                "lr_decay": 0.2,
                "weight_decay": 0.1,
                "initial_accumulator_value": 0.4,
                "eps": 1e-3,
                "maximize": 1,
            },
        ),
        (
            lambda p: torch.optim.RMSprop(p, 0.3, 0.9, 1e-3, 0.1, momentum=0.8, centered=True, maximize=True),
            {"lr": 0.3, "alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1, "momentum": 0.8, "centered": 1, "maximize": 1},
        ),
        (
            lambda p: torch.optim.Adamax(p, 0.3, (0.7, 0.8), 1e-3, 0.1, maximize=True),
            {"lr": 0.3, "beta1": 0.7, "beta2": 0.8, "eps": 1e-3, "weight_decay": 0.1, "maximize": 1},
        ),
        (
            lambda p: torch.optim.NAdam(
                p, 0.3, (0.7, 0.8), 1e-3, 0.1, momentum_decay=0.2, decoupled_weight_decay=True, maximize=True
            ),
            {
                "lr": 0.3,
                "beta1": 0.7,
                "beta2": 0.8,
                "eps": 1e-3,
                "weight_decay": 0.1,
                "momentum_decay": 0.2,
                "decoupled_weight_decay": 1,
                "maximize": 1,
            },
        ),
        (
            lambda p: torch.optim.RAdam(p, 0.3, (0.7, 0.8), 1e-3, 0.1, decoupled_weight_decay=True, maximize=True),
            {
                "lr": 0.3,
                "beta1": 0.7,
                "beta2": 0.8,
                "eps": 1e-3,
                "weight_decay": 0.1,
                "decoupled_weight_decay": 1,
                "maximize": 1,
            },
        ),
        (
            lambda p: extra.LAMB(p, 0.3, (0.7, 0.8), eps=1e-3, weight_decay=0.1, maximize=True),
            {"lr": 0.3, "beta1": 0.7, "beta2": 0.8, "eps": 1e-3, "weight_decay": 0.1, "maximize": 1},
        ),
        (
            lambda p: extra.Lion(p, 0.3, (0.7, 0.8), weight_decay=0.1, maximize=True),
            {"lr": 0.3, "beta1": 0.7, "beta2": 0.8, "weight_decay": 0.1, "maximize": 1},
        ),
        (
            lambda p: extra.FTRL(p, 0.3, beta=0.7, l1=0.1, l2=0.2, maximize=True),
            {"lr": 0.3, "beta": 0.7, "l1": 0.1, "l2": 0.2, "maximize": 1},
        ),
    ],
)
def test_each_option_is_translated(make: Make, expected: dict[str, float]) -> None:
    assert values(translate(make(parameters()))) == expected


def test_each_parameter_group_has_its_own_settings() -> None:
    first, second = parameters()
    spec = translate(torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "momentum": 0.5}], lr=0.2))
    assert [values(spec, g)["lr"] for g in range(2)] == [0.1, 0.2]
    assert [values(spec, g)["momentum"] for g in range(2)] == [0.0, 0.5]


def test_a_rate_in_a_tensor_is_read_as_it_stands() -> None:
    rate = torch.tensor(0.25)
    optimizer = moved(torch.optim.SGD(parameters(), lr=rate))
    assert optimizer.settings()[0][0] == 0.25
    rate.fill_(0.5)
    assert optimizer.settings()[0][0] == 0.5


def test_the_ways_in_which_torch_runs_an_update_make_no_difference() -> None:
    plain = translate(torch.optim.Adam(parameters()))
    assert translate(torch.optim.Adam(parameters(), foreach=True)) == plain
    assert translate(torch.optim.Adam(parameters(), foreach=False)) == plain
    assert translate(torch.optim.Adam(parameters(), fused=True)) == plain


class OwnAdam(torch.optim.Adam):
    """Might do anything."""


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (torch.optim.LBFGS, "LBFGS"),
        (torch.optim.SparseAdam, "SparseAdam"),
        (torch.optim.Rprop, "Rprop"),
        (OwnAdam, "OwnAdam"),
    ],
)
def test_another_optimizer_is_refused_with_its_name_and_the_alternatives(make: Make, names: str) -> None:
    with pytest.raises(UnsupportedOptimizer, match=names) as caught:
        translate(make(parameters()))
    for kind, _ in DEFAULTS:
        where = "shardyard" if kind in (extra.LAMB, extra.Lion, extra.FTRL) else "torch"
        assert f"{where}.optim.{kind.__name__}" in caught.value.todo_text


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable"),
        (lambda p: torch.optim.SGD(p, differentiable=True), "differentiable"),
        (lambda p: torch.optim.RAdam(p, differentiable=True), "differentiable"),
        (lambda p: torch.optim.NAdam([{"params": p, "capturable": True}]), "capturable"),
        (lambda p: torch.optim.AdamW([{"params": p, "capturable": True}]), "capturable"),
        (lambda p: torch.optim.Adam(p, decoupled_weight_decay=True), "decoupled_weight_decay"),
    ],
)
def test_an_option_without_equal_is_refused_with_its_name_and_what_to_do(make: Make, option: str) -> None:
    with pytest.raises(UnsupportedOptimizer, match=option) as caught:
        translate(make(parameters()))
    assert "parameter group 0" in caught.value.what
    assert caught.value.todo_text


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_that_would_no_longer_be_called_are_refused(register: str) -> None:
    optimizer = torch.optim.SGD(parameters())
    getattr(optimizer, register)(lambda *_: None)
    with pytest.raises(UnsupportedOptimizer, match="hook"):
        translate(optimizer)


# ---- the optimizer that takes its place


def test_the_moved_optimizer_is_a_torch_optimizer_with_the_same_groups() -> None:
    original = torch.optim.AdamW(parameters(), lr=0.1)
    optimizer = moved(original)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is original.param_groups
    assert optimizer.defaults == original.defaults
    assert not optimizer.state


@pytest.mark.parametrize("on_moved", [False, True])
def test_a_scheduler_of_torch_on_either_object_changes_what_is_pushed(on_moved: bool) -> None:
    pushed: list[Any] = []
    original = torch.optim.SGD(parameters(), lr=0.8)
    optimizer = moved(original, pushed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer if on_moved else original, step_size=1, gamma=0.5)
    if not on_moved:
        original.step()  # without gradients; else torch warns
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    assert [groups[0][0] for groups in pushed] == [0.8, 0.4, 0.2]


@pytest.mark.parametrize("momentum_at_first", [0.95])
def test_a_scheduler_that_cycles_the_momentum_changes_what_is_pushed(momentum_at_first: float) -> None:
    optimizer = moved(torch.optim.SGD(parameters(), lr=0.1, momentum=0.9))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    assert optimizer.settings()[0][1] == momentum_at_first


def test_zero_grad() -> None:
    given = parameters()
    optimizer = moved(torch.optim.SGD(given))
    for parameter in given:
        parameter.grad = torch.ones(3)
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in given)
    optimizer.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in given)


def test_a_closure_is_called_with_gradients_and_its_loss_returned() -> None:
    pushed: list[Any] = []
    given = parameters(1)
    optimizer = moved(torch.optim.SGD(given), pushed)

    def closure() -> float:
        assert pushed == []
        loss = given[0].sum()
        loss.backward()
        return float(loss.detach())

    with torch.no_grad():
        assert optimizer.step(closure) == 3.0
    assert given[0].grad is not None
    assert len(pushed) == 1


def test_a_group_added_later_is_refused() -> None:
    optimizer = moved(torch.optim.SGD(parameters()))
    with pytest.raises(UnsupportedOptimizer, match="parameter group") as caught:
        optimizer.add_param_group({"params": parameters(1)})
    assert "before job.prepare" in caught.value.todo_text
    assert len(optimizer.param_groups) == 1


def test_a_state_to_load_is_refused() -> None:
    optimizer = moved(torch.optim.SGD(parameters()))
    with pytest.raises(UnsupportedOptimizer, match="load_state_dict") as caught:
        optimizer.load_state_dict(optimizer.state_dict())
    assert "before job.prepare" in caught.value.todo_text


def test_hooks_of_the_moved_optimizer_are_called() -> None:
    called: list[str] = []
    optimizer = moved(torch.optim.SGD(parameters()))
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.step()
    assert called == ["before", "after"]
