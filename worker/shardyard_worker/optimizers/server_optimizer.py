"""An optimizer of torch or `shardyard.optim`, moved to the servers: its settings become an OptimizerSpec, its `step` a
push and a pull.

Owns: the translation, option by option, and the optimizer that `job.prepare` gives back. Invariant: what the servers
cannot do exactly as torch does is refused with its name and the alternatives, never approximated. Must not know: how a
push travels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, overload

import torch

from shardyard.domain.errors import UnsupportedOptimizer
from shardyard.domain.optimizers import OptimizerSpec, make_group, setting_names
from shardyard_worker.optimizers import extra
from shardyard_worker.optimizers.step_hooks import has_hooks
from shardyard_worker.optimizers.torch_state import TorchState

Group = dict[str, Any]


_KINDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
    torch.optim.Adagrad: "adagrad",
    torch.optim.RMSprop: "rmsprop",
    torch.optim.Adamax: "adamax",
    torch.optim.NAdam: "nadam",
    torch.optim.RAdam: "radam",
    extra.LAMB: "lamb",
    extra.Lion: "lion",
    extra.FTRL: "ftrl",
}


def _name(kind: type[torch.optim.Optimizer]) -> str:
    return f"{'shardyard' if kind.__module__ == extra.__name__ else 'torch'}.optim.{kind.__name__}"


_ALTERNATIVES = "use one of " + ", ".join(_name(kind) for kind in _KINDS)
# these change how torch runs an update, not its result
_UNMOVABLE_FLAGS = ("differentiable", "capturable")


def translate(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Translates the optimizer for the servers. Raises UnsupportedOptimizer for a kind or option that they do not
    have."""
    kind = _KINDS.get(type(optimizer))
    if kind is None:
        raise UnsupportedOptimizer(
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__} cannot be moved to the servers",
            todo=_ALTERNATIVES,
        )
    name = _name(type(optimizer))
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UnsupportedOptimizer(
            f"{name} with a hook for its steps, which would not be called any more",
            todo="register the hook on the optimizer that job.prepare gives back",
        )
    for index, group in enumerate(optimizer.param_groups):
        _check_options(name, kind, index, group)
    return OptimizerSpec(kind, tuple(settings_of(kind, group) for group in optimizer.param_groups))


def settings_of(kind: str, group: Group) -> tuple[float, ...]:
    """A parameter group's current settings, in the order of the wire."""
    given = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False)) | group
    return make_group(kind, {name: float(given[name]) for name in setting_names(kind)})


def _check_options(name: str, kind: str, index: int, group: Group) -> None:
    for flag in _UNMOVABLE_FLAGS:
        if group.get(flag):
            raise UnsupportedOptimizer(
                f"option {flag}=True of {name}, parameter group {index}",
                todo=f"leave {flag} at False; updates run on the servers",
            )
    if kind == "adam" and group.get("decoupled_weight_decay"):
        raise UnsupportedOptimizer(
            f"option decoupled_weight_decay=True of torch.optim.Adam, parameter group {index}",
            todo="use torch.optim.AdamW, which is the same",
        )


def _has_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, tuple) and any(map(_has_tensor, value)))


@dataclass(frozen=True)
class Scaled:
    """A GradScaler's findings: whether gradients overflow their format, and the scale that is still to be divided out,
    if any."""

    overflow: bool
    scale: torch.Tensor | None


Contribute = Callable[["ServerOptimizer", Scaled | None], None]
FetchState = Callable[[], Mapping[torch.Tensor, TorchState]]
"""Fetches the state of each parameter that has one, as torch has it."""


class TrainedRows(Protocol):
    """The rows of tables that are trained together with the parameters."""

    def gradients(self) -> list[torch.Tensor]:
        """The gradients since the last step. They may be changed in place."""

    def clear(self) -> None:
        """Drops the gradients."""


