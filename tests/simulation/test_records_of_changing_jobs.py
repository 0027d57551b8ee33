"""Records of a job that begins with logs, and of one that goes over between synchronous and asynchronous updates."""

from __future__ import annotations

import functools
import random

import pytest

from shardyard.config.settings import CheckpointSettings, ConsistencySettings, DataSettings, JobSettings
from shardyard.domain.consistency import ConsistencyMode, Durability, SwitchPoint, UpdateMode
from shardyard.domain.errors import ShardyardError
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, MemberRole, Term, Token
from shardyard.domain.push_names import DataLease
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.members.membership import Registration
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.placement.deployment import Stage
from shardyard_coordinator.placement.placement import plan
from shardyard_coordinator.storage.restore_point import RestorePoint
from tests.simulation.restoring import FEEDS, SGD, VARIABLES, Lockstep

# ---- the beginning of a job with logs

BEGINNINGS = [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 24))]
BEGINNING_EVENTS = 120
LOGS = JobSettings(
    name="w",
    partitions=3,
    workers_expected=2,
    idle_ms=60_000,
    durability=Durability.WAL,
    checkpoint=CheckpointSettings(url="/own", every_s=1, keep=2),
)
ORDER = RestorePoint(
    "w",
    "/other",
    7,
    JobId(1 << 32 | 5),
    60,
    UpdateMode.ASYNC,
    1,
    99,
    plan(VARIABLES, SGD, partitions=2, block_bytes=128),
    {"entries": [], "closed": 0, "token": 44},
    Token(44),
    Token(0),
    0,
)
BEGINNING_KINDS = {
    "checkpoint_begun",
    "checkpoint_committed",
    "job_resumed",
    "logs_begun",
    "partitions_lost",
    "partitions_moved",
    "partitions_placed_again",
    "partitions_restored_later",
    "recovery_begun",
    "restore_forgotten",
    "restore_ordered",
}


CALLS = (
    effects.CreatePartitions,
    effects.OpenPartitions,
    effects.RestorePartitions,
    effects.TakeCheckpoint,
    effects.ReadSteps,
    effects.PaceServers,
)


class Beginning:
    """One job whose servers come and go before, and after, its first checkpoint is written, and whose coordinator may
    die. It begins with a checkpoint of another run where `seed` is odd."""

    settings = LOGS

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"beginning {seed}")
        self.now_ms = 1_000
        self.machines = Lockstep(term=Term(2), lease_ms=1_000, now_ms=self.now_ms)
        self.kinds: set[str] = set()
        self.servers: list[Incarnation] = []
        self.under_way: list[effects.Effect] = []
        self.passed: set[bool] = set()
        if seed % 2:
            self.handle(events.RestoreOrdered(ORDER))
        self.register_server()
        answer = self.handle(events.JobJoined(self.register(MemberRole.WORKER, ""), "w", self.settings))
        assert isinstance(answer, effects.Joined)
        self.caller = Caller(answer.job, self.worker)

    def handle(self, event: events.Event) -> object:
        try:
            found = self.machines.handle(event, self.now_ms)
        except ShardyardError as error:
            return error
        self.kinds |= {effect.kind for effect in found if isinstance(effect, effects.Persist)}
        self.under_way += [effect for effect in found if isinstance(effect, CALLS)]
        return next((effect.answer for effect in found if isinstance(effect, effects.Reply)), None)

    def register(self, role: MemberRole, address: str) -> Incarnation:
        answer = self.handle(events.MemberRegistered(Registration(role, address, 1, "0", "box", 7, logs="folder")))
        assert isinstance(answer, effects.Registered)
        if role is MemberRole.WORKER:
            self.worker = answer.incarnation
        return answer.incarnation

    def register_server(self) -> None:
        self.servers.append(self.register(MemberRole.SERVER, f"s:{self.random.randrange(3)}"))
        living = [member.incarnation for member in self.machines.machine.members]
        self.servers = [server for server in self.servers if server in living]

    def step(self) -> None:
        chance = self.random.random()
        if chance < 0.06 and len(self.servers) < 3:
            self.register_server()
        elif chance < 0.10 and self.servers:
            self.handle(events.MemberLeft(self.servers.pop(self.random.randrange(len(self.servers))), ""))
        elif chance < 0.13:
            self.machines.restart(self.now_ms)
        elif chance < 0.40:
            self.now_ms += self.random.choice((100, 200, 400, 900))
            for member in (*self.servers, self.worker):
                self.handle(events.HeartbeatReceived(member, Report()))
            self.handle(events.Ticked())
        elif chance < 0.65 and self.under_way:
            self.end(self.under_way.pop(self.random.randrange(len(self.under_way))))
        else:
            self.go_on()

    def end(self, call: effects.Effect) -> None:
        """What servers were asked is done, or was not."""
        done = self.random.random() < 0.8
        match call:
            case effects.CreatePartitions(spec, _, generation):
                created = events.PartitionsCreated(spec.job, generation)
                self.handle(created if done else events.NotAnswered(spec.job, call))
            case effects.OpenPartitions(job, _, generation):
                opened = events.PartitionsOpened(job, generation)
                self.handle(opened if done else events.NotAnswered(job, call))
            case effects.RestorePartitions(spec, map_):
                self.handle(events.PartitionsRestored(spec.job, map_.generation))
            case effects.TakeCheckpoint(spec, _, draft):
                self.handle(events.CheckpointTaken(spec.job, draft.number, draft.number + 20, draft.step))
            case effects.PaceServers(job, map_, consistency):
                self.handle(events.ServersPaced(job, map_.generation, consistency.number))

    def go_on(self) -> None:
        """The worker registers its variables, and commits first values; whichever it is let do."""
        placed = self.handle(events.VariablesRegistered(self.caller, VARIABLES, SGD))
        deployed = self.machines.machine.jobs[-1].deployment
        generation = deployed.generation or Generation(1)
        committed = self.handle(events.VariablesCommitted(self.caller, generation))
        through = (
            isinstance(placed, effects.VariablesPlaced) and not placed.initializer
        ) or committed == effects.Acknowledged()
        if through:
            keeping = self.machines.machine.jobs[-1]
            assert keeping.book.committed is not None
            assert not keeping.book.committed.url, "the checkpoint is another run's"
            self.passed.add(True)

    def run(self) -> None:
        for _ in range(BEGINNING_EVENTS):
            self.step()
            self.machines.check(self.now_ms)
        assert not self.machines.machine.jobs[-1].phase.ended


