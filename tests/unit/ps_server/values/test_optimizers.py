"""The servers' update rules give what torch.optim and shardyard.optim give; slots, first steps and compiling.

tests/unit/worker/optimizers/test_extra.py compares shardyard.optim with the papers."""

from __future__ import annotations

import logging
import math
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numba
import numpy as np
import pytest
import torch

from shardyard.domain.errors import InvalidRequest
from shardyard.domain.optimizers import KINDS, check_group, make_group
from shardyard_ps_server.jit import optimizer_warmup
from shardyard_ps_server.jit.optimizer_warmup import DenseLoop
from shardyard_ps_server.values import kernels, optimizers, pieces
from shardyard_ps_server.values.optimizers import Slot
from tests.support.dense_rules import take_step
from tests.support.torch_optimizers import TORCH

ELEMENTS = 1037  # no multiple of a vector's width
STEPS = 200
Float = type[np.float32] | type[np.float64]
UPDATES = ("step", "mu_product")
"""What torch keeps with a parameter, and servers compute from their count of its updates."""
BOUNDS = {np.dtype(np.float32): 1e-6, np.dtype(np.float64): 1e-12}
DTYPES = [pytest.param(np.float32, id="float32"), pytest.param(np.float64, id="float64")]

CASES: list[tuple[str, dict[str, float]]] = [
    ("sgd", {}),
    ("sgd", {"lr": 0.05}),
    ("sgd", {"lr": 0.05, "weight_decay": 0.03, "maximize": 1}),
    ("sgd", {"lr": 0.05, "momentum": 0.9}),
    ("sgd", {"lr": 0.05, "momentum": 0.9, "dampening": 0.4}),
    ("sgd", {"lr": 0.05, "momentum": 0.9, "dampening": -0.3, "weight_decay": 0.03}),
    ("sgd", {"lr": 0.05, "momentum": 0.8, "nesterov": 1}),
    ("sgd", {"lr": 0.05, "momentum": 0.8, "nesterov": 1, "weight_decay": 0.03, "maximize": 1}),
    ("adam", {}),
    ("adam", {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}),
    ("adam", {"lr": 0.01, "beta1": 0.3, "beta2": 0.4, "weight_decay": 0.1}),
    ("adam", {"lr": 0.01, "beta1": 0.0, "beta2": 0.0, "eps": 0.1}),
    ("adam", {"lr": 0.01, "amsgrad": 1}),
    ("adam", {"lr": 0.01, "beta2": 0.9, "amsgrad": 1, "weight_decay": 0.1, "maximize": 1}),
    ("adamw", {}),
    ("adamw", {"lr": 0.01, "weight_decay": 0.0, "maximize": 1}),
    ("adamw", {"lr": 0.01, "beta1": 0.2, "beta2": 0.9, "weight_decay": 0.3, "eps": 1e-4}),
    ("adamw", {"lr": 0.01, "beta2": 0.9, "weight_decay": 0.3, "amsgrad": 1}),
    ("adagrad", {}),
    ("adagrad", {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.02}),
    ("adagrad", {"lr": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-2, "maximize": 1}),
    ("rmsprop", {}),
    ("rmsprop", {"lr": 0.02, "alpha": 0.9, "eps": 1e-2, "weight_decay": 0.05, "maximize": 1}),
    ("rmsprop", {"lr": 0.02, "momentum": 0.7, "weight_decay": 0.05}),
    ("rmsprop", {"lr": 0.02, "centered": 1}),
    ("rmsprop", {"lr": 0.02, "centered": 1, "alpha": 0.4, "weight_decay": 0.05, "eps": 0.1}),
    ("rmsprop", {"lr": 0.02, "centered": 1, "momentum": 0.7, "maximize": 1}),
    ("adamax", {}),
    ("adamax", {"lr": 0.01, "beta1": 0.2, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1}),
    ("adamax", {"lr": 0.01, "beta1": 0.8, "weight_decay": 0.1, "maximize": 1}),
    ("nadam", {}),
    ("nadam", {"lr": 0.01, "beta1": 0.3, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1, "momentum_decay": 0.2}),
    ("nadam", {"lr": 0.01, "beta1": 0.99, "weight_decay": 0.3, "decoupled_weight_decay": 1, "maximize": 1}),
    ("radam", {}),
    ("radam", {"lr": 0.01, "beta1": 0.3, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}),
    ("radam", {"lr": 0.01, "weight_decay": 0.3, "decoupled_weight_decay": 1, "maximize": 1}),
    ("radam", {"lr": 0.01, "beta2": 0.6}),
    ("lamb", {}),
    ("lamb", {"lr": 0.01, "beta1": 0.3, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.3, "maximize": 1}),
    ("lamb", {"lr": 0.01, "weight_decay": 0.0}),
    ("lion", {}),
    ("lion", {"lr": 0.01, "beta1": 0.3, "beta2": 0.8, "weight_decay": 0.3, "maximize": 1}),
    ("ftrl", {}),
    ("ftrl", {"lr": 0.05, "beta": 0.3, "l1": 0.5, "l2": 0.2, "maximize": 1}),
    ("ftrl", {"lr": 0.05, "beta": 2.0, "l2": 3.0}),
]


