"""Synchronous steps of replicas whose variables are on the servers (job.between parameter_server): each worker pushes
the gradients of its part of the replica, and pulls its values (docs/internals/ledger.md, rule D10).

The workers of a replica are one worker to the ledgers: each pushes a logical rank's work under the same name, each to
the partitions of its own part. A worker that is lost costs no step: the values are on the servers.

Owns: this worker's place in its replica. Must not know: what parts are, how a push travels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from shardyard.domain.consistency import BufferMode
from shardyard.domain.ids import Rank
from shardyard.domain.push_names import PushName
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.group_store import no_place, while_newest
from shardyard_worker.consistency.groups.computed_together import ComputedTogether
from shardyard_worker.consistency.groups.parts import Facts, ReplicaPart
from shardyard_worker.consistency.logical_ranks import LogicalRanks
from shardyard_worker.consistency.step_versions import StepVersions
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec
from shardyard_worker.exchange.server_group import ServerGroup
from shardyard_worker.rows.row_prefetch import RowPrefetch
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import SLICE_MS, Trainer, explain
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")


class PartVersions(StepVersions):
    """Of the partitions of this worker's part."""

    def __init__(self, trainer: Trainer, ranks: LogicalRanks, strategy: PushedSync) -> None:
        super().__init__(trainer, ranks)
        self._strategy = strategy

    def refresh_ranks(self) -> None:
        """Ranks change with the group only."""
        self._strategy.check_group()

    def find_work(self) -> None:
        self._strategy.take_place()
        if self._ranks.held:
            super().find_work()
        else:
            self._strategy.rest_at_end()

    def await_ranks(self) -> None:
        self._strategy.take_place()

    def await_step(self) -> None:
        """As of the base. The version is asked for before the group is looked at: members that have the last one may
        have left."""
        assert self.current is not None
        answer = ExchangeResult()
        with self._session.wait_registry.over(lambda: f"step {self.current} to be complete: {self._explain(answer)}"):
            while self._ranks.due(self.current) is None:
                answer = self._trainer.router.pull(self._next(SLICE_MS))
                if not answer.missing:
                    self._arrive(answer)
                    return
                self._session.check_waiting()
                self._ask_for_norms(self.current + 1)
                self.refresh_ranks()
        self._trainer.router.abandon_pull()
        self.load_again()

    def _hold(self, version: int, rows: RowPrefetch | None) -> None:  # noqa: ARG002 - they do not come with values
        super()._hold(version, self._strategy.await_rows(version))

    def _must_wait(self, answer: ExchangeResult) -> bool:
        if answer.missing:
            self._ask_for_norms(answer.missing[0].want)
        return super()._must_wait(answer)

    def _ask_for_norms(self, version: int) -> None:
        """If the step that makes this version is clipped by its norm: asks all servers for their partitions' parts of
        it, also those of other members. The next pull brings the sum."""
        if self._trainer.router.lacks_norms(version - 1):
            pull = PullSpec(version, exactly=True, wait_ms=SLICE_MS, values=False)
            self._trainer.router.pull_rows(pull, None)


