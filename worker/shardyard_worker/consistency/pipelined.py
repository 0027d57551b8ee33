"""Synchronous steps of a pipeline: each worker has a stage of the model, and a group computes a batch together
(docs/internals/ledger.md, rules D1 to D7).

A group of as many workers as the pipeline has stages is one logical rank: its members read the same batches. The
schedule runs in `run`, and leaves the gradients of this worker's parameters.

Must not know: how a schedule runs, how a step is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardyard.domain.ids import Rank
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_worker.consistency.spread import FACTS, LOSS, SQUARE_NORM, WEIGHT, SpreadStrategy, square_norm
from shardyard_worker.pipeline.pipeline import Pipeline
from shardyard_worker.pipeline.process_group import StageGroup
from shardyard_worker.pipeline.schedules import StageRunner
from shardyard_worker.replicas.collectives import Collectives
from shardyard_worker.replicas.group_store import GroupLost
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput


class PipelineStrategy(SpreadStrategy):
    """For job.strategy pipeline."""

    def __init__(self, trainer: Trainer, pipeline: Pipeline) -> None:
        super().__init__(trainer, pipeline)
        self._pipeline = pipeline
        self._group: StageGroup | None = None
        self._runner: StageRunner | None = None
        self._own_loss = 0.0
        """What this worker's stages have computed of the batch's loss."""

    def _begin_group(self, collectives: Collectives) -> None:
        pipeline = self._pipeline
        pipeline.replica_at(collectives.place)
        if collectives.process_group is None:  # all steps were taken before
            return
        self._group = StageGroup(collectives)
        self._runner = StageRunner(pipeline.stages, pipeline.settings, pipeline.loss, self._group, pipeline.device)

    def _end_group(self) -> None:
        group, self._group = self._group, None
        self._runner = None
        self._drop_gradients()
        if group is not None:
            group.end()

    def _drop_gradients(self) -> None:
        for target in self.replica.targets:
            target.grad = None

    def _ranks_at(self, group: ReplicaGroup, place: int) -> tuple[Rank, ...]:  # noqa: ARG002
        return (Rank(0),)

    @property
    def _share(self) -> tuple[int, int]:
        return 0, 1

    def _run(self, inputs: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        self._drop_gradients()
        self._own_loss = 0.0
        if self._runner is not None and self._group is not None:
            self._group.receive_facts(FACTS + self._group.size())
            self._own_loss = self._runner.run(inputs, target)

    def _sum(self, collectives: Collectives, said: list[float]) -> list[float]:  # noqa: ARG002 - by its stages
        if self._group is None:
            raise GroupLost("this worker has left its replica group")
        return self._group.sum_facts(said)

    def _collected(
        self,
        sending: StepInput | None,
        said: list[float],
        *,
        is_last: bool,  # noqa: ARG002 - a worker has one rank
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor] | None]:
        gradients = [target.grad for target in self.replica.targets]
        if sending is not None and self._runner is not None:
            said[SQUARE_NORM] = square_norm(gradients)
            if self._runner.has_last:
                said[WEIGHT], said[LOSS] = sending.weight, self._own_loss
        buffers = [each.found for each in self.replica.buffers]
        return gradients, [each.clone() for each in buffers if each is not None]