def _name(case: tuple[str, Mapping[str, float]]) -> str:
    kind, given = case
    return "-".join([kind, *(f"{key}={value:g}" for key, value in given.items())])


EVERY_CASE = pytest.mark.parametrize(("kind", "given"), [pytest.param(*case, id=_name(case)) for case in CASES])
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


class Ours:
    """A parameter under one of our update rules."""

    def __init__(self, kind: str, given: Mapping[str, float], start: np.ndarray) -> None:
        self.kind = kind
        self.rule = optimizers.make(kind)
        self.slots = self.rule.slots(make_group(kind, given))
        self.state = [np.full_like(start, slot.initial) for slot in self.slots]
        self.w = start.copy()
        self.count = 0

    def step(self, given: Mapping[str, float], g: np.ndarray) -> None:
        settings = make_group(self.kind, given)
        check_group(self.kind, 0, settings)
        self.count += 1
        w_out = np.full_like(self.w, np.nan)
        take_step(self.rule, settings, self.count, self.w, g, w_out, self.state)
        self.w = w_out


class Torchs:
    """The same under torch.optim."""

    def __init__(self, kind: str, given: Mapping[str, float], start: np.ndarray, *, foreach: bool | None) -> None:
        self.w = torch.nn.Parameter(torch.from_numpy(start.copy()))
        settings = _torch_settings(kind, given)
        how = {"foreach": foreach} if len(_ways(kind)) > 1 else {}
        self.optimizer: torch.optim.Optimizer = TORCH[kind]([self.w], **how, **settings)  # type: ignore[operator]

    def step(self, lr: float, g: np.ndarray) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        self.w.grad = torch.from_numpy(g.copy())  # foreach nesterov writes to it
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.w.dtype)  # in which NAdam has the product of its momenta
        self.optimizer.step()
        torch.set_default_dtype(default)

    def values(self) -> np.ndarray:
        return self.w.detach().numpy()

    def state(self) -> dict[str, np.ndarray]:
        state = self.optimizer.state[self.w]
        return {key: value.numpy() for key, value in state.items() if torch.is_tensor(value) and key not in UPDATES}


def _torch_settings(kind: str, given: Mapping[str, float]) -> dict[str, Any]:
    """Every setting by its name in torch, so that our defaults are not silently torch's."""
    values = dict(zip((setting.name for setting in KINDS[kind]), make_group(kind, given), strict=True))
    settings: dict[str, Any] = {
        setting.name: bool(values[setting.name]) if setting.flag else values[setting.name] for setting in KINDS[kind]
    }
    if "beta1" in settings:
        settings["betas"] = (settings.pop("beta1"), settings.pop("beta2"))
    return settings


def _ways(kind: str) -> tuple[bool | None, ...]:
    """The values of `foreach`."""
    return (None, False, True) if TORCH[kind].__module__.startswith("torch.") else (None,)


def _distance(ours: np.ndarray, torchs: np.ndarray) -> float:
    return float(np.linalg.norm(ours.astype(np.float64) - torchs) / np.linalg.norm(torchs.astype(np.float64)))


