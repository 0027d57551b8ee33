"""Update rules: which state each keeps, and how its settings become a kernel's scalars.

Owns: one class for each kind of shardyard.domain.optimizers.KINDS. Invariants: optimizers hold no state (the storage
has it, in the order of `slots`); scalars such as bias corrections are computed in double precision, as torch does, and
rounded to the arrays' dtype last; settings have been checked (shardyard.domain.optimizers.check_spec, check_update).

Must not know: torch, partitions, where arrays live.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from shardyard.domain.errors import InvalidRequest
from shardyard_ps_server.values import kernels, pieces
from shardyard_ps_server.values.pieces import Addresses, Array, Bytes, Shares, Task

LONE: Shares = np.empty(0, np.float64)
"""The shares of a lone gradient, which is taken as it is."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A state array of the parameter's shape and dtype, filled with `initial` at first; `name` is torch's for it."""

    name: str
    initial: float = 0.0


class Optimizer(ABC):
    """An update rule. `settings` are one group's values in the order of KINDS[kind]."""

    kind: ClassVar[str]

    @abstractmethod
    def slots(self, settings: Sequence[float]) -> tuple[Slot, ...]:
        """The state that these settings need."""

    @abstractmethod
    def update(self, settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
        """Update number `count` of these elements (1 is their first). `state` has the arrays of `slots(settings)` in
        that order, which are updated in place. NaN and infinity go through as in torch."""

    def step(
        self,
        settings: Sequence[float],
        count: int,
        w_in: Array,
        g: Array,
        w_out: Array,
        state: Sequence[Array],
    ) -> None:
        """`update` on plain arrays: w_out from w_in and the gradient g.

        All arrays are 1-D, contiguous, aligned, of one length, all float32 or all float64; `w_out` overlaps neither
        input.
        """
        assert count >= 1
        assert all(_fits(w_in, a) for a in (w_in, g, w_out, *state))
        task, _kept = _plain_task(w_in, g, w_out)
        self.update(settings, count, task, [array.view(np.uint8) for array in state])


class Sgd(Optimizer):
    """Stochastic gradient descent; momentum as in Sutskever et al., On the importance of initialization and momentum
    in deep learning (ICML 2013), in the variant of torch.optim.SGD: the rate multiplies the buffer, which starts as
    the first gradient, not dampened."""

    kind = "sgd"

    def slots(self, settings: Sequence[float]) -> tuple[Slot, ...]:
        _, momentum, *_ = settings
        return (Slot("momentum_buffer"),) if momentum != 0 else ()

    def update(self, settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
        lr, momentum, dampening, decay, nesterov, maximize = settings
        buffer = state[0] if momentum != 0 else None
        scalars = _scalars(task, _sign(maximize), lr, decay, momentum, 1 - dampening)
        kernels.sgd(task, buffer, scalars, count == 1, nesterov != 0)


class Adam(Optimizer):
    """Kingma and Ba, Adam: A Method for Stochastic Optimization (arXiv:1412.6980), weight decay added to the gradient;
    amsgrad of Reddi et al., On the Convergence of Adam and Beyond (ICLR 2018). torch.optim.Adam: `eps` is added after
    the correction of the second moment, and amsgrad takes the largest moment before its correction."""

    kind = "adam"
    decoupled: ClassVar[bool] = False

    def slots(self, settings: Sequence[float]) -> tuple[Slot, ...]:
        *_, amsgrad, _ = settings
        moments = (Slot("exp_avg"), Slot("exp_avg_sq"))
        return (*moments, Slot("max_exp_avg_sq")) if amsgrad else moments

    def update(self, settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
        lr, beta1, beta2, eps, weight_decay, amsgrad, maximize = settings
        scalars = _scalars(
            task,
            _sign(maximize),
            *_decay(lr, weight_decay, self.decoupled),
            1 - beta1,
            beta2,
            1 - beta2,
            (1 - beta2**count) ** 0.5,
            eps,
            lr / (1 - beta1**count),
        )
        kernels.adam(task, state[0], state[1], state[2] if amsgrad else None, scalars)


class AdamW(Adam):
    """Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv:1711.05101), as in torch.optim.AdamW: the
    parameter shrinks by lr * weight_decay, and the gradient does not see the decay."""

    kind = "adamw"
    decoupled = True


class Adagrad(Optimizer):
    """Duchi et al., Adaptive Subgradient Methods for Online Learning and Stochastic Optimization (JMLR 12, 2011), as in
    torch.optim.Adagrad: `eps` is added to the root, and the rate is lr / (1 + (count - 1) * lr_decay)."""

    kind = "adagrad"

    def slots(self, settings: Sequence[float]) -> tuple[Slot, ...]:
        *_, initial_accumulator_value, _, _ = settings
        return (Slot("sum", initial_accumulator_value),)

    def update(self, settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
        lr, lr_decay, weight_decay, _, eps, maximize = settings
        rate = lr / (1 + (count - 1) * lr_decay)
        (total,) = state
        kernels.adagrad(task, total, _scalars(task, _sign(maximize), rate, weight_decay, eps))


class RmsProp(Optimizer):
    """Tieleman and Hinton, lecture 6e of Neural Networks for Machine Learning (2012); centered as in Graves, Generating
    Sequences With Recurrent Neural Networks (arXiv:1308.0850). torch.optim.RMSprop: `eps` is added to the root, and
    the rate multiplies the momentum buffer."""

    kind = "rmsprop"

    def slots(self, settings: Sequence[float]) -> tuple[Slot, ...]:
        *_, momentum, centered, _ = settings
        square = (Slot("square_avg"),)
        mean = (Slot("grad_avg"),) if centered else ()
        buffer = (Slot("momentum_buffer"),) if momentum != 0 else ()
        return square + mean + buffer

    def update(
        self,
        settings: Sequence[float],
        count: int,  # noqa: ARG002
        task: Task,
        state: Sequence[Bytes],
    ) -> None:
        lr, alpha, eps, weight_decay, momentum, centered, maximize = settings
        square, *more = state
        mean = more.pop(0) if centered else None
        buffer = more[0] if momentum != 0 else None
        scalars = _scalars(task, _sign(maximize), lr, weight_decay, alpha, 1 - alpha, eps, momentum)
        kernels.rmsprop(task, square, mean, buffer, scalars)


class Adamax(Optimizer):
    """Kingma and Ba, Adam: A Method for Stochastic Optimization (arXiv:1412.6980), section 7.1, as in
    torch.optim.Adamax: `eps` is added to the gradient's absolute value before the maximum is taken."""

    kind = "adamax"

    def slots(self, settings: Sequence[float]) -> tuple[Slot, ...]:  # noqa: ARG002
        return (Slot("exp_avg"), Slot("exp_inf"))

    def update(self, settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
        lr, beta1, beta2, eps, weight_decay, maximize = settings
        exp_avg, exp_inf = state
        rate = lr / (1 - beta1**count)
        scalars = _scalars(task, _sign(maximize), weight_decay, 1 - beta1, beta2, eps, rate)
        kernels.adamax(task, exp_avg, exp_inf, scalars)


class NAdam(Optimizer):
    """Dozat, Incorporating Nesterov Momentum into Adam (ICLR workshop 2016), as in torch.optim.NAdam. The product of
    the momenta of all updates is computed from their number, in double precision; torch multiplies it up in its
    default dtype."""

    kind = "nadam"

    def slots(self, settings: Sequence[float]) -> tuple[Slot, ...]:  # noqa: ARG002
        return (Slot("exp_avg"), Slot("exp_avg_sq"))

    def update(self, settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
        lr, beta1, beta2, eps, weight_decay, momentum_decay, decoupled, maximize = settings
        exp_avg, exp_avg_sq = state
        momentum, following = (beta1 * (1.0 - 0.5 * 0.96 ** (each * momentum_decay)) for each in (count, count + 1))
        product = kernels.momentum_product(beta1, momentum_decay, count)
        scalars = _scalars(
            task,
            _sign(maximize),
            *_decay(lr, weight_decay, decoupled),
            1 - beta1,
            beta2,
            1 - beta2,
            1 - beta2**count,
            eps,
            lr * (1.0 - momentum) / (1.0 - product),
            lr * following / (1.0 - product * following),
        )
        kernels.nadam(task, exp_avg, exp_avg_sq, scalars)


class RAdam(Optimizer):
    """Liu et al., On the Variance of the Adaptive Learning Rate and Beyond (ICLR 2020), as in torch.optim.RAdam: the
    update is not adaptive while the approximated average has a length of at most 5, and `eps` is added to the root
    before its correction."""

    kind = "radam"

    def slots(self, settings: Sequence[float]) -> tuple[Slot, ...]:  # noqa: ARG002
        return (Slot("exp_avg"), Slot("exp_avg_sq"))

    def update(self, settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
        lr, beta1, beta2, eps, weight_decay, decoupled, maximize = settings
        exp_avg, exp_avg_sq = state
        correction2 = 1 - beta2**count
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * count * beta2**count / correction2
        rectified = length > 5
        rectifier = 1.0
        if rectified:
            ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            rectifier = ratio**0.5
        scalars = _scalars(
            task,
            _sign(maximize),
            *_decay(lr, weight_decay, decoupled),
            1 - beta1,
            beta2,
            1 - beta2,
            1 - beta1**count,
            correction2**0.5,
            eps,
            lr,
            rectifier,
        )
        kernels.radam(task, exp_avg, exp_avg_sq, scalars, rectified)


class Lamb(Optimizer):
    """You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes (ICLR 2020), algorithm 2, the
    norm scaled by the identity. Where the norm of the variable or of its update is 0, the ratio is 1. A task is a whole
    variable (shardyard.domain.optimizers.WHOLE_VARIABLES)."""

    kind = "lamb"

    def slots(self, settings: Sequence[float]) -> tuple[Slot, ...]:  # noqa: ARG002
        return (Slot("exp_avg"), Slot("exp_avg_sq"))

    def update(self, settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
        lr, beta1, beta2, eps, weight_decay, maximize = settings
        exp_avg, exp_avg_sq = state
        scalars = _scalars(
            task,
            _sign(maximize),
            weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            (1 - beta2**count) ** 0.5,
            eps,
            1 / (1 - beta1**count),
        )
        kernels.lamb(task, exp_avg, exp_avg_sq, scalars, lr)


class Lion(Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms (NeurIPS 2023), program 1: the parameter moves by the
    rate along the sign, and shrinks by lr * weight_decay."""

    kind = "lion"

    def slots(self, settings: Sequence[float]) -> tuple[Slot, ...]:  # noqa: ARG002
        return (Slot("exp_avg"),)

    def update(
        self,
        settings: Sequence[float],
        count: int,  # noqa: ARG002
        task: Task,
        state: Sequence[Bytes],
    ) -> None:
        lr, beta1, beta2, weight_decay, maximize = settings
        (exp_avg,) = state
        shrink = 1 - lr * weight_decay
        scalars = _scalars(task, _sign(maximize), shrink, lr, beta1, 1 - beta1, beta2, 1 - beta2)
        kernels.lion(task, exp_avg, scalars)


class Ftrl(Optimizer):
    """McMahan et al., Ad Click Prediction: a View from the Trenches (KDD 2013), algorithm 1, whose alpha is `lr`. The
    paper begins at 0; other first values enter through the first proximal term, which is centered at them, as the
    later ones are at later values."""

    kind = "ftrl"

    def slots(self, settings: Sequence[float]) -> tuple[Slot, ...]:  # noqa: ARG002
        return (Slot("z"), Slot("n"))

    def update(self, settings: Sequence[float], count: int, task: Task, state: Sequence[Bytes]) -> None:
        lr, beta, l1, l2, maximize = settings
        z, n = state
        kernels.ftrl(task, z, n, _scalars(task, _sign(maximize), lr, beta, l1, l2), count == 1)


_BY_KIND: dict[str, Optimizer] = {
    rule.kind: rule
    for rule in (
        Sgd(),
        Adam(),
        AdamW(),
        Adagrad(),
        RmsProp(),
        Adamax(),
        NAdam(),
        RAdam(),
        Lamb(),
        Lion(),
        Ftrl(),
    )
}


def make(kind: str) -> Optimizer:
    """The update rule of that kind. Raises InvalidRequest for an unknown one."""
    if kind not in _BY_KIND:
        raise InvalidRequest(f"unknown optimizer {kind!r}; the servers know {', '.join(sorted(_BY_KIND))}")
    return _BY_KIND[kind]


def _sign(maximize: float) -> float:
    return -1.0 if maximize else 1.0


def _decay(lr: float, weight_decay: float, decoupled: float) -> tuple[float, float]:
    """What is added to the gradient, times the parameter; and what the parameter is multiplied by."""
    return (0.0, 1 - lr * weight_decay) if decoupled else (weight_decay, 1.0)


def _scalars(task: Task, *values: float) -> Array:
    """The values in the elements' dtype, without which numba would compute in float64."""
    return np.array(values, task[4].dtype)


def _fits(w: Array, a: Array) -> bool:
    return a.ndim == 1 and a.size == w.size and a.dtype == w.dtype and a.flags.c_contiguous and a.flags.aligned


def _plain_task(w_in: Array, g: Array, w_out: Array) -> tuple[Task, Any]:
    """A task of one gradient, and what must be kept while it is used."""
    # one type for numba, whether or not the caller may write; else it would compile a second time
    old = (w_in if w_in.flags.writeable else w_in.copy()).view(np.uint8)
    new, gradient = w_out.view(np.uint8), g.view(np.uint8)
    sources: Addresses = np.array([pieces.locate(old, new, gradient, g.itemsize)])
    assert sources[0] != 0 or not old.size
    nothing: Array = np.empty(0, w_in.dtype)
    return (old, new, sources, LONE, nothing, nothing, 0, old.size), gradient
