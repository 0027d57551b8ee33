"""Synchronous steps of a replica that is spread over the members of a group: the base of `pipeline`, `sharded` and
`tensor` (docs/internals/ledger.md, rules D1 to D5, D7 and D8).

Each member has the gradients of its own variables. If there are several replicas side by side, members with the same
variables add up their gradients. Then all members sum a few facts. A member that has the sum knows that all gradients
are there, and takes the step with its own optimizer. One that has lost the group before keeps its gradients until the
next group, in case another member has taken the step.

Rows of tables stay on the servers. The facts say whether the step counts, so rows are pushed after them, each rank's
under its name, and the step is taken when the servers have those of all ranks (rule D6).

Owns: this worker's gradients between `run` and the step. Must not know: how gradients are computed.
"""

from __future__ import annotations

import contextlib
import logging
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch

from shardyard.domain.consistency import NonFinite
from shardyard.domain.errors import Internal
from shardyard.domain.ids import Rank
from shardyard.domain.push_names import PushName
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard.runtime.malloc import give_back_freed
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.group_store import GroupLost
from shardyard_worker.consistency.groups.computed_together import ComputedTogether, square_norm
from shardyard_worker.consistency.groups.replica_strategy import RankWork, ReplicaStrategy
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec
from shardyard_worker.replicas.buffer_means import BufferMeans
from shardyard_worker.replicas.side_by_side import SideBySide
from shardyard_worker.replicas.spread_model import SpreadModel
from shardyard_worker.training.clipping import NORM_EPS
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")

WEIGHT, SQUARE_NORM, LEAVE, PUBLISH, ODD = range(5)
"""ODD: above 0 if gradients are not finite."""
FACTS: Final = 5
"""Behind them each member has a place for what it says of ODD, and then each one for its part of its batch's loss."""


def count_of_facts(members: int) -> int:
    return FACTS + 2 * members


@dataclass(frozen=True)
class Gradients:
    """Those of this worker's parameters at a step, and its buffers after it; None: they stay."""

    step: int
    tensors: list[torch.Tensor | None]
    buffers: list[torch.Tensor] | None


