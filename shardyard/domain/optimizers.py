"""The optimizers of the servers: their settings, in the order of messages, with defaults and ranges.

Workers use this to translate optimizer objects, the coordinator to keep variables whole for some optimizers, and
servers to choose kernels. The defaults are those of `torch.optim`, or of `shardyard.optim` for optimizers that torch
does not have. Flags are 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import PartitionId, Version


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """`kind`: a key of KINDS. Each group has one value for each setting of the kind."""

    kind: str
    groups: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """A number in [low, high), or a flag."""

    name: str
    default: float
    low: float = 0.0
    high: float = math.inf
    flag: bool = False
    fixed: str = ""
    """Why the setting must not change while the job runs; empty: it may change."""


_STATE = "it decides which state the servers keep"
_PRODUCT = "the servers compute the product of all steps' momenta from it and the number of updates"


def _flag(name: str) -> Setting:
    return Setting(name, 0.0, flag=True, fixed=_STATE)


_LR = 1e-3
_EPS = Setting("eps", 1e-8)
_DECAY = Setting("weight_decay", 0.0)
_DECOUPLED = _flag("decoupled_weight_decay")
_MAXIMIZE = _flag("maximize")
_BETAS = (Setting("beta1", 0.9, high=1.0), Setting("beta2", 0.999, high=1.0))

KINDS: dict[str, tuple[Setting, ...]] = {
    "sgd": (
        Setting("lr", _LR),
        Setting("momentum", 0.0),
        Setting("dampening", 0.0, low=-math.inf),
        _DECAY,
        _flag("nesterov"),
        _MAXIMIZE,
    ),
    "adam": (Setting("lr", _LR), *_BETAS, _EPS, _DECAY, _flag("amsgrad"), _MAXIMIZE),
    "adamw": (
        Setting("lr", _LR),
        *_BETAS,
        _EPS,
        Setting("weight_decay", 1e-2),
        _flag("amsgrad"),
        _MAXIMIZE,
    ),
    "adagrad": (
        Setting("lr", 1e-2),
        Setting("lr_decay", 0.0),
        _DECAY,
        Setting("initial_accumulator_value", 0.0, fixed=_STATE),
        Setting("eps", 1e-10),
        _MAXIMIZE,
    ),
    "rmsprop": (
        Setting("lr", 1e-2),
        Setting("alpha", 0.99),
        _EPS,
        _DECAY,
        Setting("momentum", 0.0),
        _flag("centered"),
        _MAXIMIZE,
    ),
    "adamax": (Setting("lr", 2e-3), *_BETAS, _EPS, _DECAY, _MAXIMIZE),
    "nadam": (
        Setting("lr", 2e-3),
        Setting("beta1", 0.9, high=1.0, fixed=_PRODUCT),
        Setting("beta2", 0.999, high=1.0),
        _EPS,
        _DECAY,
        Setting("momentum_decay", 4e-3, fixed=_PRODUCT),
        _DECOUPLED,
        _MAXIMIZE,
    ),
    "radam": (Setting("lr", _LR), *_BETAS, _EPS, _DECAY, _DECOUPLED, _MAXIMIZE),
    "lamb": (Setting("lr", _LR), *_BETAS, Setting("eps", 1e-6), Setting("weight_decay", 1e-2), _MAXIMIZE),
    "lion": (
        Setting("lr", 1e-4),
        Setting("beta1", 0.9, high=1.0),
        Setting("beta2", 0.99, high=1.0),
        _DECAY,
        _MAXIMIZE,
    ),
    "ftrl": (Setting("lr", 0.1), Setting("beta", 1.0), Setting("l1", 0.0), Setting("l2", 0.0), _MAXIMIZE),
}


@dataclass(frozen=True, slots=True)
class Slot:
    """A state array of the parameter's shape and dtype. `name`: as in torch; `initial`: its first values."""

    name: str
    initial: float = 0.0


