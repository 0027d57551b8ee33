"""Synchronous steps of pipelines whose variables are on the servers: each worker pushes the gradients of its stage.

Must not know: how a schedule runs, how a push travels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardyard_worker.consistency.groups.pipelined import StageRuns
from shardyard_worker.consistency.groups.pushed_parts import FACTS, PushedParts
from shardyard_worker.pipeline.pipeline import Pipeline
from shardyard_worker.replicas.collectives import Collectives
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput


class PushedStages(PushedParts):
    """For job.strategy pipeline."""

    def __init__(self, trainer: Trainer, pipeline: Pipeline) -> None:
        super().__init__(trainer, pipeline)
        self._pipeline = pipeline
        self._runs = StageRuns(pipeline)

    def _take_part(self, inside: Collectives) -> None:
        self._pipeline.replica_at(inside.place)
        self._pipeline.free()
        self._trainer.use_place(inside.place)

    def _begin_runs(self, inside: Collectives) -> None:
        self._runs.begin(inside, inside)

    def _end_runs(self) -> None:
        self._runs.end()

    def _run(self, inputs: Sequence[torch.Tensor], target: torch.Tensor, weight: float) -> float:
        size = 0 if self._collectives is None else self._collectives.size
        return self._runs.run(inputs, target, weight, FACTS + size)

    def _sum(self, inside: Collectives, said: list[float]) -> list[float]:  # noqa: ARG002 - by messages
        return self._runs.sum_facts(said)

    def _given(self, sending: StepInput) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = [None] * len(sending.tensors)
        for at in self._pipeline.replica.places:
            found[at] = sending.tensors[at]
        return found

    @property
    def _looks_up_rows(self) -> bool:
        """The other workers look up nothing."""
        inside = self._collectives
        return super()._looks_up_rows and inside is not None and inside.place == self._pipeline.place_of_tables
