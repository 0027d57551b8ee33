"""Optimizer arithmetic on rows: one pass over a row's values and state for each update rule.

Servers and processes without one update rows with these loops, so both give the same bits.

Owns: the loops, and how settings become a rule and its scalars. Invariants: the operations are those of the servers'
dense kernels, one by one, in float32, so a row that is pushed at every step has the bits of a dense variable. A row
that is not pushed stays as it is (lazy: no decay, and momentum does not continue). Scalars are computed in double
precision and rounded last. Must not know: ids, buckets, locks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba.np.unsafe.ndarray import to_fixed_tuple

from shardyard.domain.compiling import compiled
from shardyard.domain.tables.prefetch import prefetch
from shardyard.domain.tables.row_optimizers import Slot

Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]

SGD: Final = 1
MOMENTUM: Final = 2
ADAGRAD: Final = 3
ROWWISE_ADAGRAD: Final = 4
ADAM: Final = 5
AMSGRAD: Final = 6
FTRL: Final = 7

# a row is prefetched this many updates ahead; of a long row only the beginning, since the processor prefetches the rest
_AHEAD: Final = 8
_PREFETCHED_VALUES: Final = 512
_LINE: Final = 16

_unpacked: Any = to_fixed_tuple


# ---- settings


@dataclass(frozen=True, slots=True)
class RowRule:
    """What loops get: a code, and scalars in the order in which the rule unpacks them."""

    code: int
    scalars: Floats


def rule_of(kind: str, settings: Sequence[float], step: int) -> RowRule:
    """The rule of update number `step`, counted from 1."""
    if kind == "sgd":
        lr, momentum, dampening, decay, nesterov, maximize = settings
        if momentum == 0:
            return _rule(SGD, _sign(maximize), lr, decay)
        # torch's buffer begins as the first gradient, not dampened
        keep = 1.0 if step == 1 else 1 - dampening
        return _rule(MOMENTUM, _sign(maximize), lr, decay, momentum, keep, nesterov)
    if kind in ("adagrad", "rowwise_adagrad"):
        lr, lr_decay, decay, _, eps, maximize = settings
        rate = lr / (1 + (step - 1) * lr_decay)
        return _rule(ADAGRAD if kind == "adagrad" else ROWWISE_ADAGRAD, _sign(maximize), rate, decay, eps)
    if kind == "ftrl":
        lr, beta, l1, l2, maximize = settings
        return _rule(FTRL, _sign(maximize), lr, beta, l1, l2)
    lr, beta1, beta2, eps, decay, amsgrad, maximize = settings
    root2 = (1 - beta2**step) ** 0.5
    added, shrink = (0.0, 1 - lr * decay) if kind == "adamw" else (decay, 1.0)
    # torch.optim.SparseAdam adds eps to the root before the bias is corrected
    after = eps / root2 if kind == "sparse_adam" else eps
    scalars = (_sign(maximize), added, shrink, 1 - beta1, beta2, 1 - beta2, root2, after, lr / (1 - beta1**step))
    return _rule(AMSGRAD if amsgrad else ADAM, *scalars)


def _rule(code: int, *scalars: float) -> RowRule:
    return RowRule(code, np.array(scalars, np.float32))


def _sign(maximize: float) -> float:
    return -1.0 if maximize else 1.0


def begin_rows(rule: RowRule, slots: Sequence[Slot], records: Floats, dim: int) -> None:
    """Sets the state of new rows. `records`: shape (n, dim + state), where the values are set already."""
    at = dim
    for slot in slots:
        records[:, at : at + slot.width(dim)] = slot.initial
        at += slot.width(dim)
    if rule.code == FTRL:  # as in `begin`
        _, lr, beta, _, _ = rule.scalars
        records[:, dim : 2 * dim] = -(beta / lr) * records[:, :dim]


def update_rows(rule: RowRule, slab: Floats, rows: Rows, places: Places, gradients: Floats, dim: int) -> None:
    """As `apply`, but only the loop of this rule is compiled."""
    _LOOPS[rule.code](rule.scalars, slab, rows, places, gradients, dim)


# ---- arithmetic


@compiled
def _slope(g: np.float32, w: np.float32, sign: np.float32, decay: np.float32) -> np.float32:
    """The gradient to descend. A decay of 0 does not touch w, which may be infinite."""
    x = sign * g
    if decay != 0:
        x += decay * w
    return x


@compiled
def _lerp(start: np.float32, end: np.float32, weight: np.float32, rest: np.float32) -> np.float32:
    if weight < 0.5:
        return start + weight * (end - start)
    return end - rest * (end - start)


@compiled
def begin(code: int, scalars: Floats, row: Floats, dim: int) -> None:
    """Sets the state of a new row that depends on its values. The rest has its constants already."""
    if code == FTRL:
        _, lr, beta, _, _ = _unpacked(scalars, 5)
        for d in range(dim):
            row[dim + d] = -(beta / lr) * row[d]


@compiled
def apply(code: int, scalars: Floats, slab: Floats, rows: Rows, places: Places, gradients: Floats, dim: int) -> None:
    """Updates slab[rows[k]] by gradients[places[k]], for one k after the other. A negative row is skipped."""
    if code == SGD:
        _sgd(scalars, slab, rows, places, gradients, dim)
    elif code == MOMENTUM:
        _momentum(scalars, slab, rows, places, gradients, dim)
    elif code == ADAGRAD:
        _adagrad(scalars, slab, rows, places, gradients, dim)
    elif code == ROWWISE_ADAGRAD:
        _rowwise_adagrad(scalars, slab, rows, places, gradients, dim)
    elif code == ADAM:
        _adam(scalars, slab, rows, places, gradients, dim)
    elif code == AMSGRAD:
        _amsgrad(scalars, slab, rows, places, gradients, dim)
    elif code == FTRL:
        _ftrl(scalars, slab, rows, places, gradients, dim)


@compiled
def _row(slab: Floats, rows: Rows, k: int) -> int:
    """The row of update number k. Prefetches the row of a later update."""
    stride = slab.shape[1]
    later = k + max(1, min(_AHEAD, _PREFETCHED_VALUES // stride))
    if later < rows.size and rows[later] >= 0:
        for d in range(0, min(stride, _PREFETCHED_VALUES), _LINE):
            prefetch(slab, rows[later] * stride + d)
    return int(rows[k])


@compiled
def _sgd(scalars: Floats, slab: Floats, rows: Rows, places: Places, gradients: Floats, dim: int) -> None:
    sign, lr, decay = _unpacked(scalars, 3)
    for k in range(rows.size):
        r, i = _row(slab, rows, k), places[k]
        if r >= 0:
            for d in range(dim):
                slab[r, d] = slab[r, d] - lr * _slope(gradients[i, d], slab[r, d], sign, decay)


@compiled
def _momentum(scalars: Floats, slab: Floats, rows: Rows, places: Places, gradients: Floats, dim: int) -> None:
    sign, lr, decay, momentum, keep, nesterov = _unpacked(scalars, 6)
    for k in range(rows.size):
        r, i = _row(slab, rows, k), places[k]
        if r >= 0:
            for d in range(dim):
                w = slab[r, d]
                x = _slope(gradients[i, d], w, sign, decay)
                b = momentum * slab[r, dim + d] + keep * x
                slab[r, dim + d] = b
                slab[r, d] = w - lr * (x + momentum * b if nesterov != 0 else b)


@compiled
def _adagrad(scalars: Floats, slab: Floats, rows: Rows, places: Places, gradients: Floats, dim: int) -> None:
    sign, lr, decay, eps = _unpacked(scalars, 4)
    for k in range(rows.size):
        r, i = _row(slab, rows, k), places[k]
        if r >= 0:
            for d in range(dim):
                w = slab[r, d]
                x = _slope(gradients[i, d], w, sign, decay)
                s = slab[r, dim + d] + x * x
                slab[r, dim + d] = s
                slab[r, d] = w - lr * x / (np.sqrt(s) + eps)


@compiled
def _rowwise_adagrad(scalars: Floats, slab: Floats, rows: Rows, places: Places, gradients: Floats, dim: int) -> None:
    """One sum for each row, that of its mean squared gradients: FBGEMM's exact row-wise Adagrad (Khudia et al.,
    arXiv:2101.05615; Mudigere et al., arXiv:2104.05158). The squares are summed in eight lanes."""
    sign, lr, decay, eps = _unpacked(scalars, 4)
    lanes = np.zeros(8, np.float32)
    for k in range(rows.size):
        r, i = _row(slab, rows, k), places[k]
        if r >= 0:
            lanes[:] = 0
            for d in range(dim):
                x = _slope(gradients[i, d], slab[r, d], sign, decay)
                lanes[d % 8] += x * x
            total = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]))
            s = slab[r, dim] + total / np.float32(dim)
            slab[r, dim] = s
            root = np.sqrt(s) + eps
            for d in range(dim):
                w = slab[r, d]
                slab[r, d] = w - lr * _slope(gradients[i, d], w, sign, decay) / root


@compiled
def _adam(scalars: Floats, slab: Floats, rows: Rows, places: Places, gradients: Floats, dim: int) -> None:
    sign, decay, shrink, weight1, beta2, weight2, root2, eps, rate = _unpacked(scalars, 9)
    rest1 = np.float32(1) - weight1
    for k in range(rows.size):
        r, i = _row(slab, rows, k), places[k]
        if r >= 0:
            for d in range(dim):
                w = slab[r, d]
                x = _slope(gradients[i, d], w, sign, decay)
                m = _lerp(slab[r, dim + d], x, weight1, rest1)
                v = beta2 * slab[r, 2 * dim + d] + weight2 * x * x
                slab[r, dim + d] = m
                slab[r, 2 * dim + d] = v
                slab[r, d] = shrink * w - rate * m / (np.sqrt(v) / root2 + eps)


@compiled
def _amsgrad(scalars: Floats, slab: Floats, rows: Rows, places: Places, gradients: Floats, dim: int) -> None:
    sign, decay, shrink, weight1, beta2, weight2, root2, eps, rate = _unpacked(scalars, 9)
    rest1 = np.float32(1) - weight1
    for k in range(rows.size):
        r, i = _row(slab, rows, k), places[k]
        if r >= 0:
            for d in range(dim):
                w = slab[r, d]
                x = _slope(gradients[i, d], w, sign, decay)
                m = _lerp(slab[r, dim + d], x, weight1, rest1)
                v = beta2 * slab[r, 2 * dim + d] + weight2 * x * x
                largest = slab[r, 3 * dim + d]
                # a NaN in v stays there, so it stays in largest
                largest = largest if largest > v else v
                slab[r, dim + d] = m
                slab[r, 2 * dim + d] = v
                slab[r, 3 * dim + d] = largest
                slab[r, d] = shrink * w - rate * m / (np.sqrt(largest) / root2 + eps)


@compiled
def _ftrl(scalars: Floats, slab: Floats, rows: Rows, places: Places, gradients: Floats, dim: int) -> None:
    sign, lr, beta, l1, l2 = _unpacked(scalars, 5)
    zero = np.float32(0)
    for k in range(rows.size):
        r, i = _row(slab, rows, k), places[k]
        if r >= 0:
            for d in range(dim):
                w, squares = slab[r, d], slab[r, 2 * dim + d]
                x = sign * gradients[i, d]
                total = squares + x * x
                root = np.sqrt(total)
                pull = slab[r, dim + d] + (x - (root - np.sqrt(squares)) / lr * w)
                slab[r, dim + d] = pull
                slab[r, 2 * dim + d] = total
                solution = ((l1 if pull > 0 else -l1) - pull) / ((beta + root) / lr + l2)
                slab[r, d] = zero if abs(pull) <= l1 else solution


_LOOPS: Final[dict[int, Callable[..., None]]] = {
    SGD: _sgd,
    MOMENTUM: _momentum,
    ADAGRAD: _adagrad,
    ROWWISE_ADAGRAD: _rowwise_adagrad,
    ADAM: _adam,
    AMSGRAD: _amsgrad,
    FTRL: _ftrl,
}
