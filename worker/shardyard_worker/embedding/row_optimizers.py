"""How rows are updated: the optimizer settings of `shardyard.tables`.

Only rows that have a gradient change (lazy: no decay or momentum for the others), as with torch's sparse gradients.
Must not know: formulas (shardyard.domain.tables.row_rules), where rows are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shardyard.domain.tables import row_optimizers


@dataclass(frozen=True)
class RowOptimizer:
    """Settings of a table's optimizer. Raises InvalidRequest for one out of range."""

    kind: ClassVar[str]
    """The servers' name for it."""
    lr: float

    def __post_init__(self) -> None:
        _ = self.group

    @property
    def group(self) -> tuple[float, ...]:
        """All settings as numbers, in the servers' order."""
        return group_of(self.kind, dataclasses.asdict(self))


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
class RowWiseAdagrad(Adagrad):
    """Adagrad with one sum for each row, that of its mean squared gradients, as FBGEMM's exact row-wise Adagrad
    (Mudigere et al., arXiv:2104.05158). A row of dim 64 takes 65 numbers instead of 128.

    >>> embedding = sy.Embedding(64, optimizer=sy.tables.RowWiseAdagrad(lr=0.05))
    """

    kind = "rowwise_adagrad"


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


def group_of(kind: str, settings: Mapping[str, Any]) -> tuple[float, ...]:
    """The settings as numbers, in the servers' order. Raises InvalidRequest for one out of range."""
    given = {name: float(value) for name, value in settings.items() if name != "betas"}
    given |= zip(("beta1", "beta2"), map(float, settings.get("betas", ())), strict=False)
    group = row_optimizers.make_group(kind, given)
    row_optimizers.check_settings(kind, group)
    return group
