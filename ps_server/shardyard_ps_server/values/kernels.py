"""Optimizer arithmetic: one pass over memory for each update rule, from pushed gradients to the next values.

Owns: the loops. A rule takes a `Task` (`pieces`), its state arrays, and its scalars. State arrays are as long as the
payload, and are updated in place. Scalars have the elements' dtype, because a wider scalar would widen the whole loop.

Invariants: the compiler may neither reorder nor contract floating-point operations, and element i of the results
depends only on element i of the arrays, so arrays that are cut anywhere give the same bits. Only `lamb` needs a whole
variable; its norm is always summed in one order. Operations follow the single-tensor functions of `torch.optim`, and
those of `shardyard_worker.optimizers.extra`, one by one. Settings do not cost anything per element: maximize is a
`sign` of 1 or -1, which is exact; a slot that the settings do not need is None, and numba compiles a loop without it.

Must not know: settings' names and ranges, counts, torch (shardyard_ps_server.values.optimizers).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardyard.domain.compiling import compiled, inlined
from shardyard_ps_server.values.pieces import (
    Array,
    Bytes,
    Task,
    add_up,
    gradient_of,
    part,
    piece_range,
    put,
    source_at,
    unpacked,
    window,
)

Scalar = np.floating[Any]


@compiled
def mean(task: Task, limit: float) -> None:
    """Writes the gradient itself, the weighted sum of its sources, as the next values. Elements beyond `limit`, unless
    that is 0, are clipped to it. A NaN stays."""
    _, new, sources, shares, scratch, _, _, _ = task
    start, stop, step = piece_range(task)
    most = scratch.dtype.type(limit)
    for begin in range(start, stop, step):
        into = part(new, begin, min(begin + step, stop), scratch)
        if shares.size == 0:
            into[:] = source_at(sources[0] + begin, into.size, scratch)
        else:
            add_up(sources, shares, begin, into)
        if limit > 0:
            for i in range(into.size):
                x = into[i]
                into[i] = most if x > most else (-most if x < -most else x)


@compiled
def compensate(task: Task, squares: Bytes | None, scalars: Array) -> None:
    """Delay compensation. The sources are a gradient g and the values that it was computed on; `old` has the values of
    now. Writes g + strength * g * g * (now - base) into `new`. `squares`: a running mean of g * g, which takes this
    gradient in first (its `weight` is 1 - decay); the strength is then divided by its root."""
    old, new, sources, _, scratch, _, start, stop = task
    strength, decay, weight, eps = unpacked(scalars, 4)
    now, into = part(old, start, stop, scratch), part(new, start, stop, scratch)
    n = now.size
    gradient, base = source_at(sources[0] + start, n, scratch), source_at(sources[1] + start, n, scratch)
    if squares is None:
        for i in range(n):
            g = gradient[i]
            into[i] = g + strength * g * g * (now[i] - base[i])
    else:
        means = part(squares, start, stop, scratch)
        for i in range(n):
            g = gradient[i]
            mean = decay * means[i] + weight * g * g
            means[i] = mean
            into[i] = g + strength / np.sqrt(mean + eps) * g * g * (now[i] - base[i])


# ---- rules


@inlined
def _slope(g: Scalar, w: Scalar, sign: Scalar, decay: Scalar) -> Scalar:
    """Returns the gradient to descend. A decay of 0 does not touch w, which may be infinite."""
    x = sign * g
    if decay != 0:
        x += decay * w
    return x


@inlined
def _lerp(start: Scalar, end: Scalar, weight: Scalar, rest: Scalar) -> Scalar:
    """As torch.lerp. `rest` is 1 - weight, computed in the arrays' dtype."""
    if weight < 0.5:
        return start + weight * (end - start)
    return end - rest * (end - start)