class SpreadStrategy(ComputedTogether, ReplicaStrategy):
    """`model`: what this worker updates a part of."""

    computes_alone: ClassVar[bool] = False
    """Whether each member has batches of its own; else the members of a replica compute each batch together."""

    def __init__(self, trainer: Trainer, model: SpreadModel) -> None:
        ReplicaStrategy.__init__(self, trainer, model.replica)
        self._model = model
        self._members: SideBySide | None = None
        self._buffer_means = BufferMeans(model.replica.buffers)
        self._gradients: Gradients | None = None
        self._rows: list[RankWork] = []
        """Of the step at hand, what this member pushes when it knows whether it counts."""
        self._facts: list[float] = []
        """Of the last step that this worker has taken, or was told of."""

    # ---- the group

    @property
    def _inside(self) -> Collectives | None:
        return None if self._members is None else self._members.inside

    @property
    def publishes_to_change(self) -> bool:
        """Whether the next group may have other members, which begin with what the servers have."""
        return False

    def _connect(self, group: ReplicaGroup, place: int) -> None:
        before = self.replica
        self._collectives = Collectives(self._session, group, place, self._model.fingerprint)
        size = min(self._settings.workers_per_replica or len(group.members), len(group.members))
        self._members = members = SideBySide(self._collectives, size)
        self._begin_group(members)
        self.replica = self._publisher.replica = self._model.replica
        if self.replica is not before:
            self._replica_step = None
        self._buffer_means = BufferMeans(self.replica.buffers)
        members.begin_sums(self._settings, self.replica.targets)

    @abstractmethod
    def _begin_group(self, members: SideBySide) -> None:
        """Makes this worker's part of the model ready to compute with these members."""

    def _is_to_change(self, collectives: Collectives) -> bool:
        """Whether the group ends after this step."""
        return self._session.replica_generation > collectives.group.generation

    @abstractmethod
    def _end_group(self) -> None:
        """Ends what `_begin_group` has begun."""

    def _copy_from(self, group: ReplicaGroup) -> None:
        """A member that lacks the group's step has kept its gradients (rule D7), and takes the step by the facts of the
        donor. Then those without a replica get it from members with the same variables."""
        members = self._members
        assert members is not None
        with self._session.wait_registry.over(lambda: "the replica of another worker"):
            said = torch.zeros(2, members.all.size)
            said[0, members.all.place] = self._replica_step is None
            said[1, members.all.place] = self._replica_step not in (None, group.step)
            members.all.wait(members.all.sum(said))
            if said[1].any():
                self._take_facts(members.all, group)
            without = members.with_same_variables(said[0].bool().tolist())
            takers = [place for place, lacks in enumerate(without) if lacks]
            if takers:
                self._copy_replica(members.beside, without.index(False), takers)
        if self._replica_step is None:
            log.info("took its part of a replica of step %s from another worker", group.step)
        self._gradients = None

    def _take_facts(self, collectives: Collectives, group: ReplicaGroup) -> None:
        assert group.donor is not None
        assert group.step is not None
        gives = collectives.place == group.donor
        facts = torch.tensor(self._facts if gives else [0.0] * FACTS, dtype=torch.float64)
        others = [place for place in range(collectives.size) if place != group.donor]
        collectives.wait(collectives.give(facts, group.donor, others))
        if self._replica_step not in (None, group.step):
            if self._gradients is None or self._gradients.step != group.step - 1:
                raise Internal(f"a member at step {self._replica_step} in a group of step {group.step}")
            self._apply(self._gradients, facts.tolist())
            log.info("takes step %d with the gradients that it has kept", group.step - 1)
        self._facts = facts.tolist()

    def _load_from_servers(self, published: int | None) -> int:
        self._gradients = None
        step = super()._load_from_servers(published)
        self._model.loaded()
        give_back_freed()
        return step

    def _load(self, step: int | None) -> None:
        is_alone = self._members is not None and self._members.inside.size == 1
        if not self._model.loads_whole and not is_alone:
            super()._load(step)
            return
        read = self._trainer.router.optimizer.read_parts
        with self._model.whole() as whole:
            self.replica.load(lambda parts: read([parts, whole], step))
        self._model.is_whole = is_alone  # it was in reserve, and all steps were taken; or it has all variables

    def _load_whole(self, step: int) -> None:
        with self._model.whole() as whole:
            self._trainer.router.optimizer.read_parts([whole], step)

    def _leave_sums(self, collectives: Collectives | None) -> None:
        members, self._members = self._members, None
        self._leave_step()
        self._end_group()
        if members is not None:
            members.leave()
        elif collectives is not None:
            collectives.leave()

    def _forget_step(self) -> None:
        self._rows = []
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        super()._forget_step()
        self._buffer_means.clear()

    @property
    def _share(self) -> tuple[int, int]:
        assert self._members is not None
        return self._members.beside.place, self._members.beside.size

    def has_moved(self) -> bool:
        if super().has_moved():
            return True
        self._complete()
        return False

    def catch_up(self, at_least: int) -> None:
        """As of the base. This worker computes no more, so the data has ended."""
        super().catch_up(at_least)
        self._complete()

    def end_data(self, end: int) -> None:
        """As of the base. The checkpoint with the last step may have been there before this worker waited for it."""
        super().end_data(end)
        self._complete()

    def _complete(self) -> None:
        """Loads the values of all variables, if the servers have this step, into the script's model."""
        step = self.versions.current
        if step is not None and step == self._publisher.step and not self._model.is_whole:
            with contextlib.suppress(MapChanged):
                self._load_newest(self._load_whole, step)
                self._model.is_whole = True
                give_back_freed()

    def leave(self, groups: tuple[tuple[float, ...], ...]) -> None:  # noqa: ARG002
        """Gives the servers the state with the other members, which cannot go on without this one."""
        step, collectives = self.versions.current, self._collectives
        if self._session.drain.hands_over or step is None or collectives is None or step == self._publisher.step:
            return
        with contextlib.suppress(MapChanged):  # another member has left before, or died
            self._publisher.publish(step, collectives, self._share)

    # ---- a step

    def _counted(self, name: PushName, rank: Rank, sending: StepInput | None) -> StepInput | None:  # noqa: ARG002
        """Whether gradients are finite is looked at once, by all members."""
        return sending

    def _push(
        self,
        name: PushName,
        sending: StepInput | None,
        upcoming: Upcoming | None,
        pull: PullSpec | None,
    ) -> ExchangeResult:
        """Takes the step with this worker's last rank, if the gradients of all members are there. Raises GroupLost."""
        members, step, session = self._members, self.versions.current, self._session
        if members is None or self._lost is not None:
            raise self._lost or GroupLost("this worker has left its replica group")
        assert step is not None
        with session.wait_registry.over(lambda: f"step {step} of the other members"):
            self._add_buffers(sending)
            self._keep_rows(name, sending)
            if pull is None:
                self.loss = self._loss_of_batch(members.inside)
                return ExchangeResult()
            said = [0.0] * count_of_facts(members.all.size)
            self._gradients = gradients = self._added_up(members, step, said)
            said[LEAVE] = float(self._is_to_change(members.all))
            said[PUBLISH] = float(session.is_to_publish)
            facts = self._sum(members.all, said)
            if not self._counts(facts):
                log.warning("step %d changes nothing: the gradient is not finite", step)
                self._report(facts, members.all, (name, sending), gradients)
            answer = self._push_kept_rows(facts, upcoming, pull)
        self._apply(gradients, facts[:FACTS])
        self.loss = self._loss_in(facts, members)
        if facts[PUBLISH] or (facts[LEAVE] and self.publishes_to_change):
            self._publisher.publish(step + 1, members.all, self._share)
        self._is_to_leave = bool(facts[LEAVE])
        return answer

    def _counts(self, facts: Sequence[float]) -> bool:
        """Whether a step with these facts changes variables and rows."""
        return not facts[ODD] or self._settings.nonfinite is NonFinite.ALLOW

    def _report(self, facts: Sequence[float], collectives: Collectives, last: RankWork, gradients: Gradients) -> None:
        """One member reports which work is not finite, before rows are pushed empty (rule A4)."""
        odd = facts[FACTS : FACTS + collectives.size]
        name, sending = next((each for each in self._rows if has_odd_rows(each[1])), last)
        if collectives.place == odd.index(max(odd)) and sending is not None:
            assert self.versions.current is not None
            self._trainer.pushes.may_count(name, self._reported(sending, gradients), self.versions.current)

    # ---- rows of tables

    @property
    def _pushes_rows(self) -> bool:
        """Whether the rows of this worker's ranks are pushed by it, and by no other member of its replica."""
        assert self._members is not None
        return self.computes_alone or self._members.inside.place == 0

    def _keep_rows(self, name: PushName, sending: StepInput | None) -> None:
        """Keeps those of a rank until it is known whether the step counts."""
        if self._has_rows and self._pushes_rows:
            if sending is not None and sending.rows is not None:  # they were computed times the weight
                sending.rows.unscaled(torch.tensor(sending.weight, dtype=torch.float64))
            self._rows.append((name, sending))

    def _push_kept_rows(self, facts: Sequence[float], upcoming: Upcoming | None, pull: PullSpec) -> ExchangeResult:
        """Returns when the servers have the rows of all ranks. Raises GroupLost."""
        if not self._has_rows:
            return ExchangeResult()
        kept, self._rows = self._rows, []
        if not self._counts(facts):
            kept = [(name, None) for name, _ in kept]
        return ExchangeResult(ahead=self._push_rows(kept, upcoming, pull).ahead)

    def _add_buffers(self, sending: StepInput | None) -> None:
        """Those that a rank's forward has made."""
        buffers = self.replica.buffers
        if sending is not None and buffers:
            given = [sending.tensors[at] for at in self.replica.places[len(self.replica.targets) :]]
            own = [None if one is None else each.found for one, each in zip(given, buffers, strict=True)]
            self._buffer_means.add(own, sending.weight)

    def _added_up(self, members: SideBySide, step: int, said: list[float]) -> Gradients:
        """The gradients and buffers of all replicas. Writes the weight, the square norm, the loss and whether gradients
        are finite into `said`. Raises GroupLost."""
        place, count = members.all.place, members.all.size
        if self.computes_alone or members.inside.place == 0:
            said[WEIGHT] = self._weight
        said[FACTS + count + place] = self._own_loss if self._passes else 0.0
        self._before_sums(members.all)
        tensors, buffers = members.sum(self._model.gradients), None
        if self.replica.buffers:
            self._buffer_means.add_up(members.all if self.computes_alone else members.beside)
            buffers = self._buffer_means.means()
        norm = square_norm(self._apart(tensors, members))
        if members.beside.place == 0:
            said[SQUARE_NORM] = norm
        are_rows_odd = any(has_odd_rows(each) for _, each in self._rows)
        if are_rows_odd or not math.isfinite(norm):
            # most often because of the rows or the loss of a batch, whose member reports it
            said[ODD] = said[FACTS + place] = 1.0 + (are_rows_odd or self._has_odd_loss)
        self._forget_gradients()
        return Gradients(step, tensors, buffers)

    def _before_sums(self, collectives: Collectives) -> None:
        """This worker's ranks were computed."""

    def _apart(self, gradients: Sequence[torch.Tensor | None], members: SideBySide) -> Sequence[torch.Tensor | None]:  # noqa: ARG002
        """Those of which no other member of this replica speaks."""
        return gradients

    def _sum(self, collectives: Collectives, said: list[float]) -> list[float]:
        """The facts of all members. Returns when all have called this."""
        found = torch.tensor(said, dtype=torch.float64)
        collectives.wait(collectives.sum(found))
        facts: list[float] = found.tolist()
        return facts

    def _loss_in(self, facts: Sequence[float], members: SideBySide) -> float:
        """The loss of the last batch, of which the members of this replica say their parts."""
        return sum(facts[FACTS + members.all.size :][members.places])

    def _apply(self, gradients: Gradients, facts: list[float]) -> None:
        """Takes the step. `facts`: of all members, added up."""
        if facts[WEIGHT]:
            self.replica.keep_buffers(gradients.buffers)
            if self._counts(facts):
                self._scale(gradients.tensors, facts)
                self.replica.step(gradients.tensors)
        self._facts = facts
        self._gradients = None
        self._replica_step = gradients.step + 1

    @torch.no_grad()
    def _scale(self, gradients: Sequence[torch.Tensor | None], facts: Sequence[float]) -> None:
        """Divides the gradients, so that they are of the mean over the samples of the step, and clips them."""
        limit, weight = self._settings.clip.norm, facts[WEIGHT]
        scale = 1.0 / weight
        if limit:
            scale *= min(1.0, limit / (facts[SQUARE_NORM] ** 0.5 / weight + NORM_EPS))
        for each in gradients:
            if each is not None and scale != 1.0:
                each.mul_(scale)

    def _reported(self, sending: StepInput, gradients: Gradients) -> StepInput:
        """With the gradients of this worker's parameters, for a report."""
        tensors = [*sending.tensors]
        for place, each in zip(self.replica.places, gradients.tensors, strict=False):
            tensors[place] = each
        return replace(sending, tensors=tensors)


def has_odd_rows(sending: StepInput | None) -> bool:
    """Whether gradients of its rows are not finite."""
    rows = None if sending is None else sending.rows
    return rows is not None and not all(bool(each.isfinite().all()) for each in rows.tensors)
