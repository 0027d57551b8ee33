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

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from shardyard.domain import errors
from shardyard.domain.consistency import NonFinite
from shardyard.domain.ids import Rank, Token
from shardyard.domain.push_names import PushName
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard.wire import common_messages, lease_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.consistency.logical_ranks import LogicalRanks, RankPosition
from shardyard_worker.consistency.step_versions import StepVersions
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec
from shardyard_worker.replicas.buckets import buckets_of
from shardyard_worker.replicas.buffer_means import BufferMeans
from shardyard_worker.replicas.collectives import Collectives
from shardyard_worker.replicas.group_store import GroupLost
from shardyard_worker.replicas.publishing import Publisher
from shardyard_worker.replicas.replica import Replica
from shardyard_worker.replicas.rows_ahead import RowsAhead
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")

_WEIGHT, _OVERFLOWS, _CHANGED, _LEAVE, _PUBLISH = range(5)
_FACTS: Final = 5


@contextlib.contextmanager
def _while_newest() -> Iterator[None]:
    """Raises GroupLost if a later group has this worker's ranks."""
    try:
        yield
    except errors.StaleToken as error:
        raise GroupLost(f"a later replica group has this worker's ranks: {error.what}") from error


class GroupRanks(LogicalRanks):
    """The ranks of this worker's place in its group. They are not leased one by one."""

    def hold(self, ranks: tuple[Rank, ...], step: int, generation: int) -> None:
        self.held = {rank: RankPosition(Token(generation), step, step) for rank in ranks}

    def open_rows(self) -> None:
        """Writes the group's generation to every partition as the token of these ranks. From then on pushes of former
        groups are refused. Raises StaleToken."""
        keys = {rank: key for rank in self.held for key in self._keys_of(rank)}
        marks = self._trainer.router.open_sources([(key, self.held[rank].token) for rank, key in keys.items()])
        for rank, key in keys.items():
            self.held[rank].highest = max(mark.next for mark in marks[key])

    def announce_until(self, rank: Rank) -> int:  # noqa: ARG002
        return 0

    def is_offered(self) -> bool:
        return False


class ReplicaVersions(StepVersions):
    """Versions that this worker makes itself."""

    def __init__(self, trainer: Trainer, ranks: LogicalRanks, strategy: MirroredStrategy) -> None:
        super().__init__(trainer, ranks)
        self._strategy = strategy

    def refresh_ranks(self) -> None:
        """Ranks change with the group only."""

    def find_work(self) -> None:
        self._strategy.take_place()

    def catch_up(self, at_least: int) -> None:  # noqa: ARG002 - replicas are at one step
        self._strategy.take_place()

    def await_ranks(self) -> None:
        self._strategy.take_place()

    def await_step(self) -> None:
        """Other ranks of this worker are due at this step."""
        self.load_again()

    def begin_at(self, step: int) -> None:
        self._hold(step, None)

    def load_again(self) -> None:
        self._strategy.replica.put_back_buffers()
        if self._trainer.link.tables is not None:
            self._trainer.link.tables.arrive(self._rows)