def _train(
    kind: str, given: Mapping[str, float], dtype: Float, *, rate: Callable[[int, float], float], seed: int
) -> tuple[Ours, list[Torchs]]:
    rng = np.random.default_rng(seed)
    start = rng.standard_normal(ELEMENTS).astype(dtype)
    ours = Ours(kind, given, start)
    theirs = [Torchs(kind, given, start, foreach=foreach) for foreach in _ways(kind)]
    base = dict(zip((setting.name for setting in KINDS[kind]), make_group(kind, given), strict=True))["lr"]
    for step in range(STEPS):
        g = (rng.standard_normal(ELEMENTS) + 0.2).astype(dtype)
        lr = rate(step, base)
        ours.step({**given, "lr": lr}, g)
        for other in theirs:
            other.step(lr, g)
    return ours, theirs


@EVERY_DTYPE
@EVERY_CASE
def test_parameters_and_state_agree_with_torch(kind: str, given: Mapping[str, float], dtype: Float) -> None:
    ours, theirs = _train(kind, given, dtype, rate=lambda _step, lr: lr, seed=11)
    bound = BOUNDS[np.dtype(dtype)]
    for other in theirs:
        assert ours.w.dtype == dtype
        assert _distance(ours.w, other.values()) <= bound
        state = other.state()
        assert {slot.name for slot in ours.slots} == set(state)
        for slot, array in zip(ours.slots, ours.state, strict=True):
            assert _distance(array, state[slot.name]) <= bound, slot.name


@EVERY_DTYPE
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_rate_that_changes_each_step_agrees_with_torch(kind: str, dtype: Float) -> None:
    given = {"momentum": 0.9} if kind in ("sgd", "rmsprop") else {}
    ours, theirs = _train(kind, given, dtype, rate=lambda step, lr: lr * (1.5 + math.sin(step)), seed=12)
    for other in theirs:
        assert _distance(ours.w, other.values()) <= BOUNDS[np.dtype(dtype)]


@EVERY_DTYPE
@EVERY_CASE
def test_nan_and_infinity_go_through_as_in_torch(kind: str, given: Mapping[str, float], dtype: Float) -> None:
    huge = float(np.finfo(dtype).max)
    if given.get("centered"):  # torch contracts v - a * a on some processors, and then a * a does not overflow
        huge = 1.2 * math.sqrt(huge)
    if kind in ("radam", "lamb"):  # divide m by what it is a multiple of; the last bit decides whether that overflows
        huge /= 2
    odd = [0.0, 1.0, -2.0, math.inf, -math.inf, math.nan, huge]
    w, first = (a.ravel().astype(dtype) for a in np.meshgrid(odd, odd))
    ours = Ours(kind, given, w)
    theirs = Torchs(kind, given, w, foreach=False)
    lr = make_group(kind, given)[0]
    for g in (first, np.ones_like(first), np.roll(first, 1)):
        ours.step(given, g)
        theirs.step(lr, g)
        np.testing.assert_allclose(ours.w, theirs.values(), rtol=1e-5)
        for slot, array in zip(ours.slots, ours.state, strict=True):
            np.testing.assert_allclose(array, theirs.state()[slot.name], rtol=1e-5, err_msg=slot.name)


@EVERY_DTYPE
@pytest.mark.parametrize("nesterov", [0.0, 1.0])
def test_sgd_buffer_starts_as_the_first_gradient_whatever_it_held(dtype: Float, nesterov: float) -> None:
    given = {"lr": 0.5, "momentum": 0.5, "dampening": 0.0 if nesterov else 0.75, "nesterov": nesterov}
    ours = Ours("sgd", given, np.array([1.0, 2.0], dtype))
    ours.state[0][:] = np.nan
    g = np.array([4.0, -8.0], dtype)
    ours.step(given, g)
    np.testing.assert_array_equal(ours.state[0], g)
    np.testing.assert_array_equal(ours.w, [-2.0, 8.0] if nesterov else [-1.0, 6.0])
    ours.step(given, g)
    np.testing.assert_array_equal(ours.state[0], [6.0, -12.0] if nesterov else [3.0, -6.0])


