"""Optimizer arithmetic: one pass over memory for each update rule, from what was pushed to the next values.

Owns: the loops. A rule takes a `Task`, its state arrays, which are as long as the payload and updated in place, and its
scalars in the elements' dtype (a wider scalar would widen the whole loop). The gradient is the sum of share times value
in the order of the sources, each product and each sum rounded to the dtype. It is made piece by piece in the scratch,
which stays in the processor's cache, and the rule reads it there: no sum is ever as long as the payload.

Invariants: the compiler may neither reorder nor contract floating-point operations, and element i of the results
depends on element i of the arrays only, so arrays cut anywhere give the same bits; `lamb` alone needs a whole variable,
whose norm is always summed in one order. Operations follow the single-tensor functions of `torch.optim`, and those of
`shardyard_worker.optimizers.extra`, one by one. What an update's settings decide is hoisted: maximize is a `sign` of 1
or -1, which is exact; conditions in a loop never depend on the element.

Must not know: settings' names and ranges, counts, torch (shardyard_ps_server.values.optimizers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numba.extending
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.np.numpy_support import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from shardyard.domain.compiling import compiled
from shardyard.transport.stream_copy import copy_past_cache

Array = npt.NDArray[np.floating[Any]]
Scalar = np.floating[Any]
Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]
Task = tuple[Bytes, Bytes, Addresses, Shares, Array, Array, int, int]
"""What is to be updated, bytes [start, stop) of one partition's payload:

    old, new     values before and after
    sources      addresses of the payloads that were pushed, as `locate` gives them
    shares       each source's share of the mean; empty: a lone source, taken as it is
    scratch      memory for the sum of a piece; its dtype is that of the elements
    staged       memory for the next values of a piece, which then go past the cache; empty: they are written in place
    start, stop  multiples of the element's size
