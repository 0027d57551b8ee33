"""Optimizer arithmetic: one fused pass over memory for each update rule.

Owns: the loops. Invariants: a kernel reads `w_in` and `g`, writes `w_out` (which overlaps neither), and updates its
state arrays in place; all arrays are 1-D, contiguous, of one length and of one dtype, and so are the scalars (a wider
scalar would widen the whole loop). Element i of the results depends on element i of the arrays only, and the compiler
may neither reorder nor contract floating-point operations, so arrays cut anywhere give the same bits.

Operations follow the single-tensor functions of `torch.optim` one by one. What an update's settings decide is hoisted:
maximize is a `sign` of 1 or -1, which is exact; conditions in a loop never depend on the element.

Must not know: settings' names and ranges, counts, torch (shardyard_ps_server.optimizers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]
Scalar = np.floating[Any]

_F = TypeVar("_F", bound=Callable[..., object])


def _compiled(function: _F) -> _F:
    """Machine code at the first call, kept on disk (in NUMBA_CACHE_DIR if set) where a directory can be written."""
    try:
        return cast(_F, numba.njit(nogil=True, cache=True, error_model="numpy")(function))
    except RuntimeError:  # no directory is writable
        return cast(_F, numba.njit(nogil=True, cache=False, error_model="numpy")(function))


@_compiled
def _slope(g: Scalar, w: Scalar, sign: Scalar, decay: Scalar) -> Scalar:
    """The gradient to descend. A decay of 0 does not touch w, which may be infinite."""
    x = sign * g
    if decay != 0:
        x += decay * w
    return x


@_compiled
def _lerp(start: Scalar, end: Scalar, weight: Scalar, rest: Scalar) -> Scalar:
    """torch.lerp; `rest` is 1 - weight, rounded after the subtraction in the arrays' dtype."""
    if weight < 0.5:
        return start + weight * (end - start)
    return end - rest * (end - start)


@_compiled
def sgd(w_in: Array, g: Array, w_out: Array, sign: Scalar, lr: Scalar, decay: Scalar) -> None:
    for i in range(w_in.size):
        w_out[i] = w_in[i] - lr * _slope(g[i], w_in[i], sign, decay)


@_compiled
def sgd_momentum(
    w_in: Array,
    g: Array,
    w_out: Array,
    buffer: Array,
    sign: Scalar,
    lr: Scalar,
    decay: Scalar,
    momentum: Scalar,
    keep: Scalar,
    first: bool,
    nesterov: bool,
) -> None:
    """`keep` is 1 - dampening; the first gradient enters the buffer whole."""
    for i in range(w_in.size):
        x = _slope(g[i], w_in[i], sign, decay)
        b = x if first else momentum * buffer[i] + keep * x
        buffer[i] = b
        w_out[i] = w_in[i] - lr * (x + momentum * b if nesterov else b)


@_compiled
def adam(
    w_in: Array,
    g: Array,
    w_out: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    sign: Scalar,
    decay: Scalar,
    shrink: Scalar,
    weight1: Scalar,
    rest1: Scalar,
    beta2: Scalar,
    weight2: Scalar,
    root2: Scalar,
    eps: Scalar,
    rate: Scalar,
) -> None:
    """weight = 1 - beta; root2 = sqrt(1 - beta2^t); rate = lr / (1 - beta1^t).

    Adam adds `decay` times the parameter to the gradient (shrink is 1); AdamW multiplies it by `shrink` (decay is 0).
    """
    for i in range(w_in.size):
        x = _slope(g[i], w_in[i], sign, decay)
        m = _lerp(exp_avg[i], x, weight1, rest1)
        v = beta2 * exp_avg_sq[i] + weight2 * x * x
        exp_avg[i] = m
        exp_avg_sq[i] = v
        w_out[i] = shrink * w_in[i] - rate * m / (np.sqrt(v) / root2 + eps)