@pytest.mark.parametrize(
    ("beta1", "momentum_decay", "count"), [(0.9, 4e-3, 1), (0.9, 0.5, 3), (0.99, 4e-3, 500), (0.0, 0.1, 7)]
)
def test_momenta_of_nadam_are_multiplied_as_torch_does(beta1: float, momentum_decay: float, count: int) -> None:
    given = {"beta1": beta1, "momentum_decay": momentum_decay}
    theirs = Torchs("nadam", given, np.ones(1), foreach=False)
    for _ in range(count):
        theirs.step(0.1, np.ones(1))
    expected = float(theirs.optimizer.state[theirs.w]["mu_product"])
    assert kernels.momentum_product(beta1, momentum_decay, count) == pytest.approx(expected, rel=1e-12, abs=1e-20)


def test_momenta_of_a_long_job_are_multiplied_until_they_change_nothing() -> None:
    assert kernels.momentum_product(0.9, 4e-3, 10**15) == 0.0


def test_radam_is_not_adaptive_until_the_variance_is_tractable() -> None:
    given = {"lr": 0.5, "beta1": 0.0}
    ours = Ours("radam", given, np.zeros(2))
    g = np.array([1e-3, 2.0])
    for step in range(1, 6):
        ours.step(given, g)
        np.testing.assert_allclose(ours.w, -0.5 * step * g, rtol=1e-12)
    before = ours.w
    ours.step(given, g)  # the sixth, from which on torch rectifies with these betas
    assert (ours.w - before)[0] == pytest.approx((ours.w - before)[1], rel=1e-3)


def test_trust_of_lamb_is_that_of_the_whole_variable_and_1_where_a_norm_is_0() -> None:
    given = {"lr": 0.5, "weight_decay": 0.0, "eps": 0.0}
    ours = Ours("lamb", given, np.array([3.0, 4.0]))
    ours.step(given, np.array([1e-3, 7.0]))  # the update's elements are 1
    np.testing.assert_allclose(ours.w, np.array([3.0, 4.0]) - 0.5 * 5.0 / math.sqrt(2.0), rtol=1e-12)
    nothing = Ours("lamb", given, np.zeros(2))
    nothing.step(given, np.array([1e-3, 7.0]))
    np.testing.assert_allclose(nothing.w, [-0.5, -0.5], rtol=1e-12)
    still = Ours("lamb", {**given, "eps": 1e-6}, np.ones(2))
    still.step({**given, "eps": 1e-6}, np.zeros(2))
    np.testing.assert_array_equal(still.w, [1.0, 1.0])


def test_first_step_of_ftrl_goes_from_the_first_values_whatever_the_state_held() -> None:
    given = {"lr": 0.5, "beta": 1.0}
    ours = Ours("ftrl", given, np.array([2.0, -3.0]))
    ours.state[0][:] = np.nan
    ours.step(given, np.array([3.0, 0.0]))
    np.testing.assert_allclose(ours.w, [2.0 - 0.5 * 3.0 / (1.0 + 3.0), -3.0], rtol=1e-12)


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_first_step_of_adam_is_the_rate_whatever_the_gradient(kind: str) -> None:
    given = {"lr": 0.25, "weight_decay": 0.0}
    ours = Ours(kind, given, np.zeros(3))
    ours.step(given, np.array([1e-3, -7.0, 1e6]))
    np.testing.assert_allclose(ours.w, [-0.25, 0.25, -0.25], rtol=1e-4)


def test_decay_of_adamw_does_not_pass_through_the_gradient() -> None:
    given = {"lr": 0.5, "weight_decay": 0.5}
    ours = Ours("adamw", given, np.array([8.0]))
    ours.step(given, np.zeros(1))
    assert (ours.w[0], ours.state[0][0], ours.state[1][0]) == (6.0, 0.0, 0.0)


