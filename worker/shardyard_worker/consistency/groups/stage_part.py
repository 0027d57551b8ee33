"""A stage of a pipeline whose variables are on the servers.

Must not know: how a schedule runs, how a push travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.messages import Messages
from shardyard_worker.consistency.groups.parts import FACTS, ReplicaPart
from shardyard_worker.consistency.groups.pipelined import StageRuns
from shardyard_worker.pipeline.pipeline import Pipeline
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput


class StagePart(ReplicaPart):
    needs_feed = False

    def __init__(self, trainer: Trainer, pipeline: Pipeline) -> None:
        super().__init__(trainer, pipeline)
        self._pipeline = pipeline
        self._runs = StageRuns(pipeline)

    def _begin(self, inside: Collectives) -> None:
        self._pipeline.replica_at(inside.place)
        self._pipeline.free()
        self._trainer.use_place(inside.place)
        self._runs.begin(inside, inside)

    def _end(self) -> None:
        self._runs.end()

    def run(self, inputs: Sequence[Any], target: Any, weight: float) -> float:
        self.messages.await_facts(FACTS + self._size)
        return self._runs.run(inputs, target, weight)

    @property
    def messages(self) -> Messages:
        return self._runs.messages

    def _given(self, sending: StepInput) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = [None] * len(sending.tensors)
        for at in self._pipeline.replica.places:
            found[at] = sending.tensors[at]
        return found

    @property
    def looks_up_rows(self) -> bool:
        return super().looks_up_rows and self.inside is not None and self.inside.place == self._pipeline.place_of_tables