"""


# ---- memory


def _make_pointer(_context: Any, _address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


# untyped, or typed as what they are before they are compiled
_pointer: Any = numba.extending.intrinsic(_make_pointer)
_array_at: Any = carray
_unpacked: Any = to_fixed_tuple


@compiled
def locate(old: Bytes, new: Bytes, payload: Bytes, align_bytes: int) -> int:
    """The address of a payload, 0 where an update may not read it: it must be as long as the values, all must begin at
    a multiple of `align_bytes`, and `new` may overlap neither of the others."""
    n = new.size
    to, before, address = np.int64(new.ctypes.data), np.int64(old.ctypes.data), np.int64(payload.ctypes.data)
    fits = old.size == n and payload.size == n and (to | before | address) % align_bytes == 0
    apart = abs(to - before) >= n and abs(to - address) >= n
    return int(address) if fits and apart else 0


@compiled
def _source(address: int, length: int, scratch: Array) -> Array:
    values: Array = _array_at(_pointer(address), (length,), scratch.dtype)
    return values


@compiled
def _part(values: Bytes, begin: int, end: int, scratch: Array) -> Array:
    return values[begin:end].view(scratch.dtype)


@compiled
def _pieces(task: Task) -> tuple[int, int, int]:
    """The range of where pieces begin: one piece where there is nothing to sum, or to stage."""
    _, _, _, shares, scratch, staged, start, stop = task
    if staged.size:
        return start, stop, staged.size * staged.itemsize
    return start, stop, (max(stop - start, 1) if shares.size == 0 else scratch.size * scratch.itemsize)


@compiled
def _sum(sources: Addresses, shares: Shares, begin: int, total: Array) -> None:
    """Two sources at least, into `total`."""
    n = total.size
    left, right = _source(sources[0] + begin, n, total), _source(sources[1] + begin, n, total)
    left_share, right_share = total.dtype.type(shares[0]), total.dtype.type(shares[1])
    for i in range(n):
        total[i] = left[i] * left_share + right[i] * right_share
    for k in range(2, sources.size):
        value, share = _source(sources[k] + begin, n, total), total.dtype.type(shares[k])
        for i in range(n):
            total[i] += value[i] * share


@compiled
def _scale(source: int, share: float, begin: int, total: Array) -> None:
    value, factor = _source(source + begin, total.size, total), total.dtype.type(share)
    for i in range(total.size):
        total[i] = value[i] * factor


@compiled
def _gradient(task: Task, begin: int, n: int) -> Array:
    _, _, sources, shares, scratch, _, _, _ = task
    if shares.size == 0:
        return _source(sources[0] + begin, n, scratch)
    total = scratch[:n]
    if shares.size == 1:
        _scale(sources[0], shares[0], begin, total)
    else:
        _sum(sources, shares, begin, total)
    return total


@compiled
def _window(task: Task, begin: int, end: int) -> tuple[Array, Array, Array]:
    """Values before, gradient, and values after, of bytes [begin, end)."""
    old, new, _, _, scratch, staged, _, _ = task
    n = (end - begin) // scratch.itemsize
    after = staged[:n] if staged.size else _part(new, begin, end, scratch)
    return _part(old, begin, end, scratch), _gradient(task, begin, n), after


@compiled
def _put(task: Task, begin: int, end: int) -> None:
    """The next values of bytes [begin, end) are made; they go where they belong."""
    _, new, _, _, _, staged, _, _ = task
    if staged.size:
        copy_past_cache(new[begin:end], staged.view(np.uint8)[: end - begin])


@compiled
def mean(task: Task) -> None:
    """The sum of share times value of two sources or more, as the next values."""
    _, new, sources, shares, scratch, _, _, _ = task
    start, stop, step = _pieces(task)
    for begin in range(start, stop, step):
        _sum(sources, shares, begin, _part(new, begin, min(begin + step, stop), scratch))


@compiled
def compensate(task: Task) -> None:
    """The first source, a gradient, plus the share times its square times what the values have changed by since those
    that it was computed on, which are the second source. Into `new`; `old` has the values of now."""
    old, new, sources, shares, scratch, _, start, stop = task
    now, into = _part(old, start, stop, scratch), _part(new, start, stop, scratch)
    n = now.size
    gradient, base = _source(sources[0] + start, n, scratch), _source(sources[1] + start, n, scratch)
    strength = scratch.dtype.type(shares[0])
    for i in range(n):
        g = gradient[i]
        into[i] = g + strength * g * g * (now[i] - base[i])


@compiled
def compensate_adaptively(task: Task, squares: Bytes, scalars: Array) -> None:
    """`compensate` with a share that is divided by the root of a running mean of squares, which takes this gradient in
    first. `weight` is 1 - decay."""
    old, new, sources, _, scratch, _, start, stop = task
    strength, decay, weight, eps = _unpacked(scalars, 4)
    now, into = _part(old, start, stop, scratch), _part(new, start, stop, scratch)
    n = now.size
    gradient, base = _source(sources[0] + start, n, scratch), _source(sources[1] + start, n, scratch)
    means = _part(squares, start, stop, scratch)
    for i in range(n):
        g = gradient[i]
        mean = decay * means[i] + weight * g * g
        means[i] = mean
        into[i] = g + strength / np.sqrt(mean + eps) * g * g * (now[i] - base[i])


@compiled
def gather(task: Task, limit: float) -> None:
    """The gradient itself, as the next values; elements beyond `limit`, unless that is 0, are brought to it. A NaN
    stays."""
    _, new, sources, shares, scratch, _, start, stop = task
    _, _, step = _pieces(task)
    most = scratch.dtype.type(limit)
    for begin in range(start, stop, step):
        into = _part(new, begin, min(begin + step, stop), scratch)
        if shares.size == 0:
            into[:] = _source(sources[0] + begin, into.size, scratch)
        elif shares.size == 1:
            _scale(sources[0], shares[0], begin, into)
        else:
            _sum(sources, shares, begin, into)
        if limit > 0:
            for i in range(into.size):
                x = into[i]
                into[i] = most if x > most else (-most if x < -most else x)


# ---- rules


@compiled
def _slope(g: Scalar, w: Scalar, sign: Scalar, decay: Scalar) -> Scalar:
    """The gradient to descend. A decay of 0 does not touch w, which may be infinite."""
    x = sign * g
    if decay != 0:
        x += decay * w
    return x


@compiled
def _lerp(start: Scalar, end: Scalar, weight: Scalar, rest: Scalar) -> Scalar:
    """torch.lerp; `rest` is 1 - weight, rounded after the subtraction in the arrays' dtype."""
    if weight < 0.5:
        return start + weight * (end - start)
    return end - rest * (end - start)


