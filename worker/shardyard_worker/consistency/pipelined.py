"""Synchronous steps of a pipeline: each worker has a stage of the model, and as many workers as the pipeline has stages
compute each batch together (docs/internals/ledger.md, rules D1 to D7).

Such workers are one logical rank or several, whose batches they read alike. The schedule runs in `run`, and leaves the
gradients of this worker's parameters.

Must not know: how a schedule runs, how a step is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardyard_worker.consistency.spread import SpreadStrategy, count_of_facts
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec
from shardyard_worker.pipeline.pipeline import Pipeline
from shardyard_worker.pipeline.process_group import StageGroup
from shardyard_worker.pipeline.schedules import StageRunner
from shardyard_worker.replicas.collectives import Collectives
from shardyard_worker.replicas.group_store import GroupLost
from shardyard_worker.replicas.side_by_side import SideBySide
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import Trainer


class PipelineStrategy(SpreadStrategy):
    """For job.strategy pipeline."""

    def __init__(self, trainer: Trainer, pipeline: Pipeline) -> None:
        super().__init__(trainer, pipeline)
        self._pipeline = pipeline
        self._group: StageGroup | None = None
        self._runner: StageRunner | None = None

    def _begin_group(self, members: SideBySide) -> None:
        pipeline = self._pipeline
        pipeline.replica_at(members.inside.place)
        if members.inside.process_group is None:  # all steps were taken before
            return
        self._group = StageGroup(members.inside, members.all)
        self._runner = StageRunner(pipeline.stages, pipeline.settings, pipeline.loss, self._group, pipeline.device)

    def _end_group(self) -> None:
        group, self._group = self._group, None
        self._runner = None
        if group is not None:
            group.end()

    @property
    def _pushes_rows(self) -> bool:
        assert self._members is not None
        return self._members.inside.place == self._pipeline.place_of_tables

    def _push_kept_rows(self, facts: Sequence[float], upcoming: Upcoming | None, pull: PullSpec) -> ExchangeResult:
        """The other workers look up nothing."""
        return super()._push_kept_rows(facts, upcoming if self._pushes_rows else None, pull)

    def _run(self, inputs: Sequence[torch.Tensor], target: torch.Tensor, weight: float) -> float:
        if self._runner is None or self._group is None or self._members is None:
            raise GroupLost("this worker has left its replica group")
        self._group.receive_facts(count_of_facts(self._members.all.size))
        return self._runner.run(inputs, target, weight)

    def _sum(self, collectives: Collectives, said: list[float]) -> list[float]:  # noqa: ARG002 - by messages
        if self._group is None:
            raise GroupLost("this worker has left its replica group")
        return self._group.sum_facts(said)
