"""`job.register`, `job.push` and `job.pull`: variables that a script names itself, without a model or an optimizer of
torch. Must not know: how a push is named, how it travels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import ConfigurationError, UnknownVariable, UnsupportedOptimizer
from shardyard.domain.optimizers import KINDS, OptimizerSpec, make_group, setting_names
from shardyard.domain.variables import VariableKind
from shardyard_worker.consistency.local_sgd import refuse_without_optimizer
from shardyard_worker.exchange.buffers.tensor_types import spec_of
from shardyard_worker.job.training_loop import TrainingLoop
from shardyard_worker.session.interrupts import INTERRUPTS
from shardyard_worker.training.variables import StepInput, Variable


def register(
    loop: TrainingLoop, variables: Mapping[str, torch.Tensor], optimizer: str, settings: Mapping[str, float]
) -> None:
    if loop.is_local:
        refuse_without_optimizer("job.register")
    strategy = loop.session.job_settings.strategy
    if strategy.uses_groups:
        raise ConfigurationError(
            f"job.register in a job with job.strategy {strategy.value}",
            why="workers take the steps with an optimizer of torch, and there is none",
            todo="give a model and an optimizer to job.prepare, or set job.strategy to parameter_server",
        )
    if optimizer not in KINDS:
        raise UnsupportedOptimizer(f"optimizer {optimizer!r}", todo=f"use one of {', '.join(sorted(KINDS))}")
    specs = [spec_of(name, tensor, VariableKind.PARAMETER) for name, tensor in variables.items()]
    made = [
        Variable(spec, tensor.detach().clone(memory_format=torch.contiguous_format))
        for spec, tensor in zip(specs, variables.values(), strict=True)
    ]
    groups = (make_group(optimizer, settings),)
    loop.begin(made, OptimizerSpec(optimizer, groups), lambda: groups)


def push(
    loop: TrainingLoop, gradients: Mapping[str, torch.Tensor], samples: float, settings: Mapping[str, float]
) -> None:
    trainer = loop.need_trainer()
    if loop.is_local:
        refuse_without_optimizer("job.push")
    _check_names(loop, gradients)
    groups = loop.settings()
    if settings:
        kind = trainer.optimizer.kind
        first = dict(zip(setting_names(kind), groups[0], strict=True))
        groups = (make_group(kind, {**first, **settings}),)
    sent = [gradients.get(variable.spec.name) for variable in trainer.variables]
    if trainer.pushes.clipper is not None:  # it clips in place, and these tensors are the script's
        sent = [tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor for tensor in sent]
    loop.contribute(StepInput(sent, samples, groups))


def pull(loop: TrainingLoop, names: Sequence[str] | None) -> dict[str, torch.Tensor]:
    trainer = loop.need_trainer()
    if loop.session.mode is UpdateMode.ASYNC and loop.strategy is not None:
        with INTERRUPTS:
            loop.follow_mode().begin()
    chosen = list(loop.places) if names is None else list(names)
    _check_names(loop, chosen)
    return {name: trainer.variables[loop.places[name]].target.detach().clone() for name in chosen}


def _check_names(loop: TrainingLoop, names: Iterable[str]) -> None:
    for name in names:
        if name not in loop.places:
            raise UnknownVariable(f"{name!r}; the job has {', '.join(sorted(loop.places)[:8])}")