def test_first_step_of_adagrad_uses_the_undecayed_rate_and_the_initial_sum() -> None:
    given = {"lr": 1.0, "lr_decay": 1.0, "initial_accumulator_value": 16.0, "eps": 0.0}
    ours = Ours("adagrad", given, np.zeros(1))
    ours.step(given, np.array([3.0]))
    assert (ours.w[0], ours.state[0][0]) == (-3.0 / 5.0, 25.0)
    ours.step(given, np.array([0.0]))
    ours.step(given, np.array([12.0]))
    assert ours.w[0] == pytest.approx(-3.0 / 5.0 - 12.0 / 13.0 / 3.0)


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("sgd", {"nesterov": 1.0, "dampening": 0.5}, ()),
        ("sgd", {"momentum": 0.9}, (Slot("momentum_buffer"),)),
        ("adam", {"maximize": 1.0}, (Slot("exp_avg"), Slot("exp_avg_sq"))),
        ("adamw", {"amsgrad": 1.0}, (Slot("exp_avg"), Slot("exp_avg_sq"), Slot("max_exp_avg_sq"))),
        ("adagrad", {"initial_accumulator_value": 0.5}, (Slot("sum", 0.5),)),
        ("rmsprop", {"maximize": 1.0}, (Slot("square_avg"),)),
        ("rmsprop", {"momentum": 0.1}, (Slot("square_avg"), Slot("momentum_buffer"))),
        ("rmsprop", {"centered": 1.0}, (Slot("square_avg"), Slot("grad_avg"))),
        (
            "rmsprop",
            {"centered": 1.0, "momentum": 0.1},
            (Slot("square_avg"), Slot("grad_avg"), Slot("momentum_buffer")),
        ),
        ("adamax", {}, (Slot("exp_avg"), Slot("exp_inf"))),
        ("nadam", {}, (Slot("exp_avg"), Slot("exp_avg_sq"))),
        ("radam", {}, (Slot("exp_avg"), Slot("exp_avg_sq"))),
        ("lamb", {}, (Slot("exp_avg"), Slot("exp_avg_sq"))),
        ("lion", {}, (Slot("exp_avg"),)),
        ("ftrl", {}, (Slot("z"), Slot("n"))),
    ],
)
def test_settings_decide_which_state_there_is(kind: str, given: Mapping[str, float], expected: Sequence[Slot]) -> None:
    assert optimizers.make(kind).slots(make_group(kind, given)) == expected


@EVERY_DTYPE
@EVERY_CASE
def test_a_step_writes_the_output_and_the_state_only(kind: str, given: Mapping[str, float], dtype: Float) -> None:
    rng = np.random.default_rng(13)
    w, g = rng.standard_normal((2, ELEMENTS)).astype(dtype)
    # every second stretch of one allocation is a fence
    memory: np.ndarray = np.full((9, ELEMENTS), 7.0, dtype)
    rule, settings = optimizers.make(kind), make_group(kind, given)
    state = [memory[3 + 2 * i] for i, _ in enumerate(rule.slots(settings))]
    before = (w.tobytes(), g.tobytes())
    take_step(rule, settings, 2, w, g, memory[1], state)
    assert (w.tobytes(), g.tobytes()) == before
    assert np.all(memory[::2] == 7.0)
    assert not np.any(memory[1] == 7.0)
    assert not any(np.any(array == 7.0) for array in state if not given.get("amsgrad"))


def test_overlapping_or_unlike_arrays_are_a_defect_of_the_caller() -> None:
    rule, settings = optimizers.make("sgd"), make_group("sgd", {})
    w, g, out = np.zeros(8), np.zeros(8), np.zeros(8)
    strided, unaligned = np.zeros(16)[::2], np.zeros(65, np.uint8)[1:].view(np.float64)
    refused: list[tuple[np.ndarray, np.ndarray]] = [
        (g, w),
        (g, g),
        (g[:7], out),
        (g.astype(np.float32), out),
        (strided, out),
        (unaligned, out),
    ]
    for gradient, w_out in refused:
        with pytest.raises(AssertionError):
            take_step(rule, settings, 1, w, gradient, w_out, [])
    with pytest.raises(AssertionError):
        take_step(rule, settings, 0, w, g, out, [])