class ServerOptimizer(torch.optim.Optimizer):
    """The optimizer that `job.prepare` gives back: `step()` pushes the gradients and pulls the parameters.

    It shares its parameter groups with the optimizer that it was made of, so that learning-rate schedulers built on
    either work. Its state lives on the servers; `state` here is empty, and `state_dict` fetches it.
    """

    _step_supports_amp_scaling = True
    """torch's GradScaler then always calls `step`, and passes on what it has found."""

    def __init__(
        self,
        original: torch.optim.Optimizer,
        kind: str,
        contribute: Contribute,
        rows: TrainedRows | None = None,
        fetch_state: FetchState = dict,
    ):
        super().__init__(original.param_groups, dict(original.defaults))
        self.param_groups = original.param_groups
        self._kind = kind
        self._contribute = contribute
        self._rows = rows
        self._fetch_state = fetch_state
        self._settings: tuple[tuple[float, ...], ...] | None = None
        self._found: list[Group] = []
        self._hooked_step = partial(self.profile_hook_step(type(self)._step), self)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step of the job. Afterwards the parameters are those for the next gradient.

        Raises JobFailed if the job has ended with an error, RateMismatch, ShapeMismatch, UnsupportedModel.
        """
        if has_hooks(self):
            return self._hooked_step(closure)
        return self._step(closure)

    # torch wraps every optimizer's `step` for hooks and its profiler, unless the step is marked as wrapped
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = getattr(self, "found_inf", None)
        self._contribute(self, None if found is None else Scaled(bool(found), getattr(self, "grad_scale", None)))
        return loss

    def settings(self) -> tuple[tuple[float, ...], ...]:
        """The current settings of all groups; the same object as long as none has changed."""
        if self._settings is not None and self.param_groups == self._found:
            return self._settings
        settings = tuple([settings_of(self._kind, group) for group in self.param_groups])
        if settings != self._settings:
            self._settings = settings
        self._found = [
            # tensors are changed in place, so groups with one are read at each step
            {name: value for name, value in group.items() if name == "params" or not _has_tensor(value)}
            for group in self.param_groups
        ]
        return self._settings

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients, those of table rows too."""
        if set_to_none:  # as torch does, but without its profiler's record
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad = None
        else:
            super().zero_grad(set_to_none)
        if self._rows is not None:
            self._rows.clear()

    def row_gradients(self) -> list[torch.Tensor] | None:
        """The gradients of table rows, which may be changed in place. None without tables."""
        return None if self._rows is None else self._rows.gradients()

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's format, fetched from the servers. Plain torch can load it: the same class, over the same
        parameters. Tensors are on the CPU, float32 or float64.

        Synchronous: the state of the step whose values the model holds, so save both between two steps. Asynchronous:
        the newest state. Rows of tables are not in it. Raises InvalidRequest after the job was left, JobFailed.

        >>> model = torch.nn.Linear(2, 1)
        >>> with sy.connect() as job:
        ...     model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters()))
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        ...     state = optimizer.state_dict()
        >>> torch.optim.Adam(model.parameters()).load_state_dict(state)
        >>> state["state"][0]["step"]
        tensor(1.)
        """
        self.state = defaultdict(dict, self._fetch_state())
        try:
            return super().state_dict()
        finally:
            self.state = defaultdict(dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Raises an error: the state is not in this process."""
        raise UnsupportedOptimizer(
            "load_state_dict on the optimizer of a job",
            why="its state is on the servers since job.prepare",
            todo="call optimizer.load_state_dict before job.prepare, which gives the state to the servers; model and"
            " state of a whole run come back with `shardyard checkpoint restore`",
        )

    def add_param_group(self, param_group: Group) -> None:
        if hasattr(self, "_contribute"):
            raise UnsupportedOptimizer(
                "a parameter group added after job.prepare",
                todo="give all parameters to the optimizer before job.prepare; freeze them with requires_grad_(False)",
            )
        super().add_param_group(param_group)
