"""The settings that optimizers have on the wire: order, defaults, ranges, and what may change while a job runs."""

from __future__ import annotations

import inspect
import math

import pytest

from shardyard.domain import optimizers
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.optimizers import OptimizerSpec
from tests.support.torch_optimizers import TORCH


def values(kind: str, **given: float) -> tuple[float, ...]:
    return optimizers.make_group(kind, given)


@pytest.mark.parametrize("kind", sorted(optimizers.KINDS))
def test_defaults_are_good_and_in_the_order_of_the_wire(kind: str) -> None:
    group = values(kind)
    assert len(group) == len(optimizers.setting_names(kind)) == len(set(optimizers.setting_names(kind)))
    optimizers.check_spec(OptimizerSpec(kind, (group, group)))
    assert optimizers.setting_names(kind)[0] == "lr"
    assert values(kind, lr=0.25)[0] == 0.25


@pytest.mark.parametrize("kind", sorted(optimizers.KINDS))
def test_defaults_are_those_of_torch(kind: str) -> None:
    theirs = TORCH[kind]
    parameters = inspect.signature(theirs.__init__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    if "betas" in defaults:
        defaults["beta1"], defaults["beta2"] = defaults["betas"]
    for setting in optimizers.KINDS[kind]:
        assert float(defaults[setting.name]) == setting.default, setting.name


@pytest.mark.parametrize("kind", sorted(optimizers.KINDS))
def test_every_setting_has_its_range(kind: str) -> None:
    for index, setting in enumerate(optimizers.KINDS[kind]):
        bad = [math.nan, math.inf, -math.inf]
        bad += [0.5, 2.0, -1.0] if setting.flag else []
        bad += [-1e-9] if setting.low == 0 and not setting.flag else []
        bad += [setting.high] if math.isfinite(setting.high) and not setting.flag else []
        for value in bad:
            group = list(values(kind))
            group[index] = value
            with pytest.raises(InvalidRequest, match=setting.name):
                optimizers.check_group(kind, 0, group)


def test_what_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="lars"):
        optimizers.check_spec(OptimizerSpec("lars", ()))
    with pytest.raises(InvalidRequest, match="rho"):
        values("sgd", rho=1.0)
    with pytest.raises(InvalidRequest, match="expected 6: lr, momentum"):
        optimizers.check_group("sgd", 0, (0.1,))


def test_nesterov_needs_a_momentum() -> None:
    optimizers.check_group("sgd", 0, values("sgd", momentum=0.9, nesterov=1))
    for bad in (values("sgd", nesterov=1), values("sgd", momentum=0.9, dampening=0.1, nesterov=1)):
        with pytest.raises(InvalidRequest, match="nesterov"):
            optimizers.check_group("sgd", 0, bad)


def test_ftrl_needs_a_rate() -> None:
    optimizers.check_group("ftrl", 0, values("ftrl", lr=1e-9))
    with pytest.raises(InvalidRequest, match="lr"):
        optimizers.check_group("ftrl", 0, values("ftrl", lr=0.0))


def test_what_the_product_of_nadams_momenta_is_computed_from_may_not_change() -> None:
    spec = OptimizerSpec("nadam", (values("nadam"),))
    optimizers.check_update(spec, (values("nadam", lr=0.5, beta2=0.8, weight_decay=0.1),))
    for bad in (values("nadam", beta1=0.8), values("nadam", momentum_decay=0.1)):
        with pytest.raises(InvalidRequest, match="momenta"):
            optimizers.check_update(spec, (bad,))


def test_rates_may_change_and_what_decides_the_state_may_not() -> None:
    spec = OptimizerSpec("sgd", (values("sgd", momentum=0.9),))
    optimizers.check_update(spec, (values("sgd", lr=0.5, momentum=0.8),))
    for bad in (values("sgd"), values("sgd", momentum=0.9, maximize=1), values("sgd", momentum=0.9, nesterov=1)):
        with pytest.raises(InvalidRequest):
            optimizers.check_update(spec, (bad,))
    with pytest.raises(InvalidRequest, match="momentum"):
        optimizers.check_update(OptimizerSpec("sgd", (values("sgd"),)), (values("sgd", momentum=0.1),))
    with pytest.raises(InvalidRequest, match="2 parameter groups; the job has 1"):
        optimizers.check_update(spec, spec.groups * 2)
