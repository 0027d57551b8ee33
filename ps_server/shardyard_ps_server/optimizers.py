"""Update rules: which state each keeps, and how its settings become a kernel's scalars.

Owns: one class for each kind of shardyard.ground.optimizers.KINDS. Invariants: optimizers hold no state (the storage
has it, in the order of `slots`); scalars such as bias corrections are computed in double precision, as torch does, and
rounded to the arrays' dtype last; settings have been checked (shardyard.ground.optimizers.check_spec, check_update).

Must not know: torch, partitions, where arrays live.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shardyard.ground.errors import InvalidRequest
from shardyard.ground.optimizers import make_group
from shardyard_ps_server import kernels
from shardyard_ps_server.kernels import Array, Scalar

_LOG = logging.getLogger(__name__)

Arrays = tuple[Array, Array, Array]
"""w_in, g and w_out."""


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

    def step(
        self,
        settings: Sequence[float],
        count: int,
        w_in: Array,
        g: Array,
        w_out: Array,
        state: Sequence[Array],
    ) -> None:
        """Update number `count` of these elements (1 is their first): w_out from w_in and the gradient g.

        All arrays are 1-D, contiguous, aligned, of one length, all float32 or all float64; `w_out` overlaps neither
        input. `state` has the arrays of `slots(settings)` in that order, which are updated in place. NaN and infinity
        go through as in torch.
        """
        assert count >= 1
        assert all(_fits(w_in, a) for a in (w_in, g, w_out, *state))
        assert not np.may_share_memory(w_in, w_out)
        assert not np.may_share_memory(g, w_out)
        self._run(settings, count, (_read_only(w_in), _read_only(g), w_out), state)

    @abstractmethod
    def _run(self, settings: Sequence[float], count: int, arrays: Arrays, state: Sequence[Array]) -> None: ...


class Sgd(Optimizer):
    """Stochastic gradient descent; momentum as in Sutskever et al., On the importance of initialization and momentum
    in deep learning (ICML 2013), in the variant of torch.optim.SGD: the rate multiplies the buffer, which starts as
    the first gradient, not dampened."""

    kind = "sgd"

    def slots(self, settings: Sequence[float]) -> tuple[Slot, ...]:
        _, momentum, *_ = settings
        return (Slot("momentum_buffer"),) if momentum != 0 else ()

    def _run(self, settings: Sequence[float], count: int, arrays: Arrays, state: Sequence[Array]) -> None:
        lr, momentum, dampening, decay, nesterov, maximize = settings
        if momentum == 0:
            kernels.sgd(*arrays, *_scalars(arrays, _sign(maximize), lr, decay))
            return
        (buffer,) = state
        sign, lr_, decay_, momentum_, keep = _scalars(arrays, _sign(maximize), lr, decay, momentum, 1 - dampening)
        kernels.sgd_momentum(*arrays, buffer, sign, lr_, decay_, momentum_, keep, count == 1, bool(nesterov))


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

    def _run(self, settings: Sequence[float], count: int, arrays: Arrays, state: Sequence[Array]) -> None:
        lr, beta1, beta2, eps, weight_decay, amsgrad, maximize = settings
        scalars = _scalars(
            arrays,
            _sign(maximize),
            0.0 if self.decoupled else weight_decay,
            1 - lr * weight_decay if self.decoupled else 1.0,
            *_lerp_weights(arrays, 1 - beta1),
            beta2,
            1 - beta2,
            (1 - beta2**count) ** 0.5,
            eps,
            lr / (1 - beta1**count),
        )
        if amsgrad:
            exp_avg, exp_avg_sq, largest = state
            kernels.amsgrad(*arrays, exp_avg, exp_avg_sq, largest, *scalars)
        else:
            exp_avg, exp_avg_sq = state
            kernels.adam(*arrays, exp_avg, exp_avg_sq, *scalars)


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

    def _run(self, settings: Sequence[float], count: int, arrays: Arrays, state: Sequence[Array]) -> None:
        lr, lr_decay, weight_decay, _, eps, maximize = settings
        rate = lr / (1 + (count - 1) * lr_decay)
        (total,) = state
        kernels.adagrad(*arrays, total, *_scalars(arrays, _sign(maximize), rate, weight_decay, eps))


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

    def _run(
        self,
        settings: Sequence[float],
        count: int,  # noqa: ARG002
        arrays: Arrays,
        state: Sequence[Array],
    ) -> None:
        lr, alpha, eps, weight_decay, momentum, centered, maximize = settings
        common = (_sign(maximize), lr, weight_decay, alpha)
        weight, rest = _lerp_weights(arrays, 1 - alpha)
        if centered and momentum != 0:
            square, mean, buffer = state
            scalars = _scalars(arrays, *common, weight, rest, eps, momentum)
            kernels.rmsprop_centered_momentum(*arrays, square, mean, buffer, *scalars)
        elif centered:
            square, mean = state
            kernels.rmsprop_centered(*arrays, square, mean, *_scalars(arrays, *common, weight, rest, eps))
        elif momentum != 0:
            square, buffer = state
            kernels.rmsprop_momentum(*arrays, square, buffer, *_scalars(arrays, *common, weight, eps, momentum))
        else:
            (square,) = state
            kernels.rmsprop(*arrays, square, *_scalars(arrays, *common, weight, eps))


_BY_KIND: dict[str, Optimizer] = {rule.kind: rule for rule in (Sgd(), Adam(), AdamW(), Adagrad(), RmsProp())}

_EVERY_KERNEL: tuple[tuple[str, dict[str, float]], ...] = (
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("adam", {}),
    ("adam", {"amsgrad": 1.0}),
    ("adagrad", {}),
    ("rmsprop", {}),
    ("rmsprop", {"momentum": 0.9}),
    ("rmsprop", {"centered": 1.0}),
    ("rmsprop", {"momentum": 0.9, "centered": 1.0}),
)


def make(kind: str) -> Optimizer:
    """The update rule of that kind. Raises InvalidRequest for an unknown one."""
    if kind not in _BY_KIND:
        raise InvalidRequest(f"unknown optimizer {kind!r}; the servers know {', '.join(sorted(_BY_KIND))}")
    return _BY_KIND[kind]


def warm(dtypes: Iterable[npt.DTypeLike]) -> None:
    """Compiles every kernel for these dtypes, or loads it from disk; a server does so before it says it is ready."""
    for dtype in dtypes:
        for kind, given in _EVERY_KERNEL:
            try:
                _step_once(kind, given, dtype)
            except OSError as e:
                _LOG.warning("compiled %s kernels could not be kept on disk (%s); each start compiles them", kind, e)
                _step_once(kind, given, dtype)


def _step_once(kind: str, given: dict[str, float], dtype: npt.DTypeLike) -> None:
    optimizer = make(kind)
    settings = make_group(kind, given)
    w_in, g, w_out = (np.ones(1, dtype) for _ in range(3))
    optimizer.step(settings, 1, w_in, g, w_out, [np.zeros(1, dtype) for _ in optimizer.slots(settings)])


def _sign(maximize: float) -> float:
    return -1.0 if maximize else 1.0


def _scalars(arrays: Arrays, *values: float | Scalar) -> list[Scalar]:
    """The values in the arrays' dtype, without which numba would compute in float64."""
    return [arrays[0].dtype.type(value) for value in values]


def _lerp_weights(arrays: Arrays, weight: float) -> tuple[Scalar, Scalar]:
    """A weight and its complement, which torch.lerp computes in the arrays' dtype."""
    rounded, one = _scalars(arrays, weight, 1.0)
    return rounded, one - rounded


def _fits(w: Array, a: Array) -> bool:
    return a.ndim == 1 and a.size == w.size and a.dtype == w.dtype and a.flags.c_contiguous and a.flags.aligned


def _read_only(a: Array) -> Array:
    """One type for numba, whether or not the caller may write; else it would compile a second time, while serving."""
    view = a.view()
    view.flags.writeable = False
    return view
