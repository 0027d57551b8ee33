"""Runs a batch through a pipeline by a schedule of torch.distributed.pipelining.

A batch is cut into micro-batches of one shape. Every worker gets the whole batch: the first stage reads the inputs, the
last one the target. The shapes between stages are found without computing anything, when the first batch of a shape
comes.

Owns: torch's stages and schedules of this worker in one group. Must not know: what becomes of the gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardyard.config.settings import PipelineSettings
from shardyard.domain.errors import InvalidRequest, UnsupportedModel
from shardyard_worker.pipeline.cut import Stage
from shardyard_worker.pipeline.process_group import StageGroup
from shardyard_worker.replicas.spread_model import Loss


def check_loss(loss: torch.Tensor) -> None:
    """Whether a gradient can be computed from it. Raises InvalidRequest."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"type {type(loss).__name__}"
        raise InvalidRequest(
            f"a loss of {shape}",
            why="a step follows the gradient of one number",
            todo="let the loss return a tensor of one element, for example the mean over the batch",
        )
    if not loss.requires_grad:
        raise InvalidRequest(
            "a loss that does not depend on the model's parameters",
            why="it has no gradient",
            todo="compute it from the model's output, without detach(), item() or torch.no_grad()",
        )


class Autocast(NamedTuple):
    """What torch.autocast is set to where the script takes a step."""

    device: str
    dtype: torch.dtype
    enabled: bool

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        kind = device.type
        return cls(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def __call__(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.device, dtype=self.dtype) if self.enabled else contextlib.nullcontext()

    def off(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.device, enabled=False) if self.enabled else contextlib.nullcontext()


class _Part(torch.nn.Module):
    """A stage's module, with the script's autocast in the forward only."""

    def __init__(self, module: torch.nn.Module, autocast: Autocast) -> None:
        super().__init__()
        self.module = module
        self._autocast = autocast

    def forward(self, *given: torch.Tensor) -> Any:
        with self._autocast():
            return self.module(*given)


Metas = tuple[torch.Tensor, ...]


class StageRunner:
    """The stages of the worker at a place of a group. Raises GroupLost where the group cannot go on."""

    def __init__(
        self, stages: Sequence[Stage], settings: PipelineSettings, loss: Loss, group: StageGroup, device: torch.device
    ) -> None:
        self._stages = stages
        self._settings = settings
        self._loss = loss
        self._group = group
        self._device = device
        self.numbers = settings.schedule.stages_at(group.rank(), settings.stages, settings.stages_each)
        self.has_last = len(stages) - 1 in self.numbers
        self._schedules: dict[Any, Any] = {}
        self._weight = 0.0
        """Of each micro-batch of the batch at hand."""

    def run(self, inputs: Sequence[torch.Tensor], target: torch.Tensor, weight: float) -> float:
        """Computes the gradients of a batch, times `weight`, added to those of this worker's parameters. Returns the
        batch's loss in the worker with the last stage; 0 in the others. Raises InvalidRequest, UnsupportedModel."""
        given = (*inputs, target)
        self._check(given)
        self._weight = weight / self._settings.microbatches
        autocast = Autocast.now(self._device)
        key = tuple((tuple(each.shape), each.dtype) for each in given), autocast
        if key not in self._schedules:
            self._schedules[key] = self._made(given, autocast)
        losses: list[torch.Tensor] = []
        with autocast.off():
            self._schedules[key].step(
                *(inputs if 0 in self.numbers else ()),
                target=target if self.has_last else None,
                losses=losses if self.has_last else None,
                return_outputs=False,
            )
        return float(torch.stack(losses).detach().double().sum()) / weight if losses else 0.0

    def _check(self, given: Sequence[Any]) -> None:
        count = self._settings.microbatches
        sizes = [each.shape[0] if isinstance(each, torch.Tensor) and each.dim() else None for each in given]
        if None in sizes or len(set(sizes)) > 1 or not sizes[0]:
            raise InvalidRequest(
                f"job.train_step of tensors with {', '.join('no' if size is None else str(size) for size in sizes)}"
                " samples in a pipeline",
                why="it cuts inputs and target into micro-batches along their first dimension",
                todo="give tensors, each with the samples of the batch in its first dimension",
            )
        if sizes[0] % count:
            raise InvalidRequest(
                f"a batch of {sizes[0]} samples, and {count} micro-batches",
                why="the micro-batches of a pipeline have one shape",
                todo="give a batch_size that is a multiple of job.pipeline.microbatches, and drop_last=True",
            )

    def _made(self, given: Sequence[torch.Tensor], autocast: Autocast) -> Any:
        # imported with the first batch: it takes a second, and most jobs have no pipeline
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        settings, count = self._settings, self._settings.microbatches
        metas = self._shapes([each[: each.shape[0] // count] for each in given[:-1]], autocast)
        stages = [
            PipelineStage(
                _Part(self._stages[number].module, autocast) if autocast.enabled else self._stages[number].module,
                number,
                len(self._stages),
                self._device,
                input_args=metas[number],
                output_args=metas[number + 1],
            )
            for number in self.numbers
        ]

        def part_of_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
            with autocast():
                found = self._loss(output, target)
            check_loss(found)
            return found * self._weight

        made = get_schedule_class(settings.schedule.value)
        return made(
            stages if settings.schedule.is_looped else stages[0], count, loss_fn=part_of_loss, scale_grads=False
        )

    def _shapes(self, inputs: Sequence[torch.Tensor], autocast: Autocast) -> list[Metas]:
        """What goes into each stage for one micro-batch, and what comes out of the last one, without data."""
        found: list[Metas] = []
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad(), autocast():
            values: Any = tuple(mode.from_tensor(each.detach()) for each in inputs)
            for number, stage in enumerate(self._stages):
                found.append(_metas(values, number))
                values = stage.module(*values)
        return [*found, _metas(values if isinstance(values, tuple | list) else [values], len(self._stages))]


def _metas(values: Sequence[Any], number: int) -> Metas:
    """`number`: of the stage that takes the values."""
    for each in values:
        if not isinstance(each, torch.Tensor):
            raise UnsupportedModel(
                f"a {type(each).__name__} that stage {number - 1} gives to stage {number}",
                why="stages send tensors to each other",
                todo="cut the model elsewhere (job.pipeline.cut), or compute it again in the later stage",
            )
    return tuple(
        torch.empty_strided(
            each.shape, each.stride(), dtype=each.dtype, device="meta", requires_grad=each.requires_grad
        )
        for each in values
    )
