"""A strategy whose variables are in the workers (docs/internals/ledger.md, rules D1 to D5).

The members of a group begin with the newest step that any of them has taken, or with what the servers have.

Owns: the step of this worker's variables. Must not know: what the members sum.
"""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardyard.domain import errors
from shardyard.domain.push_names import PushName
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.group_store import GroupLost, while_newest
from shardyard_worker.consistency.groups.group_strategy import GroupStrategy
from shardyard_worker.consistency.logical_ranks import LogicalRanks
from shardyard_worker.consistency.step_versions import StepVersions
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec, PushRequest
from shardyard_worker.replicas.publishing import Publisher
from shardyard_worker.replicas.replica import Replica
from shardyard_worker.rows.row_prefetch import RowPrefetch
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import Trainer, explain
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")

RankWork = tuple[PushName, StepInput | None]
"""What a rank pushes of a step. None: it does not count."""


class ReplicaVersions(StepVersions):
    """Versions that this worker makes itself."""

    def __init__(self, trainer: Trainer, ranks: LogicalRanks, strategy: ReplicaStrategy) -> None:
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


class ReplicaStrategy(GroupStrategy):
    """The base of `mirrored` and of `spread`. `replica`: the variables that this worker updates."""

    versions: ReplicaVersions

    def __init__(self, trainer: Trainer, replica: Replica) -> None:
        super().__init__(trainer, lambda trainer, ranks: ReplicaVersions(trainer, ranks, self))
        self.replica = replica
        self._replica_step: int | None = None
        """The step of the replica; None: it has no values yet."""
        self._publisher = Publisher(trainer, replica)
        self._has_rows = trainer.link.tables is not None

    # ---- the group

    @property
    def _step_of_replica(self) -> int | None:
        return self._replica_step

    def _join(self, group: ReplicaGroup) -> None:
        place = group.place_of(self._session.caller.incarnation)
        assert place is not None, group
        if self._left <= group.void_until or self._left != group.generation - 1:  # it was not in the one before
            self._replica_step = None
        self._left = group.generation
        self._is_to_leave = False
        self._connect(group, place)
        if group.donor is None:
            step = self._load_from_servers(group.step)
        else:
            assert group.step is not None
            step = group.step
            self._copy_from(group)
        self._replica_step = step
        self._publisher.step = step if group.donor is None else None
        self.replica.keep_buffers()
        self.ranks.hold(self._ranks_at(group, place), step, group.generation)
        if self._has_rows:
            with while_newest():
                self.ranks.open_all()
        self.versions.begin_at(step)
        log.info("has place %d of %d in replica group %d, at step %d", place, len(group.members), self._left, step)

    @abstractmethod
    def _connect(self, group: ReplicaGroup, place: int) -> None:
        """Connects the members of a group."""

    @abstractmethod
    def _copy_from(self, group: ReplicaGroup) -> None:
        """All members call this when the group continues from a step that one of them has. Then this one has it."""

    def _copy_replica(self, collectives: Collectives, donor: int, takers: Sequence[int]) -> None:
        """The member at place `donor` gives its replica to those at `takers`. All of these members call it, since the
        operations are of all."""
        if not takers:
            return
        has_part = collectives.place in (donor, *takers)
        packed = self.replica.packed() if has_part else self.replica.nothing_packed()
        for work in [collectives.give(each, donor, takers) for each in packed]:
            collectives.wait(work)
        if collectives.place in takers:
            self.replica.unpack(packed)

    @abstractmethod
    def _leave_sums(self, collectives: Collectives | None) -> None:
        """Ends the group's collectives, and drops what was summed."""

    @property
    def _share(self) -> tuple[int, int]:
        """This member's place among so many that have the same variables."""
        assert self._collectives is not None
        return self._collectives.place, self._collectives.size

    def _load_from_servers(self, published: int | None) -> int:
        """Loads what the servers have. `published`: its step, which they keep if rows are of the next one; None: that
        of their newest version. Returns its step."""
        while True:
            try:
                if published is None or not self._has_rows:
                    return self._load_newest(self._load, published or 0)
                self._trainer.await_version(published)
                self._load(None)  # rows alone, of the next step, do not change variables
                return published
            except MapChanged:
                self._trainer.follow_map()

    def _load_newest(self, load: Callable[[int], None], step: int = 0) -> int:
        """Loads that step or a later one, which all partitions have. Returns its number. Raises MapChanged."""
        while True:
            self._trainer.await_version(step)
            try:
                load(step)
            except errors.NotFound as error:  # only the newest state is there
                if "newest" not in error.facts:
                    raise
                step = int(error.facts["newest"])
            else:
                return step

    def _load(self, step: int | None) -> None:
        """Raises MapChanged, and NotFound (facts: newest)."""
        read = self._trainer.router.optimizer.read_parts
        self.replica.load(lambda parts: read([parts], step))

    # ---- rows of tables

    def _push_rows(self, work: Sequence[RankWork], upcoming: Upcoming | None, pull: PullSpec | None) -> ExchangeResult:
        """Pushes the rows of ranks. `pull`: with those of this member's last rank; then waits until servers have the
        rows of all ranks, and looks up those of the next step. So a step that any member takes has all its rows (rule
        D6). Raises GroupLost."""
        with while_newest():
            router, answer = self._trainer.router, ExchangeResult()
            ahead = None if pull is None else self._trainer.pushes.prefetch_rows(pull.number, upcoming)
            rows = None if pull is None else replace(pull, values=False)
            for name, sending in work[:-1]:
                router.push(self._rows_of(name, sending))
            if work:
                request = self._rows_of(*work[-1])
                request.ahead = ahead
                answer = router.push(request, rows)
            elif rows is not None:
                answer = router.pull_rows(rows, ahead)
            return answer if rows is None else self._await_rows(answer, rows, ahead)

    def _rows_of(self, name: PushName, sending: StepInput | None) -> PushRequest:
        """A push of a rank's rows alone. None: it counts without any."""
        rows = None if sending is None else replace(sending, tensors=[None] * len(sending.tensors))
        return self._trainer.pushes.build(name, rows)

    def _await_rows(self, answer: ExchangeResult, rows: PullSpec, ahead: RowPrefetch | None) -> ExchangeResult:
        """Waits until the servers have the rows of all ranks."""
        last = answer
        with self._session.wait_registry.over(lambda: f"rows of the other replicas: {explain(last)}"):
            while last.missing:
                assert self._collectives is not None
                self._collectives.check_begun()
                last = self._trainer.router.pull_rows(rows, ahead)
        return replace(answer, missing=(), ahead=last.ahead)

    # ---- the end of a group

    def _leave_group(self) -> None:
        collectives, self._collectives = self._collectives, None
        self.ranks.held = {}
        self.versions.current = None
        self._is_to_leave = False
        self._leave_sums(collectives)
        if self._replica_step is not None:
            self.replica.put_back_buffers()  # a forward may have changed them

    # ---- what the base asks

    def _follow_map(self) -> None:
        if self._trainer.is_behind:
            self._publisher.forget()
        super()._follow_map()

    def has_moved(self) -> bool:
        """As of the base. While this worker waits for a checkpoint, it gives the servers the state for it."""
        if not self._trainer.is_behind:
            try:
                self._offer()
                return False
            except MapChanged as error:
                log.info("the state of step %s is published again: %s", self._replica_step, error)
        self._follow_map()
        self.take_place()
        return True

    def while_halted(self, *, begun: bool) -> None:
        """As of the base. Once the step of a switch is fixed, members give the servers their state there. One that has
        begun the next step cannot take part in that: it leaves the group, and with it the sums of that step."""
        super().while_halted(begun=begun)
        step = self.versions.current
        if step is not None and self._session.step_barrier.is_at_switch(step):  # else others may take this step
            if begun:
                raise GroupLost("the job changes its strategy before this step")
            self._offer()

    def _offer(self) -> None:
        """Gives the servers the state, unless they have it. Raises MapChanged."""
        is_wanted, step = self._session.is_to_publish, self.versions.current
        assert self._collectives is not None
        assert step is not None
        self._publisher.offer(step, self._collectives, self._share, is_wanted=is_wanted)

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