@compiled
def sgd(task: Task, buffer: Bytes | None, scalars: Array, first: bool, nesterov: bool) -> None:
    """`buffer`: None without momentum. `keep` is 1 - dampening; the first gradient enters the buffer whole."""
    sign, lr, decay, momentum, keep = unpacked(scalars, 5)
    start, stop, step = piece_range(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = window(task, begin, end)
        if buffer is None:
            for i in range(w_in.size):
                w_out[i] = w_in[i] - lr * _slope(g[i], w_in[i], sign, decay)
        else:
            velocity = part(buffer, begin, end, scalars)
            for i in range(w_in.size):
                x = _slope(g[i], w_in[i], sign, decay)
                b = x if first else momentum * velocity[i] + keep * x
                velocity[i] = b
                w_out[i] = w_in[i] - lr * (x + momentum * b if nesterov else b)
        put(task, begin, end)


@compiled
def adam(task: Task, exp_avg: Bytes, exp_avg_sq: Bytes, max_exp_avg_sq: Bytes | None, scalars: Array) -> None:
    """weight = 1 - beta; root2 = sqrt(1 - beta2^t); rate = lr / (1 - beta1^t). `max_exp_avg_sq`: the largest second
    moment so far, which is then in the denominator (amsgrad); None: the present one is.

    Adam adds `decay` times the parameter to the gradient (shrink is 1); AdamW multiplies it by `shrink` (decay is 0).
    """
    sign, decay, shrink, weight1, beta2, weight2, root2, eps, rate = unpacked(scalars, 9)
    rest1 = scalars.dtype.type(1) - weight1
    start, stop, step = piece_range(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = window(task, begin, end)
        avg = part(exp_avg, begin, end, scalars)
        avg_sq = part(exp_avg_sq, begin, end, scalars)
        if max_exp_avg_sq is not None:
            max_sq = part(max_exp_avg_sq, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            m = _lerp(avg[i], x, weight1, rest1)
            v = beta2 * avg_sq[i] + weight2 * x * x
            avg[i] = m
            avg_sq[i] = v
            if max_exp_avg_sq is not None:
                # a NaN in v stays there, so it stays in the largest
                v = max_sq[i] if max_sq[i] > v else v
                max_sq[i] = v
            w_out[i] = shrink * w_in[i] - rate * m / (np.sqrt(v) / root2 + eps)
        put(task, begin, end)


@compiled
def adagrad(task: Task, total: Bytes, scalars: Array) -> None:
    sign, lr, decay, eps = unpacked(scalars, 4)
    start, stop, step = piece_range(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = window(task, begin, end)
        sums = part(total, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            s = sums[i] + x * x
            sums[i] = s
            w_out[i] = w_in[i] - lr * x / (np.sqrt(s) + eps)
        put(task, begin, end)


@compiled
def rmsprop(task: Task, square_avg: Bytes, grad_avg: Bytes | None, buffer: Bytes | None, scalars: Array) -> None:
    """`weight` is 1 - alpha. `grad_avg`: with it the gradient is divided by the estimated deviation (centered); None:
    by the root of the second moment. `buffer`: None without momentum."""
    sign, lr, decay, alpha, weight, eps, momentum = unpacked(scalars, 7)
    rest = scalars.dtype.type(1) - weight
    start, stop, step = piece_range(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = window(task, begin, end)
        squares = part(square_avg, begin, end, scalars)
        if grad_avg is not None:
            means = part(grad_avg, begin, end, scalars)
        if buffer is not None:
            velocity = part(buffer, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            v = alpha * squares[i] + weight * x * x
            squares[i] = v
            if grad_avg is not None:
                a = _lerp(means[i], x, weight, rest)
                means[i] = a
                v = v - a * a
            if buffer is None:
                w_out[i] = w_in[i] - lr * x / (np.sqrt(v) + eps)
            else:
                b = momentum * velocity[i] + x / (np.sqrt(v) + eps)
                velocity[i] = b
                w_out[i] = w_in[i] - lr * b
        put(task, begin, end)


@compiled
def adamax(task: Task, exp_avg: Bytes, exp_inf: Bytes, scalars: Array) -> None:
    """weight = 1 - beta1; rate = lr / (1 - beta1^t)."""
    sign, decay, weight, beta2, eps, rate = unpacked(scalars, 6)
    rest = scalars.dtype.type(1) - weight
    start, stop, step = piece_range(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = window(task, begin, end)
        avg = part(exp_avg, begin, end, scalars)
        norm = part(exp_inf, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            m = _lerp(avg[i], x, weight, rest)
            before, now = beta2 * norm[i], abs(x) + eps
            # as torch.maximum: a NaN on either side stays
            largest = before if before > now or before != before else now
            avg[i] = m
            norm[i] = largest
            w_out[i] = w_in[i] - rate * m / largest
        put(task, begin, end)


@compiled
def momentum_product(beta1: float, momentum_decay: float, count: int) -> float:
    """Returns the product of nadam's momenta of updates 1 to `count`, or 0 once it is too small to change 1."""
    product = 1.0
    for t in range(1, count + 1):
        product *= beta1 * (1.0 - 0.5 * 0.96 ** (t * momentum_decay))
        if product < 1e-20:
            return 0.0
    return product


@compiled
def nadam(task: Task, exp_avg: Bytes, exp_avg_sq: Bytes, scalars: Array) -> None:
    """weight = 1 - beta; correction2 = 1 - beta2^t; `rate` is the gradient's, `rate_avg` that of its mean. `decay` and
    `shrink` as in `adam`."""
    sign, decay, shrink, weight1, beta2, weight2, correction2, eps, rate, rate_avg = unpacked(scalars, 10)
    rest1 = scalars.dtype.type(1) - weight1
    start, stop, step = piece_range(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = window(task, begin, end)
        avg = part(exp_avg, begin, end, scalars)
        avg_sq = part(exp_avg_sq, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            m = _lerp(avg[i], x, weight1, rest1)
            v = beta2 * avg_sq[i] + weight2 * x * x
            avg[i] = m
            avg_sq[i] = v
            root = np.sqrt(v / correction2) + eps
            w_out[i] = shrink * w_in[i] - rate * x / root - rate_avg * m / root
        put(task, begin, end)


@compiled
def radam(task: Task, exp_avg: Bytes, exp_avg_sq: Bytes, scalars: Array, rectified: bool) -> None:
    """weight = 1 - beta; correction1 = 1 - beta1^t; root2 = sqrt(1 - beta2^t); `rectifier` counts where the variance is
    tractable (`rectified`). `decay` and `shrink` as in `adam`."""
    sign, decay, shrink, weight1, beta2, weight2, correction1, root2, eps, lr, rectifier = unpacked(scalars, 11)
    rest1 = scalars.dtype.type(1) - weight1
    start, stop, step = piece_range(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = window(task, begin, end)
        avg = part(exp_avg, begin, end, scalars)
        avg_sq = part(exp_avg_sq, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            m = _lerp(avg[i], x, weight1, rest1)
            v = beta2 * avg_sq[i] + weight2 * x * x
            avg[i] = m
            avg_sq[i] = v
            update = m / correction1 * lr
            if rectified:
                update = update * (root2 / (np.sqrt(v) + eps)) * rectifier
            w_out[i] = shrink * w_in[i] - update
        put(task, begin, end)


@compiled
def lion(task: Task, exp_avg: Bytes, scalars: Array) -> None:
    """weight = 1 - beta. A NaN has the sign 0, as in torch.sign."""
    sign, shrink, lr, beta1, weight1, beta2, weight2 = unpacked(scalars, 7)
    zero = scalars.dtype.type(0)
    start, stop, step = piece_range(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = window(task, begin, end)
        avg = part(exp_avg, begin, end, scalars)
        for i in range(w_in.size):
            x, m = sign * g[i], avg[i]
            c = beta1 * m + weight1 * x
            avg[i] = beta2 * m + weight2 * x
            w_out[i] = shrink * w_in[i] - (lr if c > 0 else -lr if c < 0 else zero)
        put(task, begin, end)


@compiled
def ftrl(task: Task, z: Bytes, n: Bytes, scalars: Array, first: bool) -> None:
    """`z` starts as what makes the first values the solution without l1 and l2."""
    sign, lr, beta, l1, l2 = unpacked(scalars, 5)
    zero = scalars.dtype.type(0)
    start, stop, step = piece_range(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = window(task, begin, end)
        linear = part(z, begin, end, scalars)
        squares = part(n, begin, end, scalars)
        if first:
            for i in range(w_in.size):
                linear[i] = -(beta / lr) * w_in[i]
        for i in range(w_in.size):
            x = sign * g[i]
            total = squares[i] + x * x
            root = np.sqrt(total)
            pull = linear[i] + (x - (root - np.sqrt(squares[i])) / lr * w_in[i])
            linear[i] = pull
            squares[i] = total
            solution = ((l1 if pull > 0 else -l1) - pull) / ((beta + root) / lr + l2)
            w_out[i] = zero if abs(pull) <= l1 else solution
        put(task, begin, end)


@compiled
def square_norm(values: Array) -> float:
    """Returns the sum of squares, in double precision: eight partial sums take the elements in turn."""
    a, b, c, d, e, f, g, h = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    whole = values.size // 8 * 8
    for i in range(0, whole, 8):
        a += np.float64(values[i]) ** 2
        b += np.float64(values[i + 1]) ** 2
        c += np.float64(values[i + 2]) ** 2
        d += np.float64(values[i + 3]) ** 2
        e += np.float64(values[i + 4]) ** 2
        f += np.float64(values[i + 5]) ** 2
        g += np.float64(values[i + 6]) ** 2
        h += np.float64(values[i + 7]) ** 2
    for i in range(whole, values.size):
        a += np.float64(values[i]) ** 2
    return float((a + b) + (c + d) + ((e + f) + (g + h)))


@compiled
def _norm(values: Array) -> float:
    return float(np.sqrt(square_norm(values)))


@compiled
def lamb(task: Task, exp_avg: Bytes, exp_avg_sq: Bytes, scalars: Array, lr: float) -> None:
    """Updates one whole variable. weight = 1 - beta; root2 = sqrt(1 - beta2^t); scale = 1 / (1 - beta1^t). `new` has
    the update until its norm is known."""
    sign, decay, weight1, beta2, weight2, root2, eps, scale = unpacked(scalars, 8)
    rest1 = scalars.dtype.type(1) - weight1
    old, new, _, _, _, _, _, _ = task
    start, stop, step = piece_range(task)
    one = scalars.dtype.type(1)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, update = part(old, begin, end, scalars), part(new, begin, end, scalars)
        g = gradient_of(task, begin, w_in.size)
        avg = part(exp_avg, begin, end, scalars)
        avg_sq = part(exp_avg_sq, begin, end, scalars)
        for i in range(w_in.size):
            x = sign * g[i]
            m = _lerp(avg[i], x, weight1, rest1)
            v = beta2 * avg_sq[i] + weight2 * x * x
            avg[i] = m
            avg_sq[i] = v
            update[i] = _slope(scale * m / (np.sqrt(v) / root2 + eps), w_in[i], one, decay)
    w_in, w_out = part(old, start, stop, scalars), part(new, start, stop, scalars)
    values_norm, update_norm = _norm(w_in), _norm(w_out)
    trust = values_norm / update_norm if values_norm > 0 and update_norm > 0 else 1.0
    rate = scalars.dtype.type(lr * trust)
    for i in range(w_in.size):
        w_out[i] = w_in[i] - rate * w_out[i]


ALL = (sgd, adam, adagrad, rmsprop, adamax, nadam, radam, lamb, lion, ftrl)
