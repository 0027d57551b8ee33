"""Asynchronous steps of pipelines whose variables are on the servers (job.between parameter_server): each push is
applied when it comes, and pipelines do not wait for each other's steps (docs/internals/ledger.md, rule D11).

A pipeline is one asynchronous worker to the ledgers. Its first worker leads: it leases data, and tells the others which
batch is computed next. Each pushes the gradients of its stage under the same name, to the partitions of that stage, and
pulls their newest values. Before anything of a push is sent, they tell each other whether all gradients are finite, and
whether all their earlier pushes were taken.

Owns: this worker's place in its pipeline, and what its workers agree on. Must not know: where batches come from, how a
schedule runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from shardyard.domain import errors
from shardyard.domain.push_names import PushName
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_worker.consistency.asynchronous import AsyncStrategy
from shardyard_worker.consistency.groups.computed_together import RunsTogether
from shardyard_worker.consistency.groups.group_strategy import next_group
from shardyard_worker.consistency.groups.pipelined import StageRuns
from shardyard_worker.consistency.groups.work_messages import NUMBERS, Told, WorkMessage
from shardyard_worker.consistency.strategy import LostWork
from shardyard_worker.pipeline.pipeline import Pipeline
from shardyard_worker.replicas.collectives import Collectives
from shardyard_worker.replicas.group_store import GroupLost
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import SLICE_MS, Trainer
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")

LEADER = 0
"""The place in a pipeline of the worker that leases data."""
LEAVE, LOST, LOSS, SQUARE_NORM = range(4)
FACTS = 4
"""Behind them each member of a pipeline has a place: 1 + the number of what is not finite (NonFiniteCheck), or 0."""


class PushedAsync(RunsTogether, AsyncStrategy):
    """For job.strategy pipeline with job.between parameter_server and job.consistency.mode async."""

    def __init__(self, trainer: Trainer, pipeline: Pipeline) -> None:
        super().__init__(trainer)
        self._settings = trainer.session.job_settings
        self._model = self._pipeline = pipeline
        self._runs = StageRuns(pipeline)
        self._collectives: Collectives | None = None
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
        return self._collectives

    @property
    def leads(self) -> bool:
        return self._collectives is not None and self._collectives.place == LEADER

    def begin(self) -> None:
        """Values come with a place in a group."""

    def take_place(self, is_over: Callable[[], bool]) -> bool:
        """Waits until this worker has a place in the newest group, and the newest values of its stage. Returns False
        once `is_over` returns True. Raises GroupLost."""
        if self._collectives is not None and not self._is_to_leave:
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
        self._join(group)
        return True

    def _join(self, group: ReplicaGroup) -> None:
        place, size = group.place_of(self._session.caller.incarnation), self._settings.workers_per_rank
        assert place is not None, group
        if len(group.members) < size:  # the others were done, and have left the job
            self._trainer.router.pause(SLICE_MS)
            raise GroupLost(f"replica group {group.generation} has no whole pipeline")
        first = place // size * size
        inside = Collectives(self._session, group, place, self._pipeline.fingerprint, range(first, first + size))
        self._collectives = inside
        self._pipeline.replica_at(inside.place)
        self._pipeline.free()
        self._trainer.use_place(inside.place)
        self._runs.begin(inside, inside)
        self._take_newest()
        log.info("has place %d of %d in group %d", place, len(group.members), group.generation)

    def leave_group(self) -> None:
        collectives, self._collectives = self._collectives, None
        self._is_to_leave = self._has_lost_push = self._has_run = False
        self._lost = None
        self._forget_step()
        self._runs.end()
        if collectives is not None:
            collectives.leave()

    def _place_in_group(self) -> Collectives:
        """Raises GroupLost."""
        inside = self._collectives
        if inside is None or self._lost is not None:
            raise self._lost or GroupLost("this worker has left its group")
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
        self._trainer.use_place(None)
        self._pipeline.make_room()
        self._take_newest()
        self._pipeline.is_whole = True
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
        self._runs.members.tell(message.numbers())

    def hear(self) -> WorkMessage:
        """Waits for what the leader tells next. Raises GroupLost."""
        self._place_in_group()
        numbers = torch.empty(NUMBERS, dtype=torch.int64)
        with self._session.wait_registry.over(lambda: "the first worker of this pipeline to begin a batch"):
            self._runs.members.hear(numbers, LEADER)
        message = WorkMessage.of(numbers)
        if message.told in (Told.BATCH, Told.EMPTY):
            self._name = message.name
        return message

    def await_answers(self) -> None:
        """Returns when all members of the pipeline have called this: what they have pushed is answered, and the leader
        opens a lease next. If the group is lost meanwhile, the next call of another method says so."""
        self._forget_step()
        inside = self._collectives
        try:
            # as many facts as members may be waiting for since they computed a batch that was dropped
            self._sum([0.0] * (FACTS + (0 if inside is None else inside.size)))
            self._has_lost_push = False
        except GroupLost as error:
            self._lost = error

    def _sum(self, said: list[float]) -> list[float]:
        """Raises GroupLost."""
        with self._session.wait_registry.over(lambda: f"{self._at_hand} of the other workers of this pipeline"):
            return self._runs.sum_facts(said)

    # ---- a push

    @property
    def _at_hand(self) -> str:
        return "pushes" if self._name is None else f"push {self._name}"

    def _weight_at_hand(self) -> float | None:
        return None if self.weight_of_batch() is None else 1.0

    def _run(self, inputs: Sequence[torch.Tensor], target: torch.Tensor, weight: float) -> float:
        size = 0 if self._collectives is None else self._collectives.size
        return self._runs.run(inputs, target, weight, FACTS + size)

    def contribute(
        self,
        name: PushName | None,
        sending: StepInput | None,
        upcoming: Upcoming | None = None,  # noqa: ARG002 - rows are looked up on all servers, and pushes go to some
    ) -> None:
        if name is None:
            raise errors.InvalidRequest(
                "a step outside of job.batches in an asynchronous job of pipelines",
                why="one worker of a pipeline leases the samples, and tells the others which they are",
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
            if self._is_to_leave:
                self.await_answers()
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
            raise

    def _checked(self, name: PushName, sending: StepInput | None) -> StepInput | None:  # noqa: ARG002
        """The members have looked at it together."""
        return sending

    def _counted(self, name: PushName, sending: StepInput) -> StepInput | None:
        """What this member pushes of the work; None if it does not count, which all members learn before any of them
        pushes (rule A4). Raises GroupLost, LostWork."""
        inside, pushes = self._place_in_group(), self._trainer.pushes
        own = self._own(sending, inside)
        said = [0.0] * (FACTS + inside.size)
        said[LEAVE] = float(self._session.replica_generation > inside.group.generation or self._session.drain.asked)
        said[LOST] = float(self._has_lost_push)
        said[LOSS] = self._own_loss
        found = pushes.nonfinite.first(own.tensors, own.table_rows)
        said[FACTS + inside.place] = 0.0 if found is None else 1.0 + found
        if pushes.clipper is not None:
            gradients = [each for each in self._pipeline.gradients if each is not None]
            rows = [] if own.rows is None else own.rows.tensors
            said[SQUARE_NORM] = pushes.clipper.square_norm([*gradients, *rows])
        facts = self._sum(said)
        self._is_to_leave = bool(facts[LEAVE])
        if facts[LOST]:
            self._drop(name, "an earlier push of its pipeline was refused")
        self.loss = facts[LOSS]
        if pushes.clipper is not None:
            pushes.clipper.square_norm_of_all = facts[SQUARE_NORM]
        odd = min((int(each) - 1 for each in facts[FACTS:] if each), default=None)
        if not self._judge(name, odd, sending.highest):
            self._drop(name, "its workers are to look at it again")
        return own if odd is None else None

    def _judge(self, name: PushName, odd: int | None, highest: int) -> bool:
        """The leader reports work that does not count. `odd`: the number of what is not finite. Returns
        whether all members can push it, some as nothing."""
        refused = False
        if self.leads:
            try:
                self._trainer.pushes.nonfinite.counts_with(name, odd, self._step, highest)
            except (errors.StaleToken, errors.StraddlingRange) as error:
                log.info("%s does not count: %s", name, error.what)
                refused = True
        return odd is None or not any(self._sum([float(refused)]))

    def _drop(self, name: PushName, why: str) -> None:
        """No member pushes the work. The leader goes on from what the servers have. Raises LostWork."""
        log.info("%s does not count: %s", name, why)
        self._has_lost_push = False
        self._trainer.pushes.not_counted()
        self._take_newest()
        raise LostWork

    def _own(self, sending: StepInput, inside: Collectives) -> StepInput:
        """The part of this member, as the mean over the batches of the work. One member reports the samples."""
        tensors: list[torch.Tensor | None] = [None] * len(sending.tensors)
        for at in self._pipeline.replica.places:
            tensors[at] = sending.tensors[at]
        for gradient in self._pipeline.gradients:
            if gradient is not None and self._weight != 1.0:
                gradient.mul_(1.0 / self._weight)
        rows, samples = self._own_rows(sending), None if inside.place == self._trainer.first_place else 0
        return replace(sending, tensors=tensors, rows=rows, samples=samples)
