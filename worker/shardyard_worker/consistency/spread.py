"""Synchronous steps of a replica that is spread over the members of a group: the base of `pipeline`, `sharded` and
`tensor` (docs/internals/ledger.md, rules D1 to D5, D7 and D8).

`run` computes gradients together with the other members, and leaves each with those of its own variables. Then the
members sum a few facts. A member that has the sum knows that all gradients are there, and takes the step with its own
optimizer. One that has lost the group before keeps its gradients until the next group, in case another member has taken
the step.

Owns: this worker's gradients between `run` and the step. Must not know: how gradients are computed.
"""

from __future__ import annotations

import contextlib
import logging
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from shardyard.domain.consistency import NonFinite
from shardyard.domain.errors import Internal, InvalidRequest
from shardyard.domain.ids import Rank
from shardyard.domain.push_names import PushName
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_worker.consistency.replica_group import GroupStrategy
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec
from shardyard_worker.replicas.collectives import Collectives
from shardyard_worker.replicas.group_store import GroupLost
from shardyard_worker.replicas.spread_model import SpreadModel
from shardyard_worker.training.clipping import NORM_EPS
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")

WEIGHT, LOSS, SQUARE_NORM, LEAVE, PUBLISH = range(5)
FACTS: Final = 5
"""Behind them is a place for each member: whether its gradients are not finite."""


@dataclass(frozen=True)
class Gradients:
    """Those of this worker's parameters at a step, and its buffers after it; None: they stay."""

    step: int
    tensors: list[torch.Tensor | None]
    buffers: list[torch.Tensor] | None