class MirroredStrategy(SyncStrategy):
    """For job.strategy multi_worker_mirrored."""

    ranks: GroupRanks
    versions: ReplicaVersions

    def __init__(self, trainer: Trainer, replica: Replica) -> None:
        super().__init__(trainer, lambda trainer, ranks: ReplicaVersions(trainer, ranks, self), GroupRanks)
        self.replica = replica
        self._settings, ranks = trainer.session.job_settings, trainer.session.logical_ranks
        self._buckets = buckets_of(self._settings, replica.targets, _FACTS + len(replica.targets), ranks)
        self._has_rows = trainer.link.tables is not None
        self._rows_ahead = RowsAhead(trainer)
        self._buckets.early_weight = self._early_weight
        self._collectives: Collectives | None = None
        self._left = 0
        """The generation of the newest group that this worker was in."""
        self._replica_step: int | None = None
        """The step of the replica; None: it has no values yet."""
        self._buffer_means = BufferMeans(replica.buffers, ranks if self._settings.deterministic else None)
        self._said = [0.0] * (_FACTS + len(replica.targets))
        """What this worker says of the step at hand: facts, and for each parameter how many ranks have a gradient."""
        self._is_to_leave = False
        self._publisher = Publisher(trainer, replica)
        self.weight_of_work: Callable[[], float | None] = lambda: None
        """The samples of the work at hand; None: not known before the step."""

    # ---- the group

    def take_place(self) -> None:
        """Returns when this worker has a place in the newest group, and its replica stands at the group's step. A step
        that was begun, and is not ended, ends the group."""
        self.check_mode()
        while self._collectives is None or self._is_to_leave or self._buckets.has_begun:
            self._leave_group()
            try:
                self._join(self._ask())
            except MapChanged as error:
                log.info("has no place in the replica group: %s", error)
                self._follow_map()

    def _ask(self) -> ReplicaGroup:
        session = self._session
        request = wire.JoinReplicaGroupRequest(
            caller=common_messages.caller_to_wire(session.caller), left=self._left, step=self._replica_step
        )
        reply = session.ask(methods.JOIN_REPLICA_GROUP, request)
        with session.wait_registry.over(lambda: f"the next replica group: {reply.waiting_for}"):
            while reply.retry_ms:
                self._trainer.router.pause(reply.retry_ms)
                session.check_waiting()
                if self._trainer.is_behind:
                    self._trainer.follow_map()
                reply = session.ask(methods.JOIN_REPLICA_GROUP, request)
        return lease_messages.replica_group_from_wire(reply.group)

    def _join(self, group: ReplicaGroup) -> None:
        place = group.place_of(self._session.caller.incarnation)
        assert place is not None, group
        if self._left <= group.void_until:
            self._replica_step = None
        self._left = group.generation
        self._is_to_leave = False
        self._collectives = Collectives(self._session, group, place, self._buckets.fingerprint)
        if group.step is None:
            step = self._load_from_servers()
        else:
            step = group.step
            self._copy_from(group)
        self._replica_step = step
        self._publisher.step = step if group.step is None else None
        self.replica.keep_buffers()
        self._buckets.join(self._collectives)
        self._buffer_means.join(self._collectives)
        self.ranks.hold(group.ranks_at(place, self._session.logical_ranks), step, group.generation)
        if self._has_rows:
            with _while_newest():
                self.ranks.open_rows()
        self.versions.begin_at(step)
        log.info("has place %d of %d in replica group %d, at step %d", place, len(group.members), self._left, step)

    def _load_from_servers(self) -> int:
        """Loads what the servers have. Returns its step."""
        trainer, at_least = self._trainer, 0
        while True:
            try:
                step = trainer.pull_step(at_least)
                assert step is not None
                trainer.values.complete()
                self.replica.set_state(trainer.router.optimizer.read(range(len(trainer.variables)), step))
                return step
            except MapChanged:
                trainer.follow_map()
            except errors.NotFound as error:  # servers keep former values, but not the former state
                if "newest" not in error.facts:
                    raise
                at_least = int(error.facts["newest"])

    def _copy_from(self, group: ReplicaGroup) -> None:
        """The donor gives its replica to all that have another step. All take part, since the operation is of the whole
        group."""
        collectives = self._collectives
        assert collectives is not None
        assert group.donor is not None
        with self._session.wait_registry.over(lambda: "the replica of another worker"):
            stale = torch.tensor([float(self._replica_step != group.step)])
            collectives.wait(collectives.sum(stale))
            if not float(stale):
                return
            packed = self.replica.packed()
            for work in [collectives.give(each, group.donor) for each in packed]:
                collectives.wait(work)
        if self._replica_step != group.step:
            self.replica.unpack(packed)
            log.info("took the replica of worker %d, of step %d", group.members[group.donor], group.step)

    def _leave_group(self) -> None:
        collectives, self._collectives = self._collectives, None
        self._buckets.leave()
        self.ranks.held = {}
        self.versions.current = None
        self._is_to_leave = False
        if collectives is not None and collectives.leave():
            self._buckets.renew()
            self._buffer_means.renew()
        self._drop_sums()
        self._rows_ahead.drop()
        if self._replica_step is not None:
            self.replica.put_back_buffers()  # a forward may have changed them

    def _drop_sums(self) -> None:
        self._buckets.clear()
        self._buffer_means.clear()
        self._said = [0.0] * (_FACTS + len(self.replica.targets))

    # ---- what the base asks

    @property
    def on_standby(self) -> bool:
        return False

    def begin(self) -> None:
        self.take_place()

    def _follow_map(self) -> None:
        """The group or the map has changed."""
        if self._trainer.is_behind:
            self._trainer.follow_map()
            self._publisher.forget()
        self.check_mode()
        self._is_to_leave = True
        self.versions.current = None

    def has_moved(self) -> bool:
        """As of the base. While this worker waits for a checkpoint, it gives the servers the state for it."""
        is_wanted, step = self._session.is_to_publish, self.versions.current
        assert self._collectives is not None
        assert step is not None
        if not self._trainer.is_behind:
            try:
                self._publisher.offer(step, self._collectives, is_wanted=is_wanted)
                return False
            except MapChanged as error:
                log.info("the state of step %s is published again: %s", self._replica_step, error)
        self._follow_map()
        self.take_place()
        return True

    def on_rows_version_passed(self, error: errors.NotFound) -> None:
        super().on_rows_version_passed(error)
        self._is_to_leave = True

    def leave(self, groups: tuple[tuple[float, ...], ...]) -> None:
        """Gives the servers the state, unless all members have done that together at the end of the data: others may
        train on, so that nobody can be waited for."""
        super().leave(groups)
        step = self._replica_step
        if self._session.drain.hands_over or step is None or step == self._publisher.step:
            return
        may_be_void = self._has_rows and (self._collectives is None or self._trainer.is_behind)
        self._leave_group()
        if may_be_void:  # the servers may have gone back from its step
            return
        with contextlib.suppress(errors.StaleGeneration):  # others are in the next group, and publish
            self._publisher.publish_alone(step, self._left)

    def close(self) -> None:
        self._leave_group()
        self._buckets.close()
        self._rows_ahead.close()

    # ---- a step

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
            with _while_newest():
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
        if pull is None:
            return self._push_rows(name, sending) if self._has_rows else ExchangeResult()
        self._buckets.send_first()
        ahead = self._trainer.pushes.prefetch_rows(pull.number, upcoming)
        answer = self._push_rows(name, sending) if self._has_rows else ExchangeResult()
        if ahead is not None:
            self._rows_ahead.begin(ahead, pull.number)
        self._take_step(collectives, gradients, weight, name, sending)
        answer.ahead = self._rows_ahead.take()
        return answer

    def _push_rows(self, name: PushName, sending: StepInput | None) -> ExchangeResult:
        """Returns when all servers have recorded the rank's rows. After that, and not before, this member says in the
        sums that it has taken part: so a step that any member has taken has all its rows (rule D6)."""
        rows = None if sending is None else replace(sending, tensors=[None] * len(sending.tensors))
        with _while_newest():
            return self._trainer.router.push(self._trainer.pushes.build(name, rows))

    def _take_step(
        self,
        collectives: Collectives,
        local: Sequence[torch.Tensor | None],
        weight: float,
        name: PushName,
        sending: StepInput | None,
    ) -> None:
        buckets, session, said = self._buckets, self._session, self._said
        step = self.versions.current
        assert step is not None
        said[_LEAVE] = float(session.replica_generation > collectives.group.generation)
        said[_PUBLISH] = float(session.is_to_publish)
        with session.wait_registry.over(lambda: f"step {step} of the other replicas"):
            if self.replica.buffers:
                self._buffer_means.add_up(collectives)
            facts = self._sum(said)
            if facts[_CHANGED]:
                buckets.overlaps = False
                buckets.clear()
                buckets.add(local, weight)
                facts = self._sum(said)
        self._apply(step, name, sending, facts)
        self._drop_sums()
        self._replica_step = step + 1
        if facts[_PUBLISH]:
            self._publisher.publish(step + 1, collectives)
        self._is_to_leave = bool(facts[_LEAVE])

    def _sum(self, said: list[float]) -> list[float]:
        """Sums the gradients over all members, and returns the facts of all."""
        buckets = self._buckets
        buckets.facts.copy_(torch.tensor(said))
        buckets.send()
        buckets.await_sums()
        found: list[float] = buckets.facts.tolist()
        return found

    def _apply(self, step: int, name: PushName, sending: StepInput | None, facts: Sequence[float]) -> None:
        """Takes the step with the sums."""
        replica, weight = self.replica, facts[_WEIGHT]
        if weight:
            means = self._buckets.mean(weight)
            replica.keep_buffers(self._buffer_means.means())
        if not weight or facts[_OVERFLOWS] or not self._is_finite(step, name, sending):
            return
        gradients = [mean if present else None for mean, present in zip(means, facts[_FACTS:], strict=True)]
        clipper = self._trainer.pushes.clipper
        if clipper is not None:
            clipper.clip([*gradients, *(None for _ in replica.buffers)])
        replica.step(gradients)

    def _is_finite(self, step: int, name: PushName, sending: StepInput | None) -> bool:
        """Whether the mean gradient is finite, or counts anyway. If not, the members whose gradients are not report
        them, and nobody takes the step. With tables, each rank's gradients were looked at before."""
        if self._has_rows or self._settings.nonfinite is NonFinite.ALLOW or self._buckets.are_finite():
            return True
        log.warning("step %d changes nothing: the mean gradient is not finite", step)
        if sending is not None:
            self._trainer.pushes.may_count(name, sending, step)
        return False
