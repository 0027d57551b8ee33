"""How rows are updated: the optimizer settings of `shardyard.tables`, and the formulas on rows.

Owns: the settings, their ranges, the state of each row, and the formulas in operations of torch, for tables whose rows
are in this process. The formulas are those of `torch.optim`; for what torch lacks, those of `shardyard.optim` or the
paper. Only rows that have a gradient change (lazy: no decay or momentum for the others), as with torch's sparse
gradients. Invariant: the bits of a row depend only on its gradients and the number of the step. Must not know: ids,
where rows are kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shardyard.domain.errors import InvalidRequest

State = Mapping[str, torch.Tensor]
"""By name: shape (n, dim), or (n, 1), of the same rows; changed in place."""


@dataclass(frozen=True)
class RowOptimizer:
    """Settings of a table's optimizer. Raises InvalidRequest for one out of range."""

    kind: ClassVar[str]
    """The servers' name for it."""
    lr: float

    def __post_init__(self) -> None:
        check(self.kind, dataclasses.asdict(self))


@dataclass(frozen=True)
class SGD(RowOptimizer):
    """`torch.optim.SGD`. With a momentum, each row has a buffer that changes only when the row has a gradient.

    >>> embedding = sy.Embedding(8, optimizer=sy.tables.SGD(lr=0.1, momentum=0.9))
    """

    kind = "sgd"
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """`torch.optim.Adagrad`, the default of tables.

    >>> embedding = sy.Embedding(8, optimizer=sy.tables.Adagrad(lr=0.05))
    """

    kind = "adagrad"
    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10


@dataclass(frozen=True)
class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one sum for each row, that of its mean squared gradients, as FBGEMM's exact row-wise Adagrad
    (Mudigere et al., arXiv:2104.05158). A row of dim 64 takes 65 numbers instead of 128.

    >>> embedding = sy.Embedding(64, optimizer=sy.tables.RowWiseAdagrad(lr=0.05))
    """

    kind = "rowwise_adagrad"
    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10


@dataclass(frozen=True)
class Adam(RowOptimizer):
    """Lazy `torch.optim.Adam`: moments of rows without a gradient do not decay. The bias correction uses the number of
    the table's steps.

    >>> embedding = sy.Embedding(8, optimizer=sy.tables.Adam(lr=1e-3, betas=(0.9, 0.99)))
    """

    kind = "adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class AdamW(Adam):
    """Lazy `torch.optim.AdamW`: a row shrinks only at steps in which it has a gradient.

    >>> embedding = sy.Embedding(8, optimizer=sy.tables.AdamW(weight_decay=0.01))
    """

    kind = "adamw"
    weight_decay: float = 1e-2


@dataclass(frozen=True)
class SparseAdam(RowOptimizer):
    """`torch.optim.SparseAdam`, which adds `eps` before the bias is corrected.

    >>> embedding = sy.Embedding(8, optimizer=sy.tables.SparseAdam(lr=1e-3))
    """

    kind = "sparse_adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True)
class FTRL(RowOptimizer):
    """`shardyard.optim.FTRL` (McMahan et al., KDD 2013).

    >>> embedding = sy.Embedding(8, optimizer=sy.tables.FTRL(lr=0.1, l1=1e-3))
    """

    kind = "ftrl"
    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0


_STATES: dict[str, tuple[tuple[str, bool], ...]] = {
    "sgd": (("momentum_buffer", True),),
    "adagrad": (("sum", True),),
    "rowwise_adagrad": (("sum", False),),
    "adam": (("exp_avg", True), ("exp_avg_sq", True)),
    "adamw": (("exp_avg", True), ("exp_avg_sq", True)),
    "sparse_adam": (("exp_avg", True), ("exp_avg_sq", True)),
    "ftrl": (("z", True), ("n", True)),
}


def check(kind: str, settings: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for a setting out of range."""
    for name, value in settings.items():
        for each in value if isinstance(value, tuple) else (value,):
            high = 1.0 if name == "betas" else math.inf
            low_is_in = not (kind == "ftrl" and name == "lr")
            if not (0 <= each < high and (low_is_in or each > 0)):
                allowed = f"{'at least' if low_is_in else 'above'} 0" + (
                    " and below 1" if high == 1 else ", and finite"
                )
                raise InvalidRequest(f"{name} of a table's optimizer {kind!r} is {value!r}; expected {allowed}")
    if settings.get("nesterov") and not settings["momentum"]:
        raise InvalidRequest("nesterov without a momentum, for a table's optimizer 'sgd'")


