"""Synchronous steps of a pipeline: each worker has a stage of the model, and a group computes a batch together
(docs/internals/ledger.md, rules D1 to D7).

A group of as many workers as the pipeline has stages is one logical rank: its members read the same batches. The
schedule runs in `run`, and leaves the gradients of this worker's parameters. Then the members sum a few facts. A member
that has the sum knows that all gradients are there, and takes the step with its own optimizer. One that has lost the
group before keeps its gradients until the next group, in case another member has taken the step.

Owns: this worker's gradients between the schedule and the step. Must not know: how a schedule runs.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from shardyard.domain.consistency import NonFinite
from shardyard.domain.errors import Internal, InvalidRequest
from shardyard.domain.ids import Rank
from shardyard.domain.push_names import PushName
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_worker.consistency.replica_group import GroupStrategy
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec
from shardyard_worker.pipeline.pipeline import Pipeline
from shardyard_worker.pipeline.process_group import StageGroup
from shardyard_worker.pipeline.schedules import StageRunner
from shardyard_worker.replicas.collectives import Collectives
from shardyard_worker.replicas.group_store import GroupLost
from shardyard_worker.training.clipping import NORM_EPS
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")

_WEIGHT, _LOSS, _SQUARE_NORM, _LEAVE, _PUBLISH = range(5)
_FACTS: Final = 5
"""Behind them is a place for each member: whether its gradients are not finite."""


@dataclass(frozen=True)
class _Gradients:
    """Those of this worker's parameters at a step, and its buffers after the forward."""

    step: int
    tensors: list[torch.Tensor | None]
    buffers: list[torch.Tensor]


