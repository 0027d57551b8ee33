"""A coordinator's machine whose jobs begin with a checkpoint of another run, or go back to one of their own."""

from __future__ import annotations

from shardyard.config.settings import CheckpointSettings, JobSettings
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import Caller, JobId, MemberRole, Token
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.placement.placement import plan
from shardyard_coordinator.storage.restore_point import RestorePoint
from tests.support.machine_yards import MachineYard
from tests.support.transcript_commands import BEGUN

LEASE_MS = 1_000_000
VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)), VariableSpec("b", DType.FLOAT32, (8,)))
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
SETTINGS = JobSettings(partitions=2, checkpoint=CheckpointSettings(every_s=0))
ORIGIN = RestorePoint(
    "default",
    "elsewhere",
    7,
    JobId((1 << 32) + 5),
    60,
    UpdateMode.ASYNC,
    1,
    99,
    plan(VARIABLES, SGD, partitions=2, block_bytes=256),
    {"entries": BEGUN, "closed": 1, "token": 44},
    Token(44),
    Token(40),
    1_700_000_000,
)


class Yard(MachineYard):
    def __init__(self) -> None:
        super().__init__(lease_ms=LEASE_MS, checkpoints="here")
        self.servers = [self.register(MemberRole.SERVER, f"s:{index}") for index in range(3)]

    def join(self, settings: JobSettings = SETTINGS) -> Caller:
        return self.join_as(self.register(MemberRole.WORKER), settings)

    def order(self, origin: RestorePoint = ORIGIN) -> bool:
        answer = self.handle(events.RestoreOrdered(origin))
        assert isinstance(answer, effects.RestorePlanned)
        return answer.running

    def tick(self) -> effects.RestorePartitions | None:
        """What is to be restored."""
        found = None
        for _ in range(2):
            self.now_ms += 1_000
            self.handle(events.Ticked())
            found = next((each for each in self.effects if isinstance(each, effects.RestorePartitions)), found)
        return found

    def restored(self, wanted: effects.RestorePartitions | None) -> None:
        assert wanted is not None
        self.handle(events.PartitionsRestored(wanted.spec.job, wanted.map.generation))
