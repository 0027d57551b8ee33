"""A strategy whose workers compute together: this worker's place in the newest group (docs/internals/ledger.md, rule
D1).

The coordinator forms groups of workers that take steps together. A member that goes away ends the group. The others ask
the coordinator for the next one, and go on in it.

Owns: the membership of groups. Must not know: what the members compute, where variables are.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable

from shardyard.domain.ids import Rank, Token
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard.wire import common_messages, lease_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.consistency.logical_ranks import LogicalRanks, RankPosition
from shardyard_worker.consistency.step_versions import StepVersions
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.training.trainer import Trainer

log = logging.getLogger("shardyard.worker")


class GroupRanks(LogicalRanks):
    """The ranks of this worker's place in its group. They are not leased one by one."""

    def hold(self, ranks: tuple[Rank, ...], step: int, generation: int) -> None:
        self.held = {rank: RankPosition(Token(generation), step, step) for rank in ranks}

    def open_all(self) -> dict[Rank, int]:
        """Writes the group's generation as the token of these ranks to every partition. From then on pushes of former
        groups are refused. Returns the lowest next step of each rank over all partitions. Raises StaleToken."""
        keys = {rank: key for rank in self.held for key in self._keys_of(rank)}
        marks = self._trainer.router.open_sources([(key, self.held[rank].token) for rank, key in keys.items()])
        for rank, key in keys.items():
            self.held[rank].highest = max(mark.next for mark in marks[key])
        return {rank: min(mark.next for mark in marks[key]) for rank, key in keys.items()}

    def announce_until(self, rank: Rank) -> int:  # noqa: ARG002
        return 0

    def is_offered(self) -> bool:
        return False


class GroupStrategy(SyncStrategy):
    ranks: GroupRanks

    def __init__(self, trainer: Trainer, versions: Callable[[Trainer, LogicalRanks], StepVersions]) -> None:
        super().__init__(trainer, versions, GroupRanks)
        self._settings = trainer.session.job_settings
        self._collectives: Collectives | None = None
        self._left = 0
        """The generation of the newest group that this worker was in."""
        self._is_to_leave = False
        self.weight_of_work: Callable[[], float | None] = lambda: None
        """The samples of the work at hand, while its last batch is computed; None: not known before the step."""
        self.weight_of_batch: Callable[[], float | None] = lambda: None
        """The share of the batch at hand in the samples of its work; None: no work is at hand."""

    def take_place(self) -> None:
        """Returns when this worker has a place in the newest group, and is ready for its next step. A step that was
        begun, and is not ended, ends the group."""
        self.check_mode()
        while self._collectives is None or self._is_to_leave or self._has_begun:
            self._leave_group()
            try:
                self._join(self._ask())
            except MapChanged as error:
                log.info("has no place in the group: %s", error)
                self._follow_map()

    def _ask(self) -> ReplicaGroup:
        found = next_group(self._trainer, self._left, self._step_of_replica, self._is_to_wait_on)
        assert found is not None
        return found

    def _is_to_wait_on(self) -> bool:
        """Raises ModeChanged."""
        if self._trainer.is_behind:
            self._trainer.follow_map()
            self.check_mode()
        return True

    @property
    def _step_of_replica(self) -> int | None:
        """The step of this worker's variables. None: it has no values yet, or they are on the servers."""
        return None

    @abstractmethod
    def _join(self, group: ReplicaGroup) -> None:
        """Takes its place in the group. Raises MapChanged."""

    @abstractmethod
    def _leave_group(self) -> None:
        """Ends the group for this worker, if it is in one."""

    @property
    def _has_begun(self) -> bool:
        """Whether sums of a step were begun, and the step was not ended."""
        return False

    def _ranks_at(self, group: ReplicaGroup, place: int) -> tuple[Rank, ...]:
        return group.ranks_at(place, self._session.logical_ranks, self._settings.workers_per_rank)

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
        self.check_mode()
        self._is_to_leave = True
        self.versions.current = None

    def close(self) -> None:
        self._leave_group()


def next_group(trainer: Trainer, left: int, step: int | None, is_to_wait_on: Callable[[], bool]) -> ReplicaGroup | None:
    """Asks for the group after number `left`, and waits until it is formed. `step`: that of this worker's variables;
    None: they are on the servers, or it has no values yet. None once `is_to_wait_on`, which is called regularly,
    returns False."""
    session = trainer.session
    request = wire.JoinReplicaGroupRequest(caller=common_messages.caller_to_wire(session.caller), left=left, step=step)
    reply = session.ask(methods.JOIN_REPLICA_GROUP, request)
    with session.wait_registry.over(lambda: f"the next replica group: {reply.waiting_for}"):
        while reply.retry_ms:
            trainer.router.pause(reply.retry_ms)
            session.check_waiting()
            if not is_to_wait_on():
                return None
            reply = session.ask(methods.JOIN_REPLICA_GROUP, request)
    return lease_messages.replica_group_from_wire(reply.group)