class PipelineStrategy(GroupStrategy):
    """For job.strategy pipeline."""

    def __init__(self, trainer: Trainer, pipeline: Pipeline) -> None:
        super().__init__(trainer, pipeline.replica)
        self._pipeline = pipeline
        self._group: StageGroup | None = None
        self._runner: StageRunner | None = None
        self._lost: GroupLost | None = None
        """The schedule has met the loss of a member."""
        self._loss: float | None = None
        """Of the batch that the schedule has run; None: it has not."""
        self._gradients: _Gradients | None = None
        self._facts: list[float] = []
        """Of the last step that this worker has taken."""
        self.loss = float("nan")
        """Of the last batch, over all of its samples; NaN if it did not count."""

    # ---- the group

    def _connect(self, group: ReplicaGroup, place: int) -> None:
        pipeline, before = self._pipeline, self.replica
        self.replica = self._publisher.replica = pipeline.replica_at(place)
        if self.replica is not before:
            self._replica_step = None
        self._collectives = Collectives(self._session, group, place, pipeline.fingerprint)
        self._group = StageGroup(self._collectives)
        self._runner = StageRunner(pipeline.stages, pipeline.settings, pipeline.loss, self._group, pipeline.device)

    def _ranks_at(self, group: ReplicaGroup, place: int) -> tuple[Rank, ...]:  # noqa: ARG002
        return (Rank(0),)

    @property
    def _share(self) -> tuple[int, int]:
        return 0, 1

    def _copy_from(self, group: ReplicaGroup) -> None:
        """All stages continue. A member that lacks the group's step has kept its gradients (rule D7), and takes the
        step by the facts of the donor."""
        collectives = self._collectives
        assert collectives is not None
        assert group.donor is not None
        assert group.step is not None
        with self._session.wait_registry.over(lambda: "the facts of the last step"):
            stale = torch.tensor([float(self._replica_step != group.step)])
            collectives.wait(collectives.sum(stale))
            if float(stale):
                has_facts = len(self._facts) == _FACTS + collectives.size
                facts = torch.tensor(self._facts if has_facts else [0.0] * (_FACTS + collectives.size)).double()
                others = [place for place in range(collectives.size) if place != group.donor]
                collectives.wait(collectives.give(facts, group.donor, others))
                if self._replica_step != group.step:
                    if self._gradients is None or self._gradients.step != group.step - 1:
                        raise Internal(f"a stage at step {self._replica_step} in a group of step {group.step}")
                    self._apply(self._gradients, facts.tolist())
                    log.info("takes step %d with the gradients that it has kept", group.step - 1)
        self._gradients = None

    def _load_from_servers(self) -> int:
        self._gradients = None
        return super()._load_from_servers()

    def _leave_sums(self, collectives: Collectives | None) -> None:
        group, self._group = self._group, None
        self._runner = self._lost = None
        self._loss = None
        self._drop_gradients()
        if group is not None:
            group.end()
        if collectives is not None:
            collectives.leave()

    def _drop_gradients(self) -> None:
        for target in self.replica.targets:
            target.grad = None

    def has_moved(self) -> bool:
        if super().has_moved():
            return True
        step = self.versions.current
        if step is not None and step == self._publisher.step:
            self._complete(step)
        return False

    def _complete(self, step: int) -> None:
        """Loads the values of the other stages, of the step that was published last."""
        if not self._pipeline.is_whole:
            with contextlib.suppress(MapChanged):
                self._trainer.pull_step(step)
                self._trainer.values.complete()
                self._pipeline.is_whole = True

    def leave(self, groups: tuple[tuple[float, ...], ...]) -> None:  # noqa: ARG002
        """Gives the servers the state with the other stages, which cannot go on without this one."""
        step, collectives = self.versions.current, self._collectives
        if self._session.drain.hands_over or step is None or collectives is None:
            return
        with contextlib.suppress(MapChanged):  # another member has left before, or died
            self._publisher.publish(step, collectives, self._share)

    def close(self) -> None:
        super().close()
        self._pipeline.close()

    # ---- a step

    def run(self, inputs: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Computes the gradients of a batch with the other stages. Raises InvalidRequest, UnsupportedModel. If a member
        is lost, `contribute` says so."""
        runner, group, step = self._runner, self._group, self.versions.current
        if runner is None or group is None:
            raise InvalidRequest("job.train_step without a place in the pipeline", todo="call it for each batch")
        self._drop_gradients()
        self._pipeline.is_whole = False
        try:
            with self._session.wait_registry.over(lambda: f"step {step} of the other stages"):
                group.receive_facts(_FACTS + group.size())
                self._loss = runner.run(inputs, target)
        except GroupLost as error:
            self._lost, self._loss = error, 0.0

    def _counted(self, name: PushName, rank: Rank, sending: StepInput | None) -> StepInput | None:  # noqa: ARG002
        """Whether gradients are finite is looked at once, in all stages."""
        return sending

    def contribute(self, name: PushName | None, sending: StepInput | None, upcoming: Upcoming | None = None) -> None:
        if sending is not None and self._loss is None:
            raise InvalidRequest(
                "optimizer.step() in a job whose job.strategy is pipeline",
                why="a worker has the gradients of its own stages only, after the schedule has run",
                todo="call job.train_step(x, y), which computes the loss and takes the step",
            )
        self.loss = float("nan")
        try:
            super().contribute(name, sending, upcoming)
        finally:
            self._loss = None

    def _push(
        self,
        name: PushName,
        sending: StepInput | None,
        upcoming: Upcoming | None,  # noqa: ARG002 - without tables there is nothing to look up
        pull: PullSpec | None,  # noqa: ARG002 - a worker has one rank
    ) -> ExchangeResult:
        """Takes the step, if the gradients of all stages are there. Raises GroupLost."""
        collectives, group = self._collectives, self._group
        step, session = self.versions.current, self._session
        if collectives is None or group is None or self._lost is not None:
            raise self._lost or GroupLost("this worker has left its replica group")
        assert step is not None
        said = [0.0] * (_FACTS + group.size())
        own = [target.grad for target in self.replica.targets]
        found = [gradient for gradient in own if gradient is not None]
        if sending is not None and self._runner is not None:
            is_last = self._runner.has_last
            said[_WEIGHT] = sending.weight if is_last else 0.0
            said[_LOSS] = (self._loss or 0.0) if is_last else 0.0
            norms = [float(torch.linalg.vector_norm(each)) for each in found]
            said[_SQUARE_NORM] = sum([norm * norm for norm in norms])
            said[_FACTS + collectives.place] = float(not math.isfinite(said[_SQUARE_NORM]))
        said[_LEAVE] = float(session.replica_generation > collectives.group.generation)
        said[_PUBLISH] = float(session.is_to_publish)
        buffers = [each.clone() for each in self._found_buffers()]
        self._gradients = gradients = _Gradients(step, own, buffers)
        with session.wait_registry.over(lambda: f"step {step} of the other stages"):
            facts = group.sum_facts(said)
        self._apply(gradients, facts)
        self._report_nonfinite(name, sending, facts)
        self.loss = facts[_LOSS]
        if facts[_PUBLISH]:
            self._publisher.publish(step + 1, collectives, self._share)
        self._is_to_leave = bool(facts[_LEAVE])
        return ExchangeResult()

    def _found_buffers(self) -> list[torch.Tensor]:
        return [found for found in (each.found for each in self.replica.buffers) if found is not None]

    def _apply(self, gradients: _Gradients, facts: list[float]) -> None:
        """Takes the step. `facts`: of all members."""
        if facts[_WEIGHT]:
            self.replica.keep_buffers(gradients.buffers)
        is_finite = self._settings.nonfinite is NonFinite.ALLOW or not any(facts[_FACTS:])
        if facts[_WEIGHT] and is_finite:
            self._clip(gradients.tensors, facts)
            self.replica.step(gradients.tensors)
        self._facts = facts
        self._gradients = None
        self._replica_step = gradients.step + 1

    @torch.no_grad()
    def _clip(self, gradients: Sequence[torch.Tensor | None], facts: Sequence[float]) -> None:
        limit = self._settings.clip.norm
        if limit:
            scale = min(1.0, limit / (facts[_SQUARE_NORM] ** 0.5 + NORM_EPS))
            for each in gradients:
                if each is not None and scale < 1.0:
                    each.mul_(scale)

    def _report_nonfinite(self, name: PushName, sending: StepInput | None, facts: Sequence[float]) -> None:
        """The first member whose gradients are not finite reports the step."""
        places = [place for place, is_bad in enumerate(facts[_FACTS:]) if is_bad]
        if not places or self._settings.nonfinite is NonFinite.ALLOW:
            return
        step = self._replica_step
        log.warning("step %s changes nothing: the gradient is not finite", None if step is None else step - 1)
        collectives = self._collectives
        if sending is not None and step is not None and collectives is not None and collectives.place == places[0]:
            self._trainer.pushes.may_count(name, sending, step - 1)
