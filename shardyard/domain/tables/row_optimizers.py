"""The optimizers of tables, and their settings: those of dense variables that make sense for single rows, and two that
only rows have. All are lazy: a row that is not pushed stays as it is.

Owns: names and checks, and which state a row has. Must not know: how rows are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardyard.domain import optimizers
from shardyard.domain.errors import UnsupportedOptimizer
from shardyard.domain.optimizers import OptimizerSpec, Setting

KINDS: Final[dict[str, str]] = {
    "sgd": "sgd",
    "adagrad": "adagrad",
    "rowwise_adagrad": "adagrad",
    "adam": "adam",
    "sparse_adam": "adam",
    "adamw": "adamw",
    "ftrl": "ftrl",
}
"""Whose settings each has (shardyard.domain.optimizers.KINDS). `rowwise_adagrad` keeps one sum a row; `sparse_adam` is
torch.optim.SparseAdam, which adds eps elsewhere than Adam."""


def settings_of(kind: str) -> tuple[Setting, ...]:
    """The settings of a kind, in their order. Raises UnsupportedOptimizer."""
    if kind not in KINDS:
        raise UnsupportedOptimizer(f"a table with the optimizer {kind!r}; tables have {', '.join(sorted(KINDS))}")
    return optimizers.KINDS[KINDS[kind]]


def make_group(kind: str, given: dict[str, float]) -> tuple[float, ...]:
    """The values of all settings in their order, defaults filled in. Raises InvalidRequest."""
    settings_of(kind)
    return optimizers.make_group(KINDS[kind], given)


def check_settings(kind: str, values: tuple[float, ...]) -> None:
    """Raises InvalidRequest unless `values` are settings of the kind, each in its range."""
    settings_of(kind)
    optimizers.check_group(KINDS[kind], 0, values)


def check_update(kind: str, registered: tuple[float, ...], values: Sequence[float]) -> None:
    """Raises InvalidRequest unless `values` may replace the registered settings for one update."""
    settings_of(kind)
    optimizers.check_update(OptimizerSpec(KINDS[kind], (registered,)), [values])


@dataclass(frozen=True, slots=True)
class Slot:
    """A part of a row's state. `name`: torch's name. `whole`: as long as the values; otherwise one number."""

    name: str
    initial: float = 0.0
    whole: bool = True

    def width(self, dim: int) -> int:
        """How many numbers it has in a row of `dim` values."""
        return dim if self.whole else 1


def slots_of(kind: str, settings: Sequence[float]) -> tuple[Slot, ...]:
    """The state of a row, in its order."""
    if kind == "sgd":
        _, momentum, *_ = settings
        return (Slot("momentum_buffer"),) if momentum != 0 else ()
    if kind in ("adagrad", "rowwise_adagrad"):
        *_, initial, _, _ = settings
        return (Slot("sum", initial, whole=kind == "adagrad"),)
    if kind == "ftrl":
        return (Slot("z"), Slot("n"))
    *_, amsgrad, _ = settings
    moments = (Slot("exp_avg"), Slot("exp_avg_sq"))
    return (*moments, Slot("max_exp_avg_sq")) if amsgrad else moments