def slots_of(kind: str, group: Sequence[float]) -> tuple[Slot, ...]:
    """The state that the optimizer keeps of a parameter with these settings, in the order of KINDS."""
    settings = dict(zip(setting_names(kind), group, strict=True))
    momentum = (Slot("momentum_buffer"),) if settings.get("momentum") else ()
    moments = (Slot("exp_avg"), Slot("exp_avg_sq"))
    match kind:
        case "sgd":
            return momentum
        case "adam" | "adamw":
            return (*moments, Slot("max_exp_avg_sq")) if settings["amsgrad"] else moments
        case "adagrad":
            return (Slot("sum", settings["initial_accumulator_value"]),)
        case "rmsprop":
            mean = (Slot("grad_avg"),) if settings["centered"] else ()
            return (Slot("square_avg"), *mean, *momentum)
        case "adamax":
            return Slot("exp_avg"), Slot("exp_inf")
        case "lion":
            return (Slot("exp_avg"),)
        case "ftrl":
            return Slot("z"), Slot("n")
        case _:
            return moments


@dataclass(frozen=True, slots=True)
class PartitionSlots:
    """The optimizer's state of one partition, without its arrays. `counts`: updates of each block. `slots`: the names
    of the arrays, each in the places of the partition's payload. `version`: the partition's, where it was read."""

    partition: PartitionId
    counts: tuple[int, ...]
    slots: tuple[str, ...]
    version: Version | None = None


WHOLE_VARIABLES = frozenset({"lamb"})
"""Optimizers whose update of an element depends on the whole variable. Their variables are not cut into blocks."""


def setting_names(kind: str) -> tuple[str, ...]:
    return tuple(setting.name for setting in KINDS[kind])


def make_group(kind: str, given: Mapping[str, float]) -> tuple[float, ...]:
    """The values of one group in the order of KINDS, with defaults. Raises InvalidRequest for an unknown name."""
    unknown = sorted(set(given) - set(setting_names(kind)))
    if unknown:
        raise InvalidRequest(
            f"optimizer {kind!r} has no setting {unknown[0]!r}; it has {', '.join(setting_names(kind))}"
        )
    return tuple(float(given.get(setting.name, setting.default)) for setting in KINDS[kind])


def check_spec(spec: OptimizerSpec) -> None:
    """Raises InvalidRequest for an unknown kind or a value out of range."""
    if spec.kind not in KINDS:
        raise InvalidRequest(f"unknown optimizer {spec.kind!r}; the servers know {', '.join(sorted(KINDS))}")
    for index, values in enumerate(spec.groups):
        check_group(spec.kind, index, values)


def check_group(kind: str, index: int, values: Sequence[float]) -> None:
    """Raises InvalidRequest unless `values` are one group's settings of the kind, each in its range."""
    settings = KINDS[kind]
    if len(values) != len(settings):
        raise InvalidRequest(
            f"parameter group {index} of {kind!r} has {len(values)} values; expected {len(settings)}: "
            + ", ".join(setting_names(kind))
        )
    for setting, value in zip(settings, values, strict=True):
        good = value in (0.0, 1.0) if setting.flag else math.isfinite(value) and setting.low <= value < setting.high
        if not good:
            allowed = "0 or 1" if setting.flag else f"at least {setting.low:g} and below {setting.high:g}"
            raise InvalidRequest(
                f"parameter group {index} of {kind!r}: {setting.name} is {value!r}; expected {allowed}"
            )
    if kind == "sgd":
        _, momentum, dampening, _, nesterov, _ = values
        if nesterov and (momentum == 0 or dampening != 0):
            raise InvalidRequest(f"parameter group {index}: nesterov needs a momentum, and no dampening")
    if kind == "ftrl" and values[0] == 0:
        raise InvalidRequest(f"parameter group {index}: ftrl divides by lr, which is 0; expected more than 0")


def check_update(spec: OptimizerSpec, groups: Sequence[Sequence[float]]) -> None:
    """Raises InvalidRequest unless `groups` may replace the registered groups for one update."""
    if len(groups) != len(spec.groups):
        raise InvalidRequest(
            f"the push has settings for {len(groups)} parameter groups; the job has {len(spec.groups)}"
        )
    for index, (values, registered) in enumerate(zip(groups, spec.groups, strict=True)):
        check_group(spec.kind, index, values)
        for setting, value, first in zip(KINDS[spec.kind], values, registered, strict=True):
            momentum_appears = setting.name == "momentum" and (value == 0.0) != (first == 0.0)
            why = _STATE if momentum_appears else setting.fixed if value != first else ""
            if why:
                raise InvalidRequest(
                    f"parameter group {index}: {setting.name} was {first:g} when the job began and is {value:g} now",
                    why=f"{why}, so it may not change in a running job",
                    todo="start a job of another name",
                )
