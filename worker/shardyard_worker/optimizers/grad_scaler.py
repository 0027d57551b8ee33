"""Loss scaling: one scale for all workers of a job, and one verdict on an overflow.

After "Mixed Precision Training" (Micikevicius et al., ICLR 2018), as torch.amp.GradScaler does it in one process. The
scale is a function of three counts: overflows, growths, and steps since the last of either. They are packed in this
order, highest bits first, into one integer variable of the job. So they are versioned, logged, checkpointed and given
to workers that join, like any buffer. Of several proposals for one step the largest wins: that of a rank that has
overflowed.

Gradients of table rows are scaled and checked too: an overflow in one of them is an overflow of the step.

Owns: the counts, their scale, and the unscaling of gradients before they are sent. Must not know: pushes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final, NamedTuple, NoReturn

import torch

from shardyard.domain.errors import InvalidRequest, UnsupportedOptimizer
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard_worker.optimizers.server_optimizer import ServerOptimizer

log = logging.getLogger("shardyard.worker")

SCALER_COUNTS: Final = VariableSpec("loss_scaler", DType.INT64, (), VariableKind.BUFFER)
COUNT_BITS: Final = 21
COUNT_MAX: Final = (1 << COUNT_BITS) - 1
_FLOAT32_MAX: Final = Fraction(torch.finfo(torch.float32).max)


class ScaleCounts(NamedTuple):
    """Fields are in order of precedence: the larger proposal wins."""

    overflows: int = 0
    growths: int = 0
    steps: int = 0
    """Steps since the last overflow or growth."""

    @property
    def number(self) -> int:
        return (self.overflows << 2 * COUNT_BITS) | (self.growths << COUNT_BITS) | self.steps


def counts_of(number: int) -> ScaleCounts:
    return ScaleCounts(number >> 2 * COUNT_BITS, (number >> COUNT_BITS) & COUNT_MAX, number & COUNT_MAX)


class ScaleRule:
    """Computes the scale from the counts."""

    def __init__(self, *, initial: float, growth: float, backoff: float, interval: int) -> None:
        if not (initial > 0 and growth > 1 and 0 < backoff < 1 and 1 <= interval <= COUNT_MAX):
            raise InvalidRequest(
                f"a scaler with init_scale {initial}, growth_factor {growth}, backoff_factor {backoff}, growth_interval"
                f" {interval}; expected a scale above 0, a growth above 1, a backoff between 0 and 1 and an interval"
                f" from 1 to {COUNT_MAX}"
            )
        self._initial, self._growth, self._backoff = Fraction(initial), Fraction(growth), Fraction(backoff)
        self._interval = interval

    def scale(self, counts: ScaleCounts) -> float:
        return float(self._exact(counts.overflows, counts.growths))

    def after(self, counts: ScaleCounts, *, overflow: bool) -> ScaleCounts:
        """The counts after one more step."""
        if overflow:
            if counts.overflows == COUNT_MAX:
                raise InvalidRequest(
                    f"more than {COUNT_MAX} overflows", why="they cannot be counted", todo="see the loss"
                )
            return ScaleCounts(counts.overflows + 1, counts.growths)
        if counts.steps + 1 < self._interval:
            return counts._replace(steps=counts.steps + 1)
        grown = ScaleCounts(counts.overflows, counts.growths + 1)
        if grown.growths > COUNT_MAX or self._exact(grown.overflows, grown.growths) > _FLOAT32_MAX:
            return counts._replace(steps=0)
        return grown

    @lru_cache(2)  # noqa: B019 - a job has one rule
    def _exact(self, overflows: int, growths: int) -> Fraction:
        return self._initial * self._growth**growths * self._backoff**overflows


class JobScaler(torch.amp.GradScaler):
    """torch's scaler, but with the job's scale, which falls once for all workers."""

    def __init__(
        self,
        device: torch.device,
        *,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
        by_steps: bool,
    ) -> None:
        """`by_steps`: the job is synchronous. Raises InvalidRequest."""
        self._rule = ScaleRule(
            initial=init_scale, growth=growth_factor, backoff=backoff_factor, interval=growth_interval
        )
        super().__init__(device.type, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.state = torch.zeros((), dtype=torch.int64)
        """The tensor of the job's variable. It is on the CPU, so that no device is waited for."""
        self._by_steps = by_steps
        self._latest = 0
        self._at: int | None = None
        self._begun = False
        self._warned = False

    # ---- what torch's has

    def scale(self, outputs: Any) -> Any:
        """Multiplies the loss, or losses, by the scale."""
        if self.is_enabled() and not self._begun:
            self._follow()
            self._begun = True  # all losses of one gradient have one scale
        return super().scale(outputs)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's: steps unless this worker, or in a synchronous job any worker, has an overflow. Either way the
        work is pushed."""
        if self.is_enabled() and not _has_halves(optimizer) and not self._is_unscaled(optimizer):
            self.unscale_(optimizer)  # one pass also finds overflows
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            self._begun = False

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Takes the job's scale. Raises InvalidRequest for `new_scale`."""
        if new_scale is not None:
            raise InvalidRequest("a scale of the script's own", why="all workers of a job have one scale", todo="")
        if self.is_enabled():
            self._check_scale_growth_tracker("update")
            super().update(self._follow())
            self._begun = False

    def get_scale(self) -> float:
        if self.is_enabled() and not self._begun:
            self._follow()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        if self.is_enabled() and not self._begun:
            self._follow()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> NoReturn:  # noqa: ARG002
        """Raises an error: the counts are a variable of the job."""
        raise UnsupportedOptimizer(
            "load_state_dict on the scaler of a job", why="its state is in the job's checkpoints", todo=""
        )

    def set_growth_factor(self, new_factor: float) -> NoReturn:
        self._refuse(f"a growth factor of {new_factor}")

    def set_backoff_factor(self, new_factor: float) -> NoReturn:
        self._refuse(f"a backoff factor of {new_factor}")

    def set_growth_interval(self, new_interval: int) -> NoReturn:
        self._refuse(f"a growth interval of {new_interval}")

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidRequest(
            f"{what} after job.scaler", why="the scale follows from counts", todo="give it to job.scaler"
        )

    # ---- the job's side

    def proposal(self, overflow: bool | None) -> torch.Tensor:
        """The counts that a push proposes. `overflow` None: its loss was not scaled."""
        counts = self._counts()
        if overflow is not None:
            counts = self._rule.after(counts, overflow=overflow)
        self._latest = counts.number
        return torch.tensor(counts.number)

    def follow(self, *, by_steps: bool) -> None:
        """Sets whether the job is synchronous now."""
        self._by_steps = by_steps

    def _counts(self) -> ScaleCounts:
        """Asynchronous: another worker's counts may not yet include this worker's last proposal."""
        number = int(self.state)
        return counts_of(number if self._by_steps else max(number, self._latest))

    def _follow(self) -> float:
        counts = self._counts()
        if counts.number != self._at:
            self._at = counts.number
            self._init_scale, self._init_growth_tracker = self._rule.scale(counts), counts.steps
            if self._scale is not None:
                self._scale.fill_(self._init_scale)
            if self._growth_tracker is not None:
                self._growth_tracker.fill_(counts.steps)
            if self._init_scale < 1 and not self._warned:
                self._warned = True
                log.warning("the loss scale is %g: overflows do not end; is the loss finite?", self._init_scale)
        return self._init_scale

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """As torch's, plus the gradients of table rows: torch sees only parameters, and these are in host memory."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        rows = optimizer.row_gradients() if isinstance(optimizer, ServerOptimizer) else None
        if rows is not None:
            here = found.setdefault(torch.device("cpu"), torch.zeros(()))
            if rows:
                torch._amp_foreach_non_finite_check_and_unscale_(rows, here, inv_scale.cpu())
        return found

    def _is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        return bool(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"])


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return [gradient for gradient in found if gradient is not None]


def _has_halves(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any gradient is float16. Those are widened before they are unscaled."""
    return any(gradient.dtype is torch.float16 for gradient in _gradients(optimizer))


Unscale = Callable[[torch.Tensor | None], torch.Tensor | None]


def unscaler(scale: torch.Tensor | None, gradients: Sequence[torch.Tensor | None]) -> Unscale:
    """Returns a function that unscales gradients before they are sent. Gradients of 32 or more bits are changed in
    place, as torch's scaler does; others are widened first. `scale` None: they are unscaled already."""
    if scale is None:
        return lambda gradient: gradient
    inverse = scale.double().reciprocal().float()
    wide = [each for each in gradients if each is not None and each.element_size() > 2]
    if wide:
        torch._foreach_mul_(wide, float(inverse))

    def unscale(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or gradient.element_size() > 2:
            return gradient
        return gradient.float() * inverse.to(gradient.device)

    return unscale