@pytest.mark.parametrize("seed", BEGINNINGS)
def test_job_with_logs_begins_whoever_dies_and_nobody_works_before_its_first_checkpoint(seed: int) -> None:
    Beginning(seed).run()


@pytest.mark.long
def test_beginnings_by_chance_write_records_of_every_kind() -> None:
    written: set[str] = set()
    through: list[bool] = []
    for seed in range(24):
        beginning = Beginning(seed)
        beginning.run()
        written |= beginning.kinds
        through.append(bool(beginning.passed))
    assert written >= BEGINNING_KINDS
    assert sum(through) > 12


# ---- a job that goes over between synchronous and asynchronous updates

CROSSINGS = [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 40))]
BACK = 24
"""Seeds from here on begin with data shards."""
CROSSING_EVENTS = 250
CROSSING_KINDS = {"switch_asked", "switch_settled", "switch_cancelled", "job_switched", "consistency_switched"}


class Crossing(Beginning):
    """One job that takes steps, and is told to go over, or to stay, or to go back, while servers come and go, and its
    coordinator may die. `stands`: before which step its partitions do, or their version."""

    settings = JobSettings(
        name="w",
        partitions=3,
        workers_expected=2,
        idle_ms=60_000,
        consistency=ConsistencySettings(mode=ConsistencyMode.SYNC, logical_ranks=2),
        data=DataSettings(batches_per_data_shard=2),
        checkpoint=CheckpointSettings(url="/own", every_s=1, keep=2),
    )

    def __init__(self, seed: int) -> None:
        self.stands = self.reached = 0
        self.halt: SwitchPoint | None = None
        self.left = Generation(0)
        self.told: set[str] = set()
        if seed >= BACK:
            consistency = self.settings.consistency.model_copy(update={"mode": ConsistencyMode.ASYNC})
            self.settings = self.settings.model_copy(update={"consistency": consistency})
        super().__init__(2 * seed)
        self.random = random.Random(f"crossing {seed}")

    @property
    def is_synchronous(self) -> bool:
        return self.machines.machine.jobs[-1].ranks is not None

    def step(self) -> None:
        job = self.machines.machine.jobs[-1]
        chance = self.random.random()
        if chance < 0.04:
            modes = (ConsistencyMode.ASYNC, ConsistencyMode.BOUNDED, ConsistencyMode.SYNC)
            modes = modes if self.is_synchronous else modes[1:] + modes[2:] * 4
            self.handle(events.SwitchRequested("w", self.random.choice(modes), None))
        elif chance < 0.30 and job.deployment.stage is Stage.OPEN and self.is_synchronous:
            self.handle(events.FeedOpened(self.caller, 0, FEEDS[1]))
            self._take_a_step()
        elif chance < 0.36 and not self.is_synchronous:
            self.handle(events.FeedOpened(self.caller, 0, FEEDS[1]))
            lease = self.handle(events.LeaseRequested(self.caller, 0))
            if isinstance(lease, DataLease):
                returned = events.LeaseReturned(self.caller, 0, lease.source, lease.token)
                self.handle(events.LedgerRead(returned, 2, job.deployment.generation or Generation(1)))
        elif chance < 0.46 + 0.1 * (not self.is_synchronous):
            number = self.halt.number if self.halt is not None else 0
            reached = 0 if self.halt is not None and self.halt.to_steps else self.reached
            halted = (self.random.choice((number, number, 1)), reached) if number else None
            standing = self.handle(
                events.HeartbeatReceived(self.worker, Report(self.stands, switch_reached=halted, switches=number))
            )
            assert isinstance(standing, effects.HeartbeatReply)
            self.halt = standing.switch_point
        else:
            super().step()

    def go_on(self) -> None:
        placed = self.handle(events.VariablesRegistered(self.caller, VARIABLES, SGD))
        generation = self.machines.machine.jobs[-1].deployment.generation or Generation(1)
        self.handle(events.VariablesCommitted(self.caller, generation))
        if isinstance(placed, effects.VariablesPlaced):
            assert placed.map.generation > self.left, "a map of partitions that the job has left"

    def _take_a_step(self) -> None:
        halt = self.halt
        if self.machines.machine.jobs[-1].recovery.needed:
            return
        if halt is None or (halt.settled and self.stands < halt.step):
            self.stands += 1
            self.reached = max(self.reached, self.stands)

    def end(self, call: effects.Effect) -> None:
        match call:
            case effects.ReadSteps(job, map_):
                lost = self.random.random() < 0.2
                read = events.StepsRead(job, map_.generation, self.stands)
                self.handle(events.NotAnswered(job, call) if lost else read)
            case effects.TakeCheckpoint(spec, _, draft) if self.is_synchronous:
                self.handle(events.CheckpointTaken(spec.job, draft.number, draft.number + 20, self.stands))
            case effects.RestorePartitions() if self.is_synchronous:
                super().end(call)
                committed = self.machines.machine.jobs[-1].book.committed
                assert committed is not None
                self.stands = committed.step
            case _:
                super().end(call)

    def run(self) -> None:
        for _ in range(CROSSING_EVENTS):
            was = self.is_synchronous
            self.step()
            self.machines.check(self.now_ms)
            job = self.machines.machine.jobs[-1]
            if was is not self.is_synchronous:
                committed = job.book.committed
                assert committed is not None
                if was:
                    assert committed.step == self.stands, "it went over from another step"
                else:
                    assert committed.step >= self.stands, "its first step has been before"
                    self.stands = self.reached = committed.step
                self.left = job.deployment.generation or Generation(0)
                self.told.add("went over" if was else "went back")
            if job.phase.ended:  # a server was gone before there was a checkpoint
                return


@functools.cache
def crossed(seed: int) -> Crossing:
    """Run to its end, once for all tests."""
    crossing = Crossing(seed)
    crossing.run()
    return crossing


@pytest.mark.parametrize("seed", CROSSINGS)
def test_job_that_goes_over_is_in_one_mode_whoever_dies(seed: int) -> None:
    crossed(seed)


@pytest.mark.long
def test_crossings_by_chance_write_records_of_every_kind() -> None:
    written: set[str] = set()
    told: list[str] = []
    for seed in range(40):
        crossing = crossed(seed)
        written |= crossing.kinds | {each.kind for each in crossing.machines.persisted}
        told += crossing.told
    assert written >= CROSSING_KINDS
    assert told.count("went over") >= 4
    assert told.count("went back") >= 2
