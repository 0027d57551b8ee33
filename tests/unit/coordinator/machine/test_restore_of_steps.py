"""A synchronous job that goes back to a checkpoint after its last step: no worker may take it for done."""

from __future__ import annotations

from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.ids import Caller, Generation, MemberRole, Token
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.work.feeds import FeedOpening, FeedSpec
from tests.support.machine_yards import MachineYard

VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)),)
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
SETTINGS = JobSettings(partitions=1, consistency=ConsistencySettings(mode=ConsistencyMode.SYNC))
FEED = FeedSpec(samples=100, fingerprint="f", batch_size=10, epochs=1, shuffle=True, drop_last=False)
STEPS = 10


class Yard(MachineYard):
    def __init__(self) -> None:
        super().__init__(checkpoints="/somewhere")
        self.register(MemberRole.SERVER, "s:0")
        self.worker = self.join()

    def join(self) -> Caller:
        return self.join_as(self.register(MemberRole.WORKER), SETTINGS)

    def run(self) -> None:
        self.open_job(self.worker, VARIABLES, SGD)

    def take_checkpoint(self, step: int) -> None:
        self.handle(events.Ticked())
        self.complete_checkpoint(step)

    def open_feed(self, worker: Caller) -> FeedOpening:
        opening = self.handle(events.FeedOpened(worker, 0, FEED))
        assert isinstance(opening, FeedOpening)
        return opening

    def close(self, next_sequence: int) -> bool:
        """Asks whether the feed is done; the servers stand at that step, should they be asked."""
        returned = events.LeaseReturned(self.worker, 0, None, Token(0))
        answer = self.handle(returned)
        if answer is None:
            (reading,) = [each for each in self.effects if isinstance(each, effects.ReadLedger)]
            answer = self.handle(events.LedgerRead(returned, next_sequence, reading.map.generation))
        assert isinstance(answer, effects.LeaseClosed)
        return answer.done


def test_worker_that_comes_after_the_last_step_is_not_told_that_all_is_done_before_a_checkpoint_has_it() -> None:
    yard = Yard()
    yard.run()
    yard.take_checkpoint(step=0)
    assert not yard.open_feed(yard.worker).done
    assert not yard.close(STEPS)
    assert not yard.open_feed(yard.join()).done
    yard.take_checkpoint(step=STEPS)
    assert yard.close(STEPS)
    assert yard.open_feed(yard.join()).done


def test_feed_whose_last_steps_are_taken_back_is_open_until_they_are_taken_again() -> None:
    yard = Yard()
    yard.run()
    yard.open_feed(yard.worker)
    yard.take_checkpoint(step=0)
    assert not yard.close(STEPS)
    yard.register(MemberRole.SERVER, "s:0")  # a new process in the place of the one that had the partition
    yard.handle(events.Ticked())
    (restoring,) = [each for each in yard.effects if isinstance(each, effects.RestorePartitions)]
    assert restoring.map.generation > Generation(1)
    yard.handle(events.PartitionsRestored(yard.worker.job, restoring.map.generation))
    returned = events.LeaseReturned(yard.worker, 0, None, Token(0))
    assert yard.handle(returned) is None, "the servers are asked"
    assert not yard.close(0)
    assert not yard.close(STEPS)
    yard.take_checkpoint(step=STEPS)
    assert yard.close(STEPS)
