"""Update rules: which state each needs, and how its settings become a kernel's scalars.

Owns: one rule for each kind of shardyard.domain.optimizers.KINDS. Invariants: a rule has no state of its own (the
partition has it, in the order of `slots`); scalars such as bias corrections are computed in double precision, as torch
does, and then rounded to the arrays' dtype; settings were checked (shardyard.domain.optimizers.check_spec,
check_update). Must not know: torch, partitions, where arrays are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from shardyard.domain.errors import InvalidRequest
from shardyard.domain.optimizers import Slot, slots_of
from shardyard_ps_server.values import kernels
from shardyard_ps_server.values.pieces import Array, Bytes, Shares, Task

LONE: Shares = np.empty(0, np.float64)
"""The shares of a single gradient: it is used as it is."""


Update = Callable[[Sequence[float], int, Task, Sequence[Bytes]], None]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An update rule. `settings` are one group's values in the order of KINDS[kind].

    `update(settings, count, task, state)`: update number `count` of these elements (1 is their first). `state` has the
    arrays of `slots(settings)` in that order; they are updated in place. NaN and infinity go through as in torch."""

    kind: str
    update: Update

    def slots(self, settings: Sequence[float]) -> tuple[Slot, ...]:
        """The state that these settings need."""
        return slots_of(self.kind, settings)


def _sgd(settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
    """Stochastic gradient descent; momentum as in Sutskever et al., On the importance of initialization and momentum
    in deep learning (ICML 2013), in the variant of torch.optim.SGD: the rate multiplies the buffer, which starts as
    the first gradient, not dampened."""
    lr, momentum, dampening, decay, nesterov, maximize = settings
    scalars = _scalars(task, _sign(maximize), lr, decay, momentum, 1 - dampening)
    kernels.sgd(task, state[0] if momentum != 0 else None, scalars, count == 1, nesterov != 0)


def _adam(
    settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes], *, decoupled: bool = False
) -> None:
    """Kingma and Ba, Adam: A Method for Stochastic Optimization (arXiv:1412.6980), weight decay added to the gradient;
    amsgrad of Reddi et al., On the Convergence of Adam and Beyond (ICLR 2018). torch.optim.Adam: `eps` is added after
    the correction of the second moment, and amsgrad takes the largest moment before its correction.

    `decoupled`: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv:1711.05101), as in
    torch.optim.AdamW: the parameter shrinks by lr * weight_decay, and the gradient does not see the decay."""
    lr, beta1, beta2, eps, weight_decay, amsgrad, maximize = settings
    root2, rate = (1 - beta2**count) ** 0.5, lr / (1 - beta1**count)
    decay = _decay(lr, weight_decay, decoupled)
    scalars = _scalars(task, _sign(maximize), *decay, *_weights(beta1, beta2), root2, eps, rate)
    kernels.adam(task, state[0], state[1], state[2] if amsgrad else None, scalars)


