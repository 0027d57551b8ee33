"""Gives the servers the replicas' state, for checkpoints and readers (docs/internals/ledger.md, rule D4).

Owns: which step was published last. Invariant: members publish a step together, after all of them have it, each what it
has of the variables, or its share of the partitions; it counts once all have. In a job with tables they wait until the
checkpoint that wants the state has cut all partitions, since rows change with the next step. Must not know: why a step
is published.
"""

from __future__ import annotations

from shardyard.domain.replica_groups import TakenStep
from shardyard.wire import common_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.group_store import while_newest
from shardyard_worker.replicas.replica import Replica
from shardyard_worker.training.trainer import Trainer


class Publisher:
    """Of one worker. `step`: the step whose state the servers have, as far as this worker's group has seen to it."""

    def __init__(self, trainer: Trainer, replica: Replica) -> None:
        self._trainer = trainer
        self._session = trainer.session
        self.replica = replica
        self.step: int | None = None

    def forget(self) -> None:
        """The servers may have gone back."""
        self.step = None

    def offer(self, step: int, collectives: Collectives, share: tuple[int, int], *, is_wanted: bool) -> None:
        """While members wait for a checkpoint: publishes this step, unless the servers have it. `is_wanted`: the
        coordinator asks for it, again if a checkpoint could not be written. Raises MapChanged."""
        if self.step != step:
            self.publish(step, collectives, share)
        elif is_wanted:
            with while_newest():
                self._report(step, collectives.group.generation)
            self._session.refresh()

    def publish(self, step: int, collectives: Collectives, share: tuple[int, int]) -> None:
        """Publishes this step, which this replica has, with the other members. `share`: the place of this member among
        so many that have the same variables. Raises MapChanged; then it is published again."""
        collectives.meet("the other replicas")  # rule D4: nobody publishes a step that a member may lack
        self._give(TakenStep(step, collectives.group.generation), share)
        collectives.meet("the other replicas")
        if collectives.place == 0:
            with while_newest():
                self._await_cut(step, collectives)
        collectives.meet("the other replicas")
        self.step = step
        self._session.refresh()  # else the last heartbeat still asks for it

    def publish_alone(self, step: int, generation: int) -> None:
        """Publishes this step without the others, who may train on. `generation`: of the group that this worker was in.
        Raises StaleGeneration if there is a newer group, which publishes later steps."""
        self._trainer.reach(lambda _: self._give(TakenStep(step, generation), (0, 1)))
        self._report(step, generation)

    def _give(self, taken: TakenStep, share: tuple[int, int]) -> None:
        self._trainer.router.optimizer.publish(taken, self.replica.given(), share)

    def _await_cut(self, step: int, collectives: Collectives) -> None:
        """Reports the step. Waits until partitions are cut if a checkpoint must have them before the next step."""
        with self._session.wait_registry.over(lambda: f"a checkpoint to cut step {step}"):
            while True:
                retry_ms = self._report(step, collectives.group.generation)
                router = self._trainer.router
                if not retry_ms or router.optimizer.is_cut(step):
                    return
                collectives.check()
                router.pause(retry_ms)

    def _report(self, step: int, generation: int) -> int:
        """Returns after how long to ask again; 0: the members may go on."""
        caller = common_messages.caller_to_wire(self._session.caller)
        request = wire.ReportPublishedRequest(caller=caller, generation=generation, step=step)
        return self._session.ask(methods.REPORT_PUBLISHED, request).retry_ms