@_compiled
def amsgrad(
    w_in: Array,
    g: Array,
    w_out: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    max_exp_avg_sq: Array,
    sign: Scalar,
    decay: Scalar,
    shrink: Scalar,
    weight1: Scalar,
    rest1: Scalar,
    beta2: Scalar,
    weight2: Scalar,
    root2: Scalar,
    eps: Scalar,
    rate: Scalar,
) -> None:
    """`adam` with the largest second moment so far in the denominator."""
    for i in range(w_in.size):
        x = _slope(g[i], w_in[i], sign, decay)
        m = _lerp(exp_avg[i], x, weight1, rest1)
        v = beta2 * exp_avg_sq[i] + weight2 * x * x
        largest = max_exp_avg_sq[i] if max_exp_avg_sq[i] > v else v  # a NaN in v stays there, so it stays in largest
        exp_avg[i] = m
        exp_avg_sq[i] = v
        max_exp_avg_sq[i] = largest
        w_out[i] = shrink * w_in[i] - rate * m / (np.sqrt(largest) / root2 + eps)


@_compiled
def adagrad(
    w_in: Array,
    g: Array,
    w_out: Array,
    total: Array,
    sign: Scalar,
    lr: Scalar,
    decay: Scalar,
    eps: Scalar,
) -> None:
    for i in range(w_in.size):
        x = _slope(g[i], w_in[i], sign, decay)
        s = total[i] + x * x
        total[i] = s
        w_out[i] = w_in[i] - lr * x / (np.sqrt(s) + eps)


@_compiled
def rmsprop(
    w_in: Array,
    g: Array,
    w_out: Array,
    square_avg: Array,
    sign: Scalar,
    lr: Scalar,
    decay: Scalar,
    alpha: Scalar,
    weight: Scalar,
    eps: Scalar,
) -> None:
    """`weight` is 1 - alpha."""
    for i in range(w_in.size):
        x = _slope(g[i], w_in[i], sign, decay)
        v = alpha * square_avg[i] + weight * x * x
        square_avg[i] = v
        w_out[i] = w_in[i] - lr * x / (np.sqrt(v) + eps)


@_compiled
def rmsprop_momentum(
    w_in: Array,
    g: Array,
    w_out: Array,
    square_avg: Array,
    buffer: Array,
    sign: Scalar,
    lr: Scalar,
    decay: Scalar,
    alpha: Scalar,
    weight: Scalar,
    eps: Scalar,
    momentum: Scalar,
) -> None:
    for i in range(w_in.size):
        x = _slope(g[i], w_in[i], sign, decay)
        v = alpha * square_avg[i] + weight * x * x
        b = momentum * buffer[i] + x / (np.sqrt(v) + eps)
        square_avg[i] = v
        buffer[i] = b
        w_out[i] = w_in[i] - lr * b


@_compiled
def rmsprop_centered(
    w_in: Array,
    g: Array,
    w_out: Array,
    square_avg: Array,
    grad_avg: Array,
    sign: Scalar,
    lr: Scalar,
    decay: Scalar,
    alpha: Scalar,
    weight: Scalar,
    rest: Scalar,
    eps: Scalar,
) -> None:
    """Divides by the estimated deviation, not by the root of the second moment."""
    for i in range(w_in.size):
        x = _slope(g[i], w_in[i], sign, decay)
        v = alpha * square_avg[i] + weight * x * x
        a = _lerp(grad_avg[i], x, weight, rest)
        square_avg[i] = v
        grad_avg[i] = a
        w_out[i] = w_in[i] - lr * x / (np.sqrt(v - a * a) + eps)


@_compiled
def rmsprop_centered_momentum(
    w_in: Array,
    g: Array,
    w_out: Array,
    square_avg: Array,
    grad_avg: Array,
    buffer: Array,
    sign: Scalar,
    lr: Scalar,
    decay: Scalar,
    alpha: Scalar,
    weight: Scalar,
    rest: Scalar,
    eps: Scalar,
    momentum: Scalar,
) -> None:
    for i in range(w_in.size):
        x = _slope(g[i], w_in[i], sign, decay)
        v = alpha * square_avg[i] + weight * x * x
        a = _lerp(grad_avg[i], x, weight, rest)
        b = momentum * buffer[i] + x / (np.sqrt(v - a * a) + eps)
        square_avg[i] = v
        grad_avg[i] = a
        buffer[i] = b
        w_out[i] = w_in[i] - lr * b


ALL = (
    sgd,
    sgd_momentum,
    adam,
    amsgrad,
    adagrad,
    rmsprop,
    rmsprop_momentum,
    rmsprop_centered,
    rmsprop_centered_momentum,
)
