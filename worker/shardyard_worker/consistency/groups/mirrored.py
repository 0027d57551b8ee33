"""Synchronous steps of replicas: gradients are summed by an all-reduce, and every worker takes the step itself
(docs/internals/ledger.md, rules D1 to D6).

A step is a synchronous job's step: its logical ranks, their samples and their seeds are the same. But gradients of
variables do not go to the servers. Each member of the newest replica group computes the ranks of its place; when the
sum over all members is there, each takes the step. A member that goes away ends the group. The others ask the
coordinator for the next one, and go on from the newest step that any of them has taken.

Rows of tables stay on the servers. Each rank's work also makes a push that has only its rows, under the rank's name.
Rows of step t are looked up at version t, as in other synchronous jobs.

With the gradients the members sum a few facts, so that all of them learn in the same step that a checkpoint
wants the state, or that the group is to be formed anew. No other message is needed for that.

Owns: this worker's place in the newest group, and the step of its replica. Must not know: how tensors are summed, which
work belongs to a rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import torch

from shardyard.domain.consistency import NonFinite
from shardyard.domain.ids import Rank
from shardyard.domain.push_names import PushName
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.group_store import GroupLost, while_newest
from shardyard_worker.consistency.groups.replica_strategy import ReplicaStrategy
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec
from shardyard_worker.replicas.buckets import buckets_of
from shardyard_worker.replicas.buffer_means import BufferMeans
from shardyard_worker.replicas.replica import Replica
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")

_WEIGHT, _OVERFLOWS, _CHANGED, _SUSPECT, _LEAVE, _PUBLISH = range(6)
_FACTS: Final = 6


class MirroredStrategy(ReplicaStrategy):
    """For job.strategy mirrored and multi_worker_mirrored."""

    def __init__(self, trainer: Trainer, replica: Replica) -> None:
        super().__init__(trainer, replica)
        ranks = trainer.session.logical_ranks
        self._buckets = buckets_of(self._settings, replica.targets, _FACTS + len(replica.targets), ranks)
        self._buckets.early_weight = self._early_weight
        self._buffer_means = BufferMeans(replica.buffers, ranks if self._settings.deterministic else None)
        self._said = [0.0] * (_FACTS + len(replica.targets))
        """What this worker says of the step at hand: facts, and for each parameter how many ranks have a gradient."""

    # ---- the group

    def _connect(self, group: ReplicaGroup, place: int) -> None:
        self._collectives = Collectives(self._session, group, place, self._buckets.fingerprint)
        self._buckets.join(self._collectives)
        self._buffer_means.join(self._collectives)

    def _copy_from(self, group: ReplicaGroup) -> None:
        """The donor gives its replica to all that have another step."""
        collectives, donor = self._collectives, group.donor
        assert collectives is not None
        assert donor is not None
        is_stale = self._replica_step != group.step
        with self._session.wait_registry.over(lambda: "the replica of another worker"):
            stale = torch.zeros(collectives.size)
            stale[collectives.place] = is_stale
            collectives.wait(collectives.sum(stale))
            self._copy_replica(collectives, donor, stale.nonzero().flatten().tolist())
        if is_stale:
            log.info("took the replica of worker %d, of step %d", group.members[donor], group.step)

    def _leave_sums(self, collectives: Collectives | None) -> None:
        self._buckets.leave()
        if collectives is not None and collectives.leave():
            self._buckets.renew()
            self._buffer_means.renew()
        self._drop_sums()

    def _drop_sums(self) -> None:
        self._buckets.clear()
        self._buffer_means.clear()
        self._said = [0.0] * (_FACTS + len(self.replica.targets))

    def close(self) -> None:
        super().close()
        self._buckets.close()

    # ---- a step

    @property
    def _has_begun(self) -> bool:
        return self._buckets.has_begun

    def _early_weight(self) -> float | None:
        """The weight of the work whose gradients are being computed, if they may be sent at once: each member has one
        rank, so that it can send them again. Then all must take the step, so the job does not stop before it."""
        trainer, collectives, step = self._trainer, self._collectives, self.versions.current
        if collectives is None or step is None or collectives.size != self._session.logical_ranks:
            return None
        if trainer.accumulates or trainer.accumulates_by_hand:
            return None
        if self.due() is None or not self._session.step_barrier.may_begin(step):
            return None
        return self.weight_of_work()

    def _counted(self, name: PushName, rank: Rank, sending: StepInput | None) -> StepInput | None:
        """Without tables, whether gradients are finite is looked at once, in their mean. With tables, a rank's
        gradients of variables and rows count both, or not at all."""
        if self._has_rows:
            with while_newest():
                return super()._counted(name, rank, sending)
        return sending and self._trainer.pushes.of_rank(rank, sending)

    def _push(
        self,
        name: PushName,
        sending: StepInput | None,
        upcoming: Upcoming | None,
        pull: PullSpec | None,
    ) -> ExchangeResult:
        """Adds a rank's gradients. With the last of this worker, takes the step. Raises GroupLost."""
        collectives = self._collectives
        if collectives is None:
            raise GroupLost("this worker has left its replica group")
        count = len(self.replica.targets)
        gradients: Sequence[torch.Tensor | None] = [None] * count
        said, weight = self._said, 0.0
        if sending is not None:
            gradients, weight = sending.tensors[:count], sending.weight
            said[_OVERFLOWS] += sending.overflow
            self._buffer_means.add(sending.tensors[count:], weight)
        said[_CHANGED] += self._buckets.changed(gradients)
        said[_WEIGHT] += weight
        for at, gradient in enumerate(gradients, _FACTS):
            said[at] += gradient is not None
        self._buckets.add(gradients, weight)
        if pull is not None:
            said[_LEAVE] = float(self._session.replica_generation > collectives.group.generation)
            said[_PUBLISH] = float(self._session.is_to_publish)
            with self._session.wait_registry.over(lambda: f"step {self.versions.current} of the other replicas"):
                self._send()
        answer = ExchangeResult()
        if self._has_rows:
            answer = self._push_rows([(name, sending)], upcoming, pull)
        if pull is not None:
            self._take_step(collectives, gradients, weight, name, sending)
        return answer

    def _take_step(
        self,
        collectives: Collectives,
        local: Sequence[torch.Tensor | None],
        weight: float,
        name: PushName,
        sending: StepInput | None,
    ) -> None:
        buckets, step = self._buckets, self.versions.current
        assert step is not None
        with self._session.wait_registry.over(lambda: f"step {step} of the other replicas"):
            if self.replica.buffers:
                self._buffer_means.add_up(collectives)
            facts = self._await_sums()
            if facts[_CHANGED]:
                buckets.overlaps = False
                buckets.clear()
                buckets.add(local, weight)
                self._send()
                facts = self._await_sums()
        self._apply(step, name, sending, facts)
        self._drop_sums()
        self._replica_step = step + 1
        if facts[_PUBLISH]:
            self._publisher.publish(step + 1, collectives, self._share)
        self._is_to_leave = bool(facts[_LEAVE])

    def _send(self) -> None:
        """Begins to sum the gradients, and what this worker says, over all members."""
        self._said[_SUSPECT] = float(self._buckets.is_suspect)
        self._buckets.facts.copy_(torch.tensor(self._said))
        self._buckets.send()

    def _await_sums(self) -> list[float]:
        """Returns what all members say, when the sums are there."""
        self._buckets.await_sums()
        found: list[float] = self._buckets.facts.tolist()
        return found

    def _apply(self, step: int, name: PushName, sending: StepInput | None, facts: Sequence[float]) -> None:
        """Takes the step with the sums."""
        replica, weight = self.replica, facts[_WEIGHT]
        if weight:
            means = self._buckets.mean(weight)
            replica.keep_buffers(self._buffer_means.means())
        if not weight or facts[_OVERFLOWS] or not self._is_finite(step, name, sending, facts):
            return
        gradients = [mean if present else None for mean, present in zip(means, facts[_FACTS:], strict=True)]
        clipper = self._trainer.pushes.clipper
        if clipper is not None:
            clipper.clip([*gradients, *(None for _ in replica.buffers)])
        replica.step(gradients)

    def _is_finite(self, step: int, name: PushName, sending: StepInput | None, facts: Sequence[float]) -> bool:
        """Whether the mean gradient is finite, or counts anyway. If not, the members whose gradients are not report
        them, and nobody takes the step. The mean is looked at if a member has seen a number that may be the cause. With
        tables, each rank's gradients were looked at before."""
        if self._has_rows or self._settings.nonfinite is NonFinite.ALLOW or not facts[_SUSPECT]:
            return True
        if self._buckets.are_finite():
            return True
        log.warning("step %d changes nothing: the mean gradient is not finite", step)
        if sending is not None:
            self._trainer.pushes.may_count(name, sending, step)
        return False