class SpreadStrategy(GroupStrategy):
    """`model`: what this worker updates a part of."""

    publishes_to_change: ClassVar[bool] = False
    """Whether the next group may have other members, which begin with what the servers have."""

    def __init__(self, trainer: Trainer, model: SpreadModel) -> None:
        super().__init__(trainer, model.replica)
        self._model = model
        self._lost: GroupLost | None = None
        """The computation has met the loss of a member."""
        self._has_run = False
        """Whether gradients of the work at hand were computed."""
        self._gradients: Gradients | None = None
        self._facts: list[float] = []
        """Of the last step that this worker has taken."""
        self.loss = float("nan")
        """Of the last batch; NaN if it did not count."""

    # ---- the group

    def _connect(self, group: ReplicaGroup, place: int) -> None:
        before = self.replica
        self._collectives = Collectives(self._session, group, place, self._model.fingerprint)
        self._begin_group(self._collectives)
        self.replica = self._publisher.replica = self._model.replica
        if self.replica is not before:
            self._replica_step = None

    @abstractmethod
    def _begin_group(self, collectives: Collectives) -> None:
        """Makes this worker's part of the model ready to compute with these members."""

    def _is_to_change(self, collectives: Collectives) -> bool:
        """Whether the group ends after this step."""
        return self._session.replica_generation > collectives.group.generation

    @abstractmethod
    def _end_group(self) -> None:
        """Ends what `_begin_group` has begun, and drops gradients."""

    def _copy_from(self, group: ReplicaGroup) -> None:
        """All members continue. One that lacks the group's step has kept its gradients (rule D7), and takes the step by
        the facts of the donor."""
        collectives = self._collectives
        assert collectives is not None
        assert group.donor is not None
        assert group.step is not None
        with self._session.wait_registry.over(lambda: "the facts of the last step"):
            stale = torch.tensor([float(self._replica_step != group.step)])
            collectives.wait(collectives.sum(stale))
            if float(stale):
                has_facts = len(self._facts) == FACTS + collectives.size
                facts = torch.tensor(self._facts if has_facts else [0.0] * (FACTS + collectives.size)).double()
                others = [place for place in range(collectives.size) if place != group.donor]
                collectives.wait(collectives.give(facts, group.donor, others))
                if self._replica_step != group.step:
                    if self._gradients is None or self._gradients.step != group.step - 1:
                        raise Internal(f"a member at step {self._replica_step} in a group of step {group.step}")
                    self._apply(self._gradients, facts.tolist())
                    log.info("takes step %d with the gradients that it has kept", group.step - 1)
        self._gradients = None

    def _load_from_servers(self) -> int:
        self._gradients = None
        self._model.about_to_load()
        step = super()._load_from_servers()
        self._model.loaded()
        return step

    def _leave_sums(self, collectives: Collectives | None) -> None:
        self._lost, self._has_run = None, False
        self._end_group()
        if collectives is not None:
            collectives.leave()

    def has_moved(self) -> bool:
        if super().has_moved():
            return True
        step = self.versions.current
        if step is not None and step == self._publisher.step:
            self._complete(step)
        return False

    def _complete(self, step: int) -> None:
        """Loads the values of all variables, of the step that was published last, into the script's model."""
        if not self._model.is_whole:
            with contextlib.suppress(MapChanged):
                self._model.about_to_load()
                self._trainer.pull_step(step)
                self._trainer.values.complete()
                self._model.is_whole = True

    def leave(self, groups: tuple[tuple[float, ...], ...]) -> None:  # noqa: ARG002
        """Gives the servers the state with the other members, which cannot go on without this one."""
        step, collectives = self.versions.current, self._collectives
        if self._session.drain.hands_over or step is None or collectives is None or step == self._publisher.step:
            return
        with contextlib.suppress(MapChanged):  # another member has left before, or died
            self._publisher.publish(step, collectives, self._share)

    def close(self) -> None:
        super().close()
        self._model.close()

    # ---- a step

    def run(self, inputs: Sequence[Any], target: Any) -> None:
        """Computes the gradients of a batch with the other members. Raises InvalidRequest, UnsupportedModel. If a
        member is lost, `contribute` says so."""
        step = self.versions.current
        if self._collectives is None:
            raise InvalidRequest("job.train_step without a place in the group", todo="call it for each batch")
        self._model.is_whole = False
        try:
            with self._session.wait_registry.over(lambda: f"step {step} of the other members"):
                self._run(inputs, target)
        except GroupLost as error:
            self._lost = error
        self._has_run = True

    @abstractmethod
    def _run(self, inputs: Sequence[Any], target: Any) -> None:
        """Raises as `run` does, and GroupLost."""

    def _counted(self, name: PushName, rank: Rank, sending: StepInput | None) -> StepInput | None:  # noqa: ARG002
        """Whether gradients are finite is looked at once, by all members."""
        return sending

    def contribute(self, name: PushName | None, sending: StepInput | None, upcoming: Upcoming | None = None) -> None:
        if sending is not None and not self._has_run:
            raise InvalidRequest(
                f"optimizer.step() in a job whose job.strategy is {self._model.strategy.value}",
                why="a worker has the gradients of its own variables only, after it has computed with the others",
                todo="call job.train_step(x, y), which computes the loss and takes the step",
            )
        self.loss = float("nan")
        try:
            super().contribute(name, sending, upcoming)
        finally:
            self._has_run = False

    def _push(
        self,
        name: PushName,
        sending: StepInput | None,
        upcoming: Upcoming | None,  # noqa: ARG002 - without tables there is nothing to look up
        pull: PullSpec | None,
    ) -> ExchangeResult:
        """Takes the step with this worker's last rank, if the gradients of all members are there. Raises GroupLost."""
        collectives, step, session = self._collectives, self.versions.current, self._session
        if collectives is None or self._lost is not None:
            raise self._lost or GroupLost("this worker has left its replica group")
        assert step is not None
        said = [0.0] * (FACTS + collectives.size)
        with session.wait_registry.over(lambda: f"step {step} of the other members"):
            tensors, buffers = self._collected(sending, said, is_last=pull is not None)
            if pull is None:
                self.loss = self._loss_of(said)
                return ExchangeResult()
            said[FACTS + collectives.place] = self._not_finite(said)
            said[LEAVE] = float(self._is_to_change(collectives))
            said[PUBLISH] = float(session.is_to_publish)
            self._gradients = gradients = Gradients(step, tensors, buffers)
            facts = self._sum(collectives, said)
        self._apply(gradients, facts)
        self._report_nonfinite(name, sending, facts, gradients)
        self.loss = self._loss_of(facts)
        if facts[PUBLISH] or (facts[LEAVE] and self.publishes_to_change):
            self._publisher.publish(step + 1, collectives, self._share)
        self._is_to_leave = bool(facts[LEAVE])
        return ExchangeResult()

    def _sum(self, collectives: Collectives, said: list[float]) -> list[float]:
        """The facts of all members. Returns when all have called this."""
        found = torch.tensor(said, dtype=torch.float64)
        collectives.wait(collectives.sum(found))
        facts: list[float] = found.tolist()
        return facts

    @abstractmethod
    def _collected(
        self, sending: StepInput | None, said: list[float], *, is_last: bool
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor] | None]:
        """The gradients of this worker's parameters, and its buffers after the step. Writes the weight, the loss and
        the square norm of the gradients into `said`. `is_last`: of this worker's ranks. Raises GroupLost."""

    def _loss_of(self, facts: Sequence[float]) -> float:
        return facts[LOSS]

    def _divisor(self, facts: Sequence[float]) -> float:  # noqa: ARG002
        """What gradients are divided by, so that they are of the mean over the samples of the step."""
        return 1.0

    def _apply(self, gradients: Gradients, facts: list[float]) -> None:
        """Takes the step. `facts`: of all members."""
        if facts[WEIGHT]:
            self.replica.keep_buffers(gradients.buffers)
        is_finite = self._settings.nonfinite is NonFinite.ALLOW or not any(facts[FACTS:])
        if facts[WEIGHT] and is_finite:
            self._scale(gradients.tensors, facts)
            self.replica.step(gradients.tensors)
        self._facts = facts
        self._gradients = None
        self._replica_step = gradients.step + 1

    @torch.no_grad()
    def _scale(self, gradients: Sequence[torch.Tensor | None], facts: Sequence[float]) -> None:
        """Divides the gradients, and clips them."""
        limit, divisor = self._settings.clip.norm, self._divisor(facts)
        scale = 1.0 / divisor
        if limit:
            scale *= min(1.0, limit / (facts[SQUARE_NORM] ** 0.5 / divisor + NORM_EPS))
        for each in gradients:
            if each is not None and scale != 1.0:
                each.mul_(scale)

    def _not_finite(self, said: Sequence[float]) -> float:
        """Above 0 if this worker's gradients are not finite; the member with the most reports the step."""
        return float(not math.isfinite(said[SQUARE_NORM]))

    def _report_nonfinite(
        self, name: PushName, sending: StepInput | None, facts: Sequence[float], gradients: Gradients
    ) -> None:
        odd = facts[FACTS:]
        if not any(odd) or self._settings.nonfinite is NonFinite.ALLOW:
            return
        step = self._replica_step
        log.warning("step %s changes nothing: the gradient is not finite", None if step is None else step - 1)
        collectives = self._collectives
        reports = collectives is not None and collectives.place == odd.index(max(odd))
        if reports and sending is not None and step is not None:
            self._trainer.pushes.may_count(name, self._reported(sending, gradients), step - 1)

    def _reported(self, sending: StepInput, gradients: Gradients) -> StepInput:  # noqa: ARG002
        """What this worker has computed, for a report."""
        return sending


def square_norm(gradients: Sequence[torch.Tensor | None]) -> float:
    norms = [float(torch.linalg.vector_norm(each)) for each in gradients if each is not None]
    return sum([norm * norm for norm in norms])