def state_widths(kind: str, settings: Mapping[str, Any], dim: int) -> dict[str, int]:
    """The state of a row: names, which are torch's, and the number of values of each. All begin as 0."""
    if kind == "sgd" and not settings["momentum"]:
        return {}
    return {name: dim if is_whole else 1 for name, is_whole in _STATES[kind]}


def update(
    kind: str,
    settings: Mapping[str, Any],
    step: int,
    rows: torch.Tensor,
    gradients: torch.Tensor,
    state: State,
    fresh: torch.Tensor,
) -> None:
    """Takes step number `step`, counted from 1, of rows and their state, in place. Both have shape (n, dim). `fresh`,
    shape (n,): true for rows that were never updated."""
    decay = settings.get("weight_decay", 0.0)
    if decay and kind != "adamw":
        gradients = gradients.add(rows, alpha=decay)
    match kind:
        case "sgd":
            _sgd(settings, rows, gradients, state)
        case "adagrad" | "rowwise_adagrad":
            squares = gradients.square()
            if kind == "rowwise_adagrad":
                squares = squares.mean(dim=1, keepdim=True)
            total = state["sum"]
            total[fresh] = settings["initial_accumulator_value"]
            total.add_(squares)
            rate = settings["lr"] / (1 + (step - 1) * settings["lr_decay"])
            rows.sub_(rate * gradients / total.sqrt().add_(settings["eps"]))
        case "ftrl":
            _ftrl(settings, rows, gradients, state, fresh)
        case _:
            _adam(kind, settings, step, rows, gradients, state)


def _sgd(settings: Mapping[str, Any], rows: torch.Tensor, gradients: torch.Tensor, state: State) -> None:
    momentum = settings["momentum"]
    if momentum:
        buffer = state["momentum_buffer"].mul_(momentum).add_(gradients)
        gradients = gradients.add(buffer, alpha=momentum) if settings["nesterov"] else buffer
    rows.sub_(gradients, alpha=settings["lr"])


def _adam(
    kind: str, settings: Mapping[str, Any], step: int, rows: torch.Tensor, gradients: torch.Tensor, state: State
) -> None:
    (beta1, beta2), lr, eps = settings["betas"], settings["lr"], settings["eps"]
    if kind == "adamw":
        rows.mul_(1 - lr * settings["weight_decay"])
    mean = state["exp_avg"].lerp_(gradients, 1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    root = math.sqrt(1 - beta2**step)
    before, after = (eps, 0.0) if kind == "sparse_adam" else (0.0, eps)
    denominator = square.sqrt().add_(before).div_(root).add_(after)
    rows.addcdiv_(mean, denominator, value=-lr / (1 - beta1**step))


def _ftrl(
    settings: Mapping[str, Any], rows: torch.Tensor, gradients: torch.Tensor, state: State, fresh: torch.Tensor
) -> None:
    lr, beta, l1 = settings["lr"], settings["beta"], settings["l1"]
    z, n = state["z"], state["n"]
    z[fresh] = rows[fresh] * -(beta / lr)
    former = n.sqrt()
    root = n.addcmul_(gradients, gradients).sqrt()
    z.add_(gradients - (root - former) / lr * rows)
    solution = (z.sign() * l1 - z) / ((root + beta) / lr + settings["l2"])
    rows.copy_(torch.where(z.abs() <= l1, torch.zeros_like(z), solution))