def _adagrad(settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
    """Duchi et al., Adaptive Subgradient Methods for Online Learning and Stochastic Optimization (JMLR 12, 2011), as in
    torch.optim.Adagrad: `eps` is added to the root, and the rate is lr / (1 + (count - 1) * lr_decay)."""
    lr, lr_decay, weight_decay, _, eps, maximize = settings
    rate = lr / (1 + (count - 1) * lr_decay)
    kernels.adagrad(task, state[0], _scalars(task, _sign(maximize), rate, weight_decay, eps))


def _rmsprop(settings: Sequence[float], _: int, task: Task, state: Sequence[Bytes]) -> None:
    """Tieleman and Hinton, lecture 6e of Neural Networks for Machine Learning (2012); centered as in Graves, Generating
    Sequences With Recurrent Neural Networks (arXiv:1308.0850). torch.optim.RMSprop: `eps` is added to the root, and
    the rate multiplies the momentum buffer."""
    lr, alpha, eps, weight_decay, momentum, centered, maximize = settings
    square, *more = state
    mean = more.pop(0) if centered else None
    buffer = more[0] if momentum != 0 else None
    scalars = _scalars(task, _sign(maximize), lr, weight_decay, alpha, 1 - alpha, eps, momentum)
    kernels.rmsprop(task, square, mean, buffer, scalars)


def _adamax(settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
    """Kingma and Ba, Adam: A Method for Stochastic Optimization (arXiv:1412.6980), section 7.1, as in
    torch.optim.Adamax: `eps` is added to the gradient's absolute value before the maximum is taken."""
    lr, beta1, beta2, eps, weight_decay, maximize = settings
    rate = lr / (1 - beta1**count)
    kernels.adamax(task, state[0], state[1], _scalars(task, _sign(maximize), weight_decay, 1 - beta1, beta2, eps, rate))


def _nadam(settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
    """Dozat, Incorporating Nesterov Momentum into Adam (ICLR workshop 2016), as in torch.optim.NAdam. The product of
    the momenta of all updates is computed from their number, in double precision; torch multiplies it up in its
    default dtype."""
    lr, beta1, beta2, eps, weight_decay, momentum_decay, decoupled, maximize = settings
    momentum, following = (beta1 * (1.0 - 0.5 * 0.96 ** (each * momentum_decay)) for each in (count, count + 1))
    product = kernels.momentum_product(beta1, momentum_decay, count)
    rate, rate_avg = lr * (1.0 - momentum) / (1.0 - product), lr * following / (1.0 - product * following)
    decay = _decay(lr, weight_decay, decoupled)
    scalars = _scalars(task, _sign(maximize), *decay, *_weights(beta1, beta2), 1 - beta2**count, eps, rate, rate_avg)
    kernels.nadam(task, state[0], state[1], scalars)


def _radam(settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
    """Liu et al., On the Variance of the Adaptive Learning Rate and Beyond (ICLR 2020), as in torch.optim.RAdam: the
    update is not adaptive while the approximated average has a length of at most 5, and `eps` is added to the root
    before its correction."""
    lr, beta1, beta2, eps, weight_decay, decoupled, maximize = settings
    correction1, correction2 = 1 - beta1**count, 1 - beta2**count
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * count * beta2**count / correction2
    rectified = length > 5
    rectifier = 1.0
    if rectified:
        ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        rectifier = ratio**0.5
    weights, decay = _weights(beta1, beta2), _decay(lr, weight_decay, decoupled)
    scalars = _scalars(task, _sign(maximize), *decay, *weights, correction1, correction2**0.5, eps, lr, rectifier)
    kernels.radam(task, state[0], state[1], scalars, rectified)


def _lamb(settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
    """You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes (ICLR 2020), algorithm 2, the
    norm scaled by the identity. Where the norm of the variable or of its update is 0, the ratio is 1. A task is a whole
    variable (shardyard.domain.optimizers.WHOLE_VARIABLES)."""
    lr, beta1, beta2, eps, weight_decay, maximize = settings
    root2, scale = (1 - beta2**count) ** 0.5, 1 / (1 - beta1**count)
    scalars = _scalars(task, _sign(maximize), weight_decay, *_weights(beta1, beta2), root2, eps, scale)
    kernels.lamb(task, state[0], state[1], scalars, lr)


def _lion(settings: Sequence[float], _: int, task: Task, state: Sequence[Bytes]) -> None:
    """Chen et al., Symbolic Discovery of Optimization Algorithms (NeurIPS 2023), program 1: the parameter moves by the
    rate along the sign, and shrinks by lr * weight_decay."""
    lr, beta1, beta2, weight_decay, maximize = settings
    shrink = 1 - lr * weight_decay
    scalars = _scalars(task, _sign(maximize), shrink, lr, beta1, 1 - beta1, beta2, 1 - beta2)
    kernels.lion(task, state[0], scalars)


def _ftrl(settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
    """McMahan et al., Ad Click Prediction: a View from the Trenches (KDD 2013), algorithm 1, whose alpha is `lr`. The
    paper begins at 0; other first values enter through the first proximal term, which is centered at them, as the
    later ones are at later values."""
    lr, beta, l1, l2, maximize = settings
    kernels.ftrl(task, state[0], state[1], _scalars(task, _sign(maximize), lr, beta, l1, l2), count == 1)


_BY_KIND: Final = {
    rule.kind: rule
    for rule in (
        Optimizer("sgd", _sgd),
        Optimizer("adam", _adam),
        Optimizer("adamw", partial(_adam, decoupled=True)),
        Optimizer("adagrad", _adagrad),
        Optimizer("rmsprop", _rmsprop),
        Optimizer("adamax", _adamax),
        Optimizer("nadam", _nadam),
        Optimizer("radam", _radam),
        Optimizer("lamb", _lamb),
        Optimizer("lion", _lion),
        Optimizer("ftrl", _ftrl),
    )
}


def make(kind: str) -> Optimizer:
    """Returns the update rule of that kind. Raises InvalidRequest if it is unknown."""
    if kind not in _BY_KIND:
        raise InvalidRequest(f"unknown optimizer {kind!r}; the servers know {', '.join(sorted(_BY_KIND))}")
    return _BY_KIND[kind]


def _sign(maximize: float) -> float:
    return -1.0 if maximize else 1.0


def _decay(lr: float, weight_decay: float, decoupled: float) -> tuple[float, float]:
    """Returns the factor of the parameter that is added to the gradient, and the factor by which the parameter
    shrinks."""
    return (0.0, 1 - lr * weight_decay) if decoupled else (weight_decay, 1.0)


def _weights(beta1: float, beta2: float) -> tuple[float, float, float]:
    """Returns the weight of a gradient in the first moment, and the weights of the second moment and of a square."""
    return 1 - beta1, beta2, 1 - beta2


def _scalars(task: Task, *values: float) -> Array:
    """Returns the values in the elements' dtype. With float64 scalars numba would compute in float64."""
    return np.array(values, task[4].dtype)