@compiled
def sgd(task: Task, scalars: Array) -> None:
    sign, lr, decay = _unpacked(scalars, 3)
    start, stop, step = _pieces(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = _window(task, begin, end)
        for i in range(w_in.size):
            w_out[i] = w_in[i] - lr * _slope(g[i], w_in[i], sign, decay)
        _put(task, begin, end)


@compiled
def sgd_momentum(task: Task, buffer: Bytes, scalars: Array, first: bool, nesterov: bool) -> None:
    """`keep` is 1 - dampening; the first gradient enters the buffer whole."""
    sign, lr, decay, momentum, keep = _unpacked(scalars, 5)
    start, stop, step = _pieces(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = _window(task, begin, end)
        velocity = _part(buffer, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            b = x if first else momentum * velocity[i] + keep * x
            velocity[i] = b
            w_out[i] = w_in[i] - lr * (x + momentum * b if nesterov else b)
        _put(task, begin, end)


@compiled
def adam(task: Task, exp_avg: Bytes, exp_avg_sq: Bytes, scalars: Array) -> None:
    """weight = 1 - beta; root2 = sqrt(1 - beta2^t); rate = lr / (1 - beta1^t).

    Adam adds `decay` times the parameter to the gradient (shrink is 1); AdamW multiplies it by `shrink` (decay is 0).
    """
    sign, decay, shrink, weight1, beta2, weight2, root2, eps, rate = _unpacked(scalars, 9)
    rest1 = scalars.dtype.type(1) - weight1
    start, stop, step = _pieces(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = _window(task, begin, end)
        avg = _part(exp_avg, begin, end, scalars)
        avg_sq = _part(exp_avg_sq, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            m = _lerp(avg[i], x, weight1, rest1)
            v = beta2 * avg_sq[i] + weight2 * x * x
            avg[i] = m
            avg_sq[i] = v
            w_out[i] = shrink * w_in[i] - rate * m / (np.sqrt(v) / root2 + eps)
        _put(task, begin, end)


@compiled
def amsgrad(task: Task, exp_avg: Bytes, exp_avg_sq: Bytes, max_exp_avg_sq: Bytes, scalars: Array) -> None:
    """`adam` with the largest second moment so far in the denominator."""
    sign, decay, shrink, weight1, beta2, weight2, root2, eps, rate = _unpacked(scalars, 9)
    rest1 = scalars.dtype.type(1) - weight1
    start, stop, step = _pieces(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = _window(task, begin, end)
        avg = _part(exp_avg, begin, end, scalars)
        avg_sq = _part(exp_avg_sq, begin, end, scalars)
        max_sq = _part(max_exp_avg_sq, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            m = _lerp(avg[i], x, weight1, rest1)
            v = beta2 * avg_sq[i] + weight2 * x * x
            # a NaN in v stays there, so it stays in largest
            largest = max_sq[i] if max_sq[i] > v else v
            avg[i] = m
            avg_sq[i] = v
            max_sq[i] = largest
            w_out[i] = shrink * w_in[i] - rate * m / (np.sqrt(largest) / root2 + eps)
        _put(task, begin, end)


@compiled
def adagrad(task: Task, total: Bytes, scalars: Array) -> None:
    sign, lr, decay, eps = _unpacked(scalars, 4)
    start, stop, step = _pieces(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = _window(task, begin, end)
        sums = _part(total, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            s = sums[i] + x * x
            sums[i] = s
            w_out[i] = w_in[i] - lr * x / (np.sqrt(s) + eps)
        _put(task, begin, end)


@compiled
def rmsprop(task: Task, square_avg: Bytes, scalars: Array) -> None:
    """`weight` is 1 - alpha."""
    sign, lr, decay, alpha, weight, eps = _unpacked(scalars, 6)
    start, stop, step = _pieces(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = _window(task, begin, end)
        squares = _part(square_avg, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            v = alpha * squares[i] + weight * x * x
            squares[i] = v
            w_out[i] = w_in[i] - lr * x / (np.sqrt(v) + eps)
        _put(task, begin, end)


@compiled
def rmsprop_momentum(task: Task, square_avg: Bytes, buffer: Bytes, scalars: Array) -> None:
    sign, lr, decay, alpha, weight, eps, momentum = _unpacked(scalars, 7)
    start, stop, step = _pieces(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = _window(task, begin, end)
        squares = _part(square_avg, begin, end, scalars)
        velocity = _part(buffer, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            v = alpha * squares[i] + weight * x * x
            b = momentum * velocity[i] + x / (np.sqrt(v) + eps)
            squares[i] = v
            velocity[i] = b
            w_out[i] = w_in[i] - lr * b
        _put(task, begin, end)


@compiled
def rmsprop_centered(task: Task, square_avg: Bytes, grad_avg: Bytes, scalars: Array) -> None:
    """Divides by the estimated deviation, not by the root of the second moment."""
    sign, lr, decay, alpha, weight, eps = _unpacked(scalars, 6)
    rest = scalars.dtype.type(1) - weight
    start, stop, step = _pieces(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = _window(task, begin, end)
        squares = _part(square_avg, begin, end, scalars)
        means = _part(grad_avg, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            v = alpha * squares[i] + weight * x * x
            a = _lerp(means[i], x, weight, rest)
            squares[i] = v
            means[i] = a
            w_out[i] = w_in[i] - lr * x / (np.sqrt(v - a * a) + eps)
        _put(task, begin, end)


@compiled
def rmsprop_centered_momentum(task: Task, square_avg: Bytes, grad_avg: Bytes, buffer: Bytes, scalars: Array) -> None:
    sign, lr, decay, alpha, weight, eps, momentum = _unpacked(scalars, 7)
    rest = scalars.dtype.type(1) - weight
    start, stop, step = _pieces(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = _window(task, begin, end)
        squares = _part(square_avg, begin, end, scalars)
        means = _part(grad_avg, begin, end, scalars)
        velocity = _part(buffer, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            v = alpha * squares[i] + weight * x * x
            a = _lerp(means[i], x, weight, rest)
            b = momentum * velocity[i] + x / (np.sqrt(v - a * a) + eps)
            squares[i] = v
            means[i] = a
            velocity[i] = b
            w_out[i] = w_in[i] - lr * b
        _put(task, begin, end)


@compiled
def adamax(task: Task, exp_avg: Bytes, exp_inf: Bytes, scalars: Array) -> None:
    """weight = 1 - beta1; rate = lr / (1 - beta1^t)."""
    sign, decay, weight, beta2, eps, rate = _unpacked(scalars, 6)
    rest = scalars.dtype.type(1) - weight
    start, stop, step = _pieces(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = _window(task, begin, end)
        avg = _part(exp_avg, begin, end, scalars)
        norm = _part(exp_inf, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            m = _lerp(avg[i], x, weight, rest)
            before, now = beta2 * norm[i], abs(x) + eps
            # as torch.maximum: a NaN on either side stays
            largest = before if before > now or before != before else now
            avg[i] = m
            norm[i] = largest
            w_out[i] = w_in[i] - rate * m / largest
        _put(task, begin, end)


@compiled
def momentum_product(beta1: float, momentum_decay: float, count: int) -> float:
    """The product of nadam's momenta of updates 1 to `count`. It is 0 once it is too small to change 1."""
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
    sign, decay, shrink, weight1, beta2, weight2, correction2, eps, rate, rate_avg = _unpacked(scalars, 10)
    rest1 = scalars.dtype.type(1) - weight1
    start, stop, step = _pieces(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = _window(task, begin, end)
        avg = _part(exp_avg, begin, end, scalars)
        avg_sq = _part(exp_avg_sq, begin, end, scalars)
        for i in range(w_in.size):
            x = _slope(g[i], w_in[i], sign, decay)
            m = _lerp(avg[i], x, weight1, rest1)
            v = beta2 * avg_sq[i] + weight2 * x * x
            avg[i] = m
            avg_sq[i] = v
            root = np.sqrt(v / correction2) + eps
            w_out[i] = shrink * w_in[i] - rate * x / root - rate_avg * m / root
        _put(task, begin, end)


@compiled
def radam(task: Task, exp_avg: Bytes, exp_avg_sq: Bytes, scalars: Array, rectified: bool) -> None:
    """weight = 1 - beta; correction1 = 1 - beta1^t; root2 = sqrt(1 - beta2^t); `rectifier` counts where the variance is
    tractable (`rectified`). `decay` and `shrink` as in `adam`."""
    sign, decay, shrink, weight1, beta2, weight2, correction1, root2, eps, lr, rectifier = _unpacked(scalars, 11)
    rest1 = scalars.dtype.type(1) - weight1
    start, stop, step = _pieces(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = _window(task, begin, end)
        avg = _part(exp_avg, begin, end, scalars)
        avg_sq = _part(exp_avg_sq, begin, end, scalars)
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
        _put(task, begin, end)


@compiled
def lion(task: Task, exp_avg: Bytes, scalars: Array) -> None:
    """weight = 1 - beta. A NaN has the sign 0, as in torch.sign."""
    sign, shrink, lr, beta1, weight1, beta2, weight2 = _unpacked(scalars, 7)
    zero = scalars.dtype.type(0)
    start, stop, step = _pieces(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = _window(task, begin, end)
        avg = _part(exp_avg, begin, end, scalars)
        for i in range(w_in.size):
            x, m = sign * g[i], avg[i]
            c = beta1 * m + weight1 * x
            avg[i] = beta2 * m + weight2 * x
            w_out[i] = shrink * w_in[i] - (lr if c > 0 else -lr if c < 0 else zero)
        _put(task, begin, end)


@compiled
def ftrl(task: Task, z: Bytes, n: Bytes, scalars: Array, first: bool) -> None:
    """`z` starts as what makes the first values the solution without l1 and l2."""
    sign, lr, beta, l1, l2 = _unpacked(scalars, 5)
    zero = scalars.dtype.type(0)
    start, stop, step = _pieces(task)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, g, w_out = _window(task, begin, end)
        linear = _part(z, begin, end, scalars)
        squares = _part(n, begin, end, scalars)
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
        _put(task, begin, end)


@compiled
def square_norm(values: Array) -> float:
    """The sum of squares: eight sums in double precision, which one after the other take an element each."""
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
    """The 2-norm."""
    return float(np.sqrt(square_norm(values)))


@compiled
def lamb(task: Task, exp_avg: Bytes, exp_avg_sq: Bytes, scalars: Array, lr: float) -> None:
    """One variable. weight = 1 - beta; root2 = sqrt(1 - beta2^t); scale = 1 / (1 - beta1^t). The update lies where the
    next values will, until its norm is known."""
    sign, decay, weight1, beta2, weight2, root2, eps, scale = _unpacked(scalars, 8)
    rest1 = scalars.dtype.type(1) - weight1
    old, new, _, _, _, _, _, _ = task
    start, stop, step = _pieces(task)
    one = scalars.dtype.type(1)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        w_in, update = _part(old, begin, end, scalars), _part(new, begin, end, scalars)
        g = _gradient(task, begin, w_in.size)
        avg = _part(exp_avg, begin, end, scalars)
        avg_sq = _part(exp_avg_sq, begin, end, scalars)
        for i in range(w_in.size):
            x = sign * g[i]
            m = _lerp(avg[i], x, weight1, rest1)
            v = beta2 * avg_sq[i] + weight2 * x * x
            avg[i] = m
            avg_sq[i] = v
            update[i] = _slope(scale * m / (np.sqrt(v) / root2 + eps), w_in[i], one, decay)
    w_in, w_out = _part(old, start, stop, scalars), _part(new, start, stop, scalars)
    values_norm, update_norm = _norm(w_in), _norm(w_out)
    trust = values_norm / update_norm if values_norm > 0 and update_norm > 0 else 1.0
    rate = scalars.dtype.type(lr * trust)
    for i in range(w_in.size):
        w_out[i] = w_in[i] - rate * w_out[i]


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
    adamax,
    nadam,
    radam,
    lamb,
    lion,
    ftrl,
)
