"""What a restore makes of data that was said to be done (docs/internals/ledger.md, rules A6 and A11). Further
scenarios: transcripts/end_of_data.txt."""

from __future__ import annotations

from typing import TypeVar

import pytest

from shardyard.config.settings import CheckpointSettings, ConsistencySettings, DataSettings, JobSettings
from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.ids import Generation, Incarnation, MemberRole, Token
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.push_names import DataLease
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.service.status import describe
from shardyard_coordinator.storage.recovery import Restored
from shardyard_coordinator.work.feeds import FeedDone, FeedSpec, LeaseWait
from tests.support.machine_yards import MachineYard

FEED = FeedSpec(4, "f", 1, 1, shuffle=False, drop_last=False)
STEPS = 4
T = TypeVar("T")


class Yard(MachineYard):
    """A machine with one job, of one worker and one server."""

    def __init__(self, mode: str, *, url: str = "/checkpoints") -> None:
        super().__init__(lease_ms=4_000)
        self.server = self.add_server()
        self.settings = settings = JobSettings(
            consistency=ConsistencySettings(mode=ConsistencyMode(mode)),
            data=DataSettings(batches_per_data_shard=4),
            checkpoint=CheckpointSettings(url=url),
        )
        self.caller = self.join_as(self.register(MemberRole.WORKER), settings)
        spec = OptimizerSpec("sgd", (make_group("sgd", {"lr": 1.0}),))
        self.open_job(self.caller, (VariableSpec("v", DType.FLOAT64, (8,)),), spec)

    def add_server(self) -> Incarnation:
        """In the place of the one before it, if there was one."""
        return self.register(MemberRole.SERVER, "s:1")

    def until(self, kind: type[T]) -> T:
        for _ in range(1_000):
            self.now_ms += 100
            for member in (self.server, self.caller.incarnation):
                self.handle(events.HeartbeatReceived(member, Report()))
            self.handle(events.Ticked())
            for effect in self.effects:
                if isinstance(effect, kind):
                    return effect
        raise AssertionError(f"no {kind.__name__}")

    def checkpoint(self, step: int = 0) -> int:
        draft = self.until(effects.TakeCheckpoint).draft
        self.handle(events.CheckpointTaken(self.caller.job, draft.number, draft.number, step))
        return draft.number

    def lease(self) -> DataLease | LeaseWait | FeedDone:
        found = self.handle(events.LeaseRequested(self.caller, 0))
        assert isinstance(found, DataLease | LeaseWait | FeedDone)
        return found

    def close(self, lease: DataLease | None, next_sequence: int = STEPS) -> bool:
        """A data shard's lease, or the feed of a synchronous job."""
        source, token = (None, Token(0)) if lease is None else (lease.source, lease.token)
        returned = events.LeaseReturned(self.caller, 0, source, token)
        answer = self.handle(returned)
        if answer is None:
            read = self.read
            answer = self.handle(events.LedgerRead(returned, next_sequence, read.map.generation))
        assert isinstance(answer, effects.LeaseClosed)
        return answer.done

    @property
    def read(self) -> effects.ReadLedger:
        (found,) = (each for each in self.effects if isinstance(each, effects.ReadLedger))
        return found

    def lose_server(self) -> Generation:
        """Another one takes its place, and its partitions from the newest checkpoint."""
        self.server = self.add_server()
        generation = self.until(effects.RestorePartitions).map.generation
        self.handle(events.PartitionsRestored(self.caller.job, generation))
        return generation


def finished(yard: Yard) -> DataLease:
    """All data is pushed, and closed."""
    yard.handle(events.FeedOpened(yard.caller, 0, FEED))
    lease = yard.lease()
    assert isinstance(lease, DataLease)
    assert yard.close(lease)
    return lease


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_ledgers_that_were_read_before_a_restore_close_nothing(mode: str) -> None:
    yard = Yard(mode)
    yard.handle(events.FeedOpened(yard.caller, 0, FEED))
    yard.checkpoint()
    lease = yard.lease() if mode == "async" else None
    assert lease is None or isinstance(lease, DataLease)
    source, token = (None, Token(0)) if lease is None else (lease.source, lease.token)
    returned = events.LeaseReturned(yard.caller, 0, source, token)
    assert yard.handle(returned) is None
    former = yard.read.map.generation
    generation = yard.lose_server()
    assert yard.handle(events.LedgerRead(returned, STEPS, former)) is None
    assert yard.read.map.generation == generation, "read again, under the new map"
    assert yard.handle(events.LedgerRead(returned, 1, generation)) == effects.LeaseClosed(done=False)


def test_standing_says_what_a_recovery_has_brought_back() -> None:
    yard = Yard("async")
    draft = yard.until(effects.TakeCheckpoint).draft
    yard.handle(events.CheckpointTaken(yard.caller.job, draft.number, draft.number, 7, created_s=1_700_000_000))
    finished(yard)
    (job,) = describe(yard.machine, yard.now_ms).jobs
    assert job.HasField("checkpoint")
    assert (job.checkpoint.number, job.checkpoint.step, job.checkpoint.created_s) == (draft.number, 7, 1_700_000_000)
    assert not job.HasField("restored")
    yard.server = yard.add_server()
    (job,) = describe(yard.machine, yard.now_ms).jobs
    assert job.recovering
    generation = yard.until(effects.RestorePartitions).map.generation
    yard.handle(events.PartitionsRestored(yard.caller.job, generation))
    (job,) = describe(yard.machine, yard.now_ms).jobs
    assert not job.recovering
    partitions = len(job.map.owners)
    # the data shard was closed after the checkpoint, so it is leased once more
    restored = Restored(draft.number, 7, 1_700_000_000, partitions, 1, logs=False)
    assert yard.machine.jobs[-1].restored == restored
    assert (job.restored.checkpoint.number, job.restored.checkpoint.step) == (draft.number, 7)
    assert (job.restored.partitions, job.restored.leased_again, job.restored.logs) == (partitions, 1, False)