def _task(
    w: np.ndarray,
    members: Sequence[np.ndarray],
    shares: Sequence[float],
    out: np.ndarray,
    piece: int,
    staged: int = 0,
) -> Any:
    old, new = w.view(np.uint8), out.view(np.uint8)
    sources = np.array([pieces.locate(old, new, member.view(np.uint8), w.itemsize) for member in members])
    assert all(sources)
    scratch, room = np.empty(piece, w.dtype), np.empty(staged, w.dtype)
    return old, new, sources, np.array(shares, np.float64), scratch, room, 0, old.size


def _weighted_sum(members: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
    """In plain numpy: each product and each sum rounded, in order."""
    total = members[0] * members[0].dtype.type(shares[0])
    for member, share in zip(members[1:], shares[1:], strict=True):
        total = total + member * member.dtype.type(share)
    return total


@EVERY_DTYPE
def test_multiplication_and_addition_are_rounded_apart(dtype: Float) -> None:
    rng = np.random.default_rng(21)
    w = (rng.standard_normal(100_003) * 3).astype(dtype)
    g, other = (w + rng.standard_normal((2, w.size)) * 1e-3).astype(dtype)  # so that most digits cancel
    lr, decay = dtype(0.9991), dtype(0.3337)
    for given in ({"lr": float(lr)}, {"lr": float(lr), "weight_decay": float(decay)}):
        ours = Ours("sgd", given, w)
        ours.step(given, g)
        assert ours.w.tobytes() == (w - lr * (g + decay * w if "weight_decay" in given else g)).tobytes()
    out = np.empty_like(w)
    shares = (1 / 3, -1 / 3)
    kernels.mean(_task(w, (g, other), shares, out, 512), 0.0)
    assert out.tobytes() == _weighted_sum((g, other), shares).tobytes()
    exact = g.astype(np.longdouble) * dtype(shares[0]) + (other * dtype(shares[1])).astype(np.longdouble)
    assert not np.array_equal(out, exact.astype(dtype))  # what a contraction would give


@EVERY_DTYPE
@EVERY_CASE
def test_sum_in_pieces_is_the_gradient_that_numpy_sums(kind: str, given: Mapping[str, float], dtype: Float) -> None:
    rng = np.random.default_rng(22)
    w = rng.standard_normal(ELEMENTS).astype(dtype)
    for count, piece, staged in ((1, 64, 0), (2, 16, 0), (3, 64, 32), (5, ELEMENTS + 1, 0), (1, 64, 48), (2, 128, 128)):
        shares = [float(share) for share in rng.random(count)]
        members = [(rng.standard_normal(ELEMENTS) * 10.0 ** rng.integers(-3, 4)).astype(dtype) for _ in range(count)]
        plain = Ours(kind, given, w)
        plain.step(given, _weighted_sum(members, shares))
        rule, out = optimizers.make(kind), np.full_like(w, np.nan)
        state = [np.full_like(w, slot.initial) for slot in rule.slots(make_group(kind, given))]
        task = _task(w, members, shares, out, piece, staged)
        rule.update(make_group(kind, given), 1, task, [array.view(np.uint8) for array in state])
        assert out.tobytes() == plain.w.tobytes(), (count, piece)
        assert [array.tobytes() for array in state] == [array.tobytes() for array in plain.state]


def test_part_of_a_payload_is_updated_and_the_rest_left_alone() -> None:
    w, g, out = np.arange(64, dtype=np.float32), np.ones(64, np.float32), np.full(64, -1, np.float32)
    *task, _, _ = _task(w, [g], [], out, 0)
    optimizers.make("sgd").update(make_group("sgd", {"lr": 1.0}), 1, (*task, 64, 128), [])
    assert out[16:32].tolist() == [each - 1 for each in range(16, 32)]
    assert set(out[:16]) == set(out[32:]) == {-1}


def test_payload_that_an_update_may_not_read_has_no_address() -> None:
    memory = np.zeros(256, np.uint8)
    start = -memory.ctypes.data % 64
    old, new, payload = (memory[start + at : start + at + 64] for at in (0, 64, 128))
    payload.flags.writeable = False
    assert pieces.locate(old, new, payload, 8) == payload.ctypes.data
    shifted = memory[start + 132 : start + 196]
    for arrays in (
        (old, new, payload[:56]),
        (old[:56], new, payload),
        (old, new, shifted),
        (old, new, memory[start + 120 : start + 184]),
        (memory[start + 8 : start + 72], new, payload),
    ):
        assert pieces.locate(*arrays, 8) == 0
    assert pieces.locate(old, new, shifted, 4) == shifted.ctypes.data


def test_no_elements_are_no_work() -> None:
    for kind, given in CASES:
        ours = Ours(kind, given, np.zeros(0, np.float32))
        ours.step(given, np.zeros(0, np.float32))


def test_every_kind_has_an_update_rule() -> None:
    assert [optimizers.make(kind).kind for kind in KINDS] == list(KINDS)


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown optimizer 'lars'; the servers know adagrad, adam"):
        optimizers.make("lars")


def _signatures(kernel: Any) -> list[Any]:
    return list(kernel.signatures)


def test_warm_server_compiles_nothing_later() -> None:
    optimizer_warmup.warm(optimizer_warmup.every_loop())
    loops = (*kernels.ALL, kernels.mean, pieces.locate)
    before = {kernel: _signatures(kernel) for kernel in loops}
    assert all(len(signatures) >= 2 for signatures in before.values())
    for dtype in (np.float32, np.float64):
        for kind, given in CASES:
            for writable in (True, False):
                ours = Ours(kind, given, np.ones(4, dtype))
                g = ours.w.copy()
                g.flags.writeable = ours.w.flags.writeable = writable
                ours.step(given, g)
    assert {kernel: _signatures(kernel) for kernel in loops} == before


def test_warm_reaches_every_kernel_without_torch() -> None:
    script = (
        "import sys; from shardyard_ps_server.jit import optimizer_warmup\n"
        "from shardyard_ps_server.values import kernels\n"
        "assert not any(kernel.signatures for kernel in kernels.ALL), 'compiled at import'\n"
        "optimizer_warmup.warm(optimizer_warmup.every_loop(['float32']))\n"
        "print([kernel.__name__ for kernel in kernels.ALL if not kernel.signatures], 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr) == ("[] False\n", "")


def test_kernels_compile_where_no_directory_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/proc/nowhere")
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    names: dict[str, Any] = {"__name__": "kernels_without_a_home"}
    for module in (pieces, kernels):
        assert module.__file__ is not None
        path = pathlib.Path(module.__file__)
        exec(compile(path.read_text(), f"/proc/nowhere/{path.name}", "exec"), names)
    w, g, out = np.array([3.0]), np.array([2.0]), np.zeros(1)
    old, new = w.view(np.uint8), out.view(np.uint8)
    sources = np.array([names["locate"](old, new, g.view(np.uint8), 8)])
    task = (old, new, sources, np.empty(0), np.empty(0), np.empty(0), 0, 8)
    names["sgd"](task, None, np.array([1.0, 0.5, 0.0, 0.0, 0.0]), True, False)
    assert out[0] == 2.0
    assert names["sgd"].stats.cache_path is None
    assert names["locate"].stats.cache_path is None


def test_a_full_disk_costs_the_cache_and_not_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    calls: list[str] = []

    @numba.njit(nogil=True, cache=True)
    def sgd(task: Any, buffer: Any, scalars: Any, first: Any, nesterov: Any) -> None:
        task[1][0] = 5

    def recorded(loop: DenseLoop) -> None:
        calls.append(loop.name)
        call(loop)

    call = optimizer_warmup._call
    cache = vars(sgd)["_cache"]
    monkeypatch.setattr(cache, "save_overload", full)
    monkeypatch.setattr(cache, "load_overload", lambda *_: None)
    monkeypatch.setattr(kernels, "sgd", sgd)
    monkeypatch.setattr(optimizer_warmup, "_call", recorded)
    with caplog.at_level(logging.WARNING):
        optimizer_warmup.warm(each for each in optimizer_warmup.every_loop(["float32"]) if each.name == "sgd")
    assert calls == ["sgd", "sgd", "sgd", "sgd"]  # each of the two loops is tried again
    assert len(_signatures(sgd)) == 2
    assert "No space left on device" in caplog.text
