"""Synchronous steps of a pipeline: each worker has a stage of the model, and as many workers as the pipeline has stages
compute each batch together (docs/internals/ledger.md, rules D1 to D7).

Such workers are one logical rank or several, whose batches they read alike. The schedule runs in `run`, and leaves the
gradients of this worker's parameters.

Must not know: how a schedule runs, how a step is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.group_store import no_place
from shardyard_worker.collectives.messages import Messages
from shardyard_worker.consistency.groups.spread import SpreadStrategy, count_of_facts
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec
from shardyard_worker.pipeline.pipeline import Pipeline
from shardyard_worker.pipeline.process_group import StageGroup
from shardyard_worker.pipeline.schedules import StageRunner
from shardyard_worker.replicas.side_by_side import SideBySide
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import Trainer


class StageRuns:
    """The stages of this worker in its group."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._group: StageGroup | None = None
        self._runner: StageRunner | None = None

    def begin(self, inside: Collectives, everyone: Collectives) -> None:
        """`everyone`: the members that tell each other facts; among them are those of this pipeline."""
        if inside.process_group is None:  # all steps were taken before
            return
        pipeline = self._pipeline
        self._group = StageGroup(inside, everyone)
        self._runner = StageRunner(pipeline.stages, pipeline.settings, pipeline.loss, self._group, pipeline.device)

    def end(self) -> None:
        group, self._group = self._group, None
        self._runner = None
        if group is not None:
            group.end()

    def run(self, inputs: Sequence[torch.Tensor], target: torch.Tensor, weight: float) -> float:
        """Raises GroupLost."""
        group, runner = self._group, self._runner
        if group is None or runner is None:
            raise no_place()
        loss = runner.run(inputs, target, weight)
        group.flush()
        return loss

    @property
    def messages(self) -> Messages:
        """Between all members of the group. Raises GroupLost."""
        if self._group is None:
            raise no_place()
        return self._group.messages


class PipelineStrategy(SpreadStrategy):
    """For job.strategy pipeline, with the variables in the workers."""

    def __init__(self, trainer: Trainer, pipeline: Pipeline) -> None:
        super().__init__(trainer, pipeline)
        self._pipeline = pipeline
        self._runs = StageRuns(pipeline)

    def _begin_group(self, members: SideBySide) -> None:
        self._pipeline.replica_at(members.inside.place)
        self._runs.begin(members.inside, members.all)

    def _end_group(self) -> None:
        self._runs.end()

    @property
    def _pushes_rows(self) -> bool:
        assert self._members is not None
        return self._members.inside.place == self._pipeline.place_of_tables

    def _push_kept_rows(self, facts: Sequence[float], upcoming: Upcoming | None, pull: PullSpec) -> ExchangeResult:
        """The other workers look up nothing."""
        return super()._push_kept_rows(facts, upcoming if self._pushes_rows else None, pull)

    def _run(self, inputs: Sequence[torch.Tensor], target: torch.Tensor, weight: float) -> float:
        if self._members is not None:
            self._runs.messages.await_facts(count_of_facts(self._members.all.size))
        return self._runs.run(inputs, target, weight)

    def _sum(self, collectives: Collectives, said: list[float]) -> list[float]:  # noqa: ARG002 - by messages
        return self._runs.messages.sum_facts(said)
