"""Asynchronous steps of replicas whose variables are on the servers (job.between parameter_server): each push is
applied when it comes, and replicas do not wait for each other's steps (docs/internals/ledger.md, rule D11).

The workers of a replica are one asynchronous worker to the ledgers. The first of them leads: it leases data, and tells
the others which batch is computed next. Each pushes the gradients of its part under the same name, to the partitions of
that part, and pulls their newest values. Before anything of a push is sent, they tell each other whether all gradients
are finite, and whether all their earlier pushes were taken.

Owns: this worker's place in its replica, and what its workers agree on. Must not know: where batches come from, what
parts are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardyard.domain import errors
from shardyard.domain.push_names import PushName
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.group_store import GroupLost, no_place
from shardyard_worker.consistency.asynchronous import AsyncStrategy
from shardyard_worker.consistency.groups.computed_together import RunsTogether
from shardyard_worker.consistency.groups.group_strategy import next_group
from shardyard_worker.consistency.groups.parts import Facts, ReplicaPart
from shardyard_worker.consistency.groups.work_messages import NUMBERS, WorkMessage
from shardyard_worker.consistency.strategy import LostWork
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import SLICE_MS, Trainer
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")

LEADER = 0
"""The place in a replica of the worker that leases data."""


class PushedAsync(RunsTogether, AsyncStrategy):
    """For job.consistency.mode async."""

    needs_feed = True

    def __init__(self, trainer: Trainer, part: ReplicaPart) -> None:
        super().__init__(trainer)
        self.part = part
        self._model = part.model
        self._left = 0
        """The generation of the newest group that this worker was in."""
        self._is_to_leave = False
        self._has_lost_push = False
        """Whether a push of this member was refused, since it was last said. The others' may have been taken."""
        self._name: PushName | None = None
        """Of the last work that this worker was told of."""
        self.weight_of_batch = lambda: None

    # ---- the group

    @property
    def _inside(self) -> Collectives | None:
        return self.part.inside

    @property
    def leads(self) -> bool:
        return self._inside is not None and self._inside.place == LEADER

    def begin(self) -> None:
        """Values come with a place in a group."""

    def take_place(self, data_set: int, is_over: Callable[[], bool]) -> bool:
        """Waits until this worker has a place in the newest group, and the newest values of its part. `data_set`: the
        number of its job.batches. Returns False once `is_over` returns True, and if another worker of its replica is in
        a later data set: if one leaves a data set, the others do. Raises GroupLost."""
        if self._inside is not None and not self._is_to_leave:
            return True
        self.leave_group()
        if is_over():
            return False

        def is_to_wait_on() -> bool:
            if self._trainer.is_behind:
                self._trainer.follow_map()
            return not is_over()

        group = next_group(self._trainer, self._left, None, is_to_wait_on)
        if group is None:
            return False
        self._left = group.generation
        if self.part.join(group) is None:  # the others were done, and have left the job
            self._trainer.router.pause(SLICE_MS)
            raise GroupLost(f"replica group {group.generation} has no whole replica")
        newest = self._newest_data_set(data_set)
        if newest > data_set:
            log.info("leaves data set %d: another worker of this replica is in data set %d", data_set, newest)
            return False
        self._take_newest()
        place = group.place_of(self._session.caller.incarnation)
        log.info("has place %s of %d in group %d", place, len(group.members), group.generation)
        return True

    def _newest_data_set(self, own: int) -> int:
        """The highest number of a data set in which a worker of this replica is. Raises GroupLost."""
        inside = self._place_in_group()
        found = torch.tensor([own])
        with self._session.wait_registry.over(lambda: "the other workers of this replica to take their places"):
            inside.wait(inside.most(found))
        return int(found)

    def leave_group(self) -> None:
        self._is_to_leave = self._has_lost_push = False
        self._leave_step()
        self.part.leave()

    def _place_in_group(self) -> Collectives:
        """Raises GroupLost."""
        inside = self._inside
        if inside is None or self._lost is not None:
            raise self._lost or no_place()
        if self._is_to_leave:
            raise GroupLost("a worker has come, or is gone: the workers form another group")
        inside.check()
        return inside

    def check(self) -> None:
        """Raises GroupLost."""
        self._place_in_group()

    def load_all(self) -> None:
        """Loads the newest values of all variables into the script's model. This worker computes nothing before it has
        taken a place again."""
        with self.part.loading_all():
            self._take_newest()
        self._is_to_leave = True

    def close(self) -> None:
        self.leave_group()
        super().close()
        self._model.close()

    # ---- what the members tell each other

    def tell(self, message: WorkMessage) -> None:
        """The leader tells the others what follows. Raises GroupLost."""
        self._place_in_group()
        if message.lease is not None:
            self._name = message.name
        self.part.messages.tell(message.numbers())

    def hear(self) -> WorkMessage:
        """Waits for what the leader tells next. Raises GroupLost."""
        self._place_in_group()
        numbers = torch.empty(NUMBERS, dtype=torch.int64)
        with self._session.wait_registry.over(lambda: "the first worker of this replica to begin a batch"):
            self.part.messages.hear(numbers, LEADER)
        message = WorkMessage.of(numbers)
        if message.lease is not None:
            self._name = message.name
        return message

    def await_answers(self) -> None:
        """Returns when all members of the replica have called this: what they have pushed is answered, and the leader
        opens a lease next. If the group is lost meanwhile, the next call of another method says so."""
        self._forget_step()
        try:
            # they may be waiting for facts since they computed a batch that was dropped
            self._tell_facts(Facts(leaves=False, loss=0.0))
            self._has_lost_push = False
        except GroupLost as error:
            self._lost = error

    def _tell_facts(self, own: Facts, odd: int | None = None) -> Facts:
        """Raises GroupLost."""
        with self._session.wait_registry.over(lambda: f"{self._at_hand} of the other workers of this replica"):
            return self.part.tell_facts(own, odd)

    # ---- a push

    @property
    def _at_hand(self) -> str:
        return "pushes" if self._name is None else f"push {self._name}"

    def _weight_at_hand(self) -> float | None:
        return None if self.weight_of_batch() is None else 1.0

    def _run(self, inputs: Sequence[Any], target: Any, weight: float) -> float:
        if not self._passes:
            self.part.put_values(None)
        return self.part.run(inputs, target, weight)

    def contribute(
        self,
        name: PushName | None,
        sending: StepInput | None,
        upcoming: Upcoming | None = None,  # noqa: ARG002 - rows are looked up on all servers, and pushes go to some
    ) -> None:
        if name is None:
            raise errors.InvalidRequest(
                f"a step outside of job.batches in an asynchronous job of strategy {self._model.strategy.value}",
                why="one worker of a replica leases the samples, and tells the others which they are",
                todo="go through the data by job.batches",
            )
        if sending is not None:
            self._check_has_run()
        self.loss = float("nan")
        try:
            self._place_in_group()
            if sending is not None:
                sending = self._counted(name, sending)
            self._push(name, sending)
        except GroupLost as error:
            log.info("%s does not count: %s", name, error)
            self._lost = error
            raise LostWork from error
        finally:
            self._has_run = False
            self._forget_step()

    def _push(self, name: PushName, sending: StepInput | None) -> None:
        try:
            self._send(name, sending, None)
        except LostWork:
            self._has_lost_push = not self.leads  # the leader goes on from what the servers have anyway
            if self._is_to_leave:
                self.await_answers()
            raise
        if self._is_to_leave:
            self.await_answers()

    def _checked(self, name: PushName, sending: StepInput | None) -> StepInput | None:  # noqa: ARG002
        """The members have looked at it together."""
        return sending

    def _counted(self, name: PushName, sending: StepInput) -> StepInput | None:
        """What this member pushes of the work; None if it does not count, which all members learn before any of them
        pushes (rule A4). Raises GroupLost, LostWork."""
        inside, pushes = self._place_in_group(), self._trainer.pushes
        own = self.part.own(sending, self._weight)
        leaves = self._session.replica_generation > inside.group.generation or self._session.drain.asked
        norm = 0.0 if pushes.clipper is None else pushes.clipper.square_norm(self.part.gradients_in(own))
        said = Facts(leaves, self._own_loss, is_refused=self._has_lost_push, square_norm=norm)
        facts = self._tell_facts(said, pushes.nonfinite.first(own.tensors, own.table_rows))
        self._is_to_leave = facts.leaves
        if facts.is_refused:
            self._give_up_work(name, "an earlier push of its replica was refused")
        self.loss = facts.loss
        if pushes.clipper is not None:
            pushes.clipper.square_norm_of_all = facts.square_norm
        odd = min((each for each in facts.odd if each is not None), default=None)
        if odd is None:
            return own
        if not self._report(name, odd, sending.highest):
            self._give_up_work(name, "its workers are to look at it again")
        return None

    def _report(self, name: PushName, odd: int, highest: int) -> bool:
        """The leader reports work that does not count. `odd`: the number of what is not finite. Returns whether the
        coordinator has taken the report, which all members learn. Raises GroupLost."""
        is_refused = False
        if self.leads:
            try:
                self._trainer.pushes.nonfinite.counts_with(name, odd, self._step, highest)
            except (errors.StaleToken, errors.StraddlingRange) as error:
                log.info("%s does not count: %s", name, error.what)
                is_refused = True
        return not self._tell_facts(Facts(leaves=False, loss=0.0, is_refused=is_refused)).is_refused

    def _give_up_work(self, name: PushName, why: str) -> None:
        """No member pushes the work. The leader goes on from what the servers have. Raises LostWork."""
        log.info("%s does not count: %s", name, why)
        self._has_lost_push = False
        self._trainer.pushes.not_counted()
        self._take_newest()
        raise LostWork
