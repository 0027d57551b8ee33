"""A coordinator's machine with a job that is switched to another consistency mode while it runs. A server and two
workers do only what a test tells them to do."""

from __future__ import annotations

from shardyard.config.settings import JobSettings
from shardyard.domain.consistency import ConsistencyMode, SwitchPoint
from shardyard.domain.ids import Caller, MemberRole
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import SwitchTaken
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.work.feeds import FeedSpec
from tests.support.machine_yards import MachineYard

SYNC, ASYNC, BOUNDED = ConsistencyMode.SYNC, ConsistencyMode.ASYNC, ConsistencyMode.BOUNDED
VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)),)
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
FEED = FeedSpec(samples=100, fingerprint="f", batch_size=5, epochs=2, shuffle=True, drop_last=False)


class SwitchingYard(MachineYard):
    """The job has first values, and a checkpoint of them if it has checkpoints. With `feed`, both workers have opened
    that feed."""

    def __init__(self, settings: JobSettings, checkpoints: str | None = None, feed: FeedSpec | None = None) -> None:
        super().__init__(checkpoints=checkpoints)
        self.server = self.register(MemberRole.SERVER, "s:0")
        self.settings = settings
        self.workers = [self.join() for _ in range(2)]
        self.open_job(self.workers[0], VARIABLES, SGD)
        self.tick()
        if self.wanted(effects.TakeCheckpoint):
            self.complete_checkpoint()
        if feed is not None:
            for caller in self.workers:
                self.handle(events.VariablesRegistered(caller, VARIABLES, SGD))
                self.handle(events.FeedOpened(caller, 0, feed))

    def join(self) -> Caller:
        return self.join_as(self.register(MemberRole.WORKER), self.settings)

    def switch(self, mode: ConsistencyMode | None, staleness: int | None = None) -> SwitchTaken:
        answer = self.handle(events.SwitchRequested("", mode, staleness))
        assert isinstance(answer, SwitchTaken)
        return answer

    def tick(self, ms: int = 100) -> None:
        self.now_ms += ms
        self.handle(events.Ticked())

    # ---- over to the other mode of updates

    def halted(self, caller: Caller, reached: int = 0, *, halt: int = 1, step: int = 0) -> SwitchPoint | None:
        """A worker reports that it has halted. Returns the switch point in the answer."""
        return self.beat(caller.incarnation, Report(step=step, switch_reached=(halt, reached))).switch_point

    def switch_point_told(self, caller: Caller, step: int = 0) -> SwitchPoint | None:
        return self.beat(caller.incarnation, Report(step=step)).switch_point

    def settle(self, version: int = 0, *, reached: int = 0, halt: int = 1) -> None:
        """All workers have halted, and the servers have reported their version."""
        for caller in self.workers:
            self.halted(caller, reached, halt=halt)
        self.handle(events.StepsRead(self.read.job, self.read.map.generation, version))

    def lease(self, caller: Caller, feed: int = 0) -> object:
        return self.handle(events.LeaseRequested(caller, feed))

    @property
    def read(self) -> effects.ReadSteps:
        (read,) = self.wanted(effects.ReadSteps)
        assert isinstance(read, effects.ReadSteps)
        return read

    @property
    def restoring(self) -> effects.RestorePartitions:
        (restore,) = self.wanted(effects.RestorePartitions)
        assert isinstance(restore, effects.RestorePartitions)
        return restore

    def restored(self, restore: effects.RestorePartitions) -> None:
        self.handle(events.PartitionsRestored(restore.spec.job, restore.map.generation))