class PushedSync(ComputedTogether):
    def __init__(self, trainer: Trainer, part: ReplicaPart) -> None:
        super().__init__(trainer, lambda trainer, ranks: PartVersions(trainer, ranks, self))
        self.part = part
        self._model = part.model
        self.needs_feed = part.needs_feed
        self._upcoming: Upcoming | None = None

    # ---- the group

    @property
    def _inside(self) -> Collectives | None:
        return self.part.inside

    def _join(self, group: ReplicaGroup) -> None:
        place = group.place_of(self._session.caller.incarnation)
        assert place is not None, group
        self._left = group.generation
        self._is_to_leave = False
        self._collectives = inside = self.part.join(group)
        if inside is None:  # all steps were taken
            self._collectives = Collectives(self._session, group, place, self._model.fingerprint)
            self.load_all(0)
            return
        self.ranks.hold(self._ranks_at(group, place), 0, group.generation)
        with while_newest():
            self._agree(inside, self.ranks.open_all())
        self.versions.align()
        step = self.versions.current
        log.info("has place %d of %d in group %d, at step %s", place, len(group.members), self._left, step)

    def _agree(self, inside: Collectives, nexts: dict[Rank, int]) -> None:
        """A rank's next step is the lowest over the partitions of all members."""
        lowest = torch.tensor([-nexts[rank] for rank in self.ranks.held], dtype=torch.int64)
        with self._session.wait_registry.over(lambda: "the other workers of this replica, to agree on a step"):
            inside.wait(inside.most(lowest))
        for position, each in zip(self.ranks.held.values(), lowest.tolist(), strict=True):
            position.next = -each

    def check_group(self) -> None:
        """Raises GroupLost."""
        if self._collectives is None:
            raise no_place()
        self._collectives.check()

    def _leave_group(self) -> None:
        collectives, self._collectives = self._collectives, None
        self.ranks.held = {}
        self.versions.current = None
        self._is_to_leave = False
        self._upcoming = None
        self._leave_step()
        self.part.leave()
        if collectives is not None:
            collectives.leave()

    # ---- a step

    def contribute(self, name: PushName | None, sending: StepInput | None, upcoming: Upcoming | None = None) -> None:
        try:
            super().contribute(name, sending, upcoming)
        finally:
            self._forget_step()

    def _counted(self, name: PushName, rank: Rank, sending: StepInput | None) -> StepInput | None:
        """Whether the work counts, which all members of the replica learn before any of them pushes (rule A4). Raises
        GroupLost."""
        inside = self._inside
        if inside is None or self._lost is not None:
            raise self._lost or no_place()
        if sending is None:
            return None
        with self._session.wait_registry.over(lambda: f"{self._at_hand} of the other members"):
            check, step = self._trainer.pushes.nonfinite, self.versions.current
            assert step is not None
            pushes_buffers = not rank or self._settings.buffers is not BufferMode.FIRST
            own = self.part.own(sending, self._weight, has_buffers=pushes_buffers)
            leaves = self._session.replica_generation > inside.group.generation
            facts = self.part.tell_facts(Facts(leaves, self._own_loss), check.first(own.tensors, own.table_rows))
            self.loss = facts.loss
            self._is_to_leave = facts.leaves
            odd = next(((at, each) for at, each in enumerate(facts.odd) if each is not None), None)
            if odd is not None:
                if inside.place == odd[0]:
                    with while_newest():
                        check.counts_with(name, odd[1], step, own.highest)
                inside.meet("the other workers of this replica")  # it was recorded that the work does not count
                return None
            check.counts_with(name, None, step, own.highest)
        return own

    def _run(self, inputs: Sequence[Any], target: Any, weight: float) -> float:
        if not self._passes:
            self.part.put_values(self.versions.current)
        return self.part.run(inputs, target, weight)

    def await_rows(self, version: int) -> RowPrefetch | None:
        """Waits until all partitions have rows of that version, also those of other members. Returns those that the
        script has announced. A look-up would wait too, but would not notice that a member is lost before its push.
        Raises GroupLost."""
        if not self.part.looks_up_rows:
            return None
        trainer, upcoming, answer = self._trainer, self._upcoming, ExchangeResult()
        self._upcoming = None
        ahead = trainer.pushes.prefetch_rows(version, upcoming)
        with self._session.wait_registry.over(lambda: f"version {version} of the rows: {explain(answer)}"):
            while True:
                pull = PullSpec(version, exactly=True, wait_ms=SLICE_MS, values=False)
                answer = trainer.router.pull_rows(pull, ahead)
                if not answer.missing:
                    return answer.ahead
                self._session.check_waiting()
                self.check_group()

    def _push(
        self, name: PushName, sending: StepInput | None, upcoming: Upcoming | None, pull: PullSpec | None
    ) -> ExchangeResult:
        if pull is not None:
            self._upcoming = upcoming
        with while_newest():
            return super()._push(name, sending, None, pull)

    # ---- the end of the data

    def has_moved(self) -> bool:
        """As of the base. Also if a member was lost before all partitions had the last step, which is computed again
        then."""
        if super().has_moved():
            self.take_place()
            return True
        inside, step = self._collectives, self.versions.current
        if inside is None or step is None or self._session.lost_replica_generation < inside.group.generation:
            return False
        pull = PullSpec(step, exactly=False, values=False)
        if not self._trainer.reach(partial(ServerGroup.pull_rows, rows=pull, ahead=None)).missing:
            return False
        self._is_to_leave = True
        self.take_place()
        return True

    def end_data(self, end: int) -> None:
        self.load_all(end)
        self.rest_at_end()

    def rest_at_end(self) -> None:
        """This worker has all values, and computes nothing before it has taken a place again."""
        self._is_to_leave = True

    def load_all(self, at_least: int) -> None:
        """Loads the values of all variables, of that step or a later one, into the script's model."""
        self.ranks.held = {}
        with self.part.loading_all():
            self.versions.current = self._trainer.pull_step(at_least)
