"""Jobs whose servers keep logs: whose log brings back what, who may read it, when work begins. With restarts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import TypeVar

import pytest

from shardyard.checkpoints.manifest import FileRef, ResidualFile
from shardyard.config.settings import CheckpointSettings, ConsistencySettings, JobSettings
from shardyard.domain.consistency import ConsistencyMode, Durability, UpdateMode
from shardyard.domain.errors import (
    CheckpointDamaged,
    LogDamaged,
    NotFound,
    NotReady,
    ShardyardError,
    StaleGeneration,
    StorageUnavailable,
)
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, MemberRole, PartitionId, Token
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.variables import DType, VariableSpec
from shardyard.storage.storage import Written
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import JobPhase
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.placement.placement import plan
from shardyard_coordinator.records import Body, DamagedRecord
from shardyard_coordinator.storage.log_owners import LogOwner, LogOwners
from shardyard_coordinator.storage.recovery import SERVER_GRACE_MS
from shardyard_coordinator.storage.restore_point import RestorePoint
from shardyard_coordinator.work.feeds import FeedDone, FeedSpec
from tests.support.machine_yards import MachineYard

T = TypeVar("T")
LEASE_MS = 1_000
SGD = OptimizerSpec("sgd", (make_group("sgd", {"lr": 0.1}),))
VARIABLES = tuple(VariableSpec(f"w{number}", DType.FLOAT32, (16,)) for number in range(4))
HERE, THERE = "folder-a", "folder-b"
FIRST, SECOND, THIRD = Incarnation(1), Incarnation(2), Incarnation(3)
P, Q = PartitionId(0), PartitionId(1)


def settings(mode: UpdateMode = UpdateMode.ASYNC, **checkpoint: int) -> JobSettings:
    return JobSettings(
        partitions=4,
        block_bytes=64,
        durability=Durability.WAL,
        checkpoint=CheckpointSettings(url="/checkpoints", keep=2, **checkpoint),
        consistency=ConsistencySettings(mode=ConsistencyMode(mode.value)),
    )


class Yard(MachineYard):
    """A machine with servers, and what it wanted."""

    def __init__(self, *logs: str) -> None:
        super().__init__(lease_ms=LEASE_MS)
        self._addresses = itertools.count()
        self.servers = [self.add_server(where) for where in logs]
        self.others: list[Incarnation] = []

    def add_server(self, logs: str) -> Incarnation:
        return self.register(MemberRole.SERVER, f"s:{next(self._addresses)}", logs=logs)

    def join(self, given: JobSettings) -> Caller:
        worker = self.register(MemberRole.WORKER)
        self.others.append(worker)
        return self.join_as(worker, given)

    def variables(self, caller: Caller) -> object:
        return self.handle(events.VariablesRegistered(caller, VARIABLES, SGD))

    def open(self, given: JobSettings | None = None) -> Caller:
        """Up to first values on the servers, before any checkpoint."""
        caller = self.join(given or settings())
        self.open_job(caller, VARIABLES, SGD)
        return caller

    def run(self, given: JobSettings | None = None) -> Caller:
        caller = self.open(given)
        self.take(caller, 1)
        return caller

    def take(self, caller: Caller, number: int) -> effects.TakeCheckpoint:
        """The checkpoint that is wanted next, written."""
        wanted = self.until(effects.TakeCheckpoint)
        self.handle(events.CheckpointTaken(caller.job, wanted.draft.number, number, 0))
        return wanted

    def until(self, kind: type[T]) -> T:
        """Time passes until the machine wants that."""
        for _ in range(1_000):
            for effect in self.tick():
                if isinstance(effect, kind):
                    return effect
        raise AssertionError(f"no {kind.__name__}")

    def tick(self, *, silent: Sequence[Incarnation] = ()) -> list[effects.Effect]:
        self.now_ms += 100
        for member in (*self.servers, *self.others):
            if member not in silent:
                self.handle(events.HeartbeatReceived(member, Report()))
        self.handle(events.Ticked())
        return self.effects

    def kill(self, server: Incarnation) -> None:
        self.servers.remove(server)
        while any(member.incarnation == server for member in self.machine.members):
            self.tick()

    def owned(self, caller: Caller, server: Incarnation) -> set[PartitionId]:
        placed = self.variables(caller)
        assert isinstance(placed, effects.VariablesPlaced)
        return {owner.partition for owner in placed.map.owners if owner.server == server}

    def state(self) -> JobPhase:
        return self.machine.jobs[-1].phase


@pytest.fixture(params=[None, False, True], ids=["no-restart", "from-all-records", "from-the-snapshot"])
def short(request: pytest.FixtureRequest) -> bool | None:
    found: bool | None = request.param
    return found


def perhaps_restart(yard: Yard, short: bool | None) -> None:
    if short is not None:
        yard.restart(from_snapshot=short)


# ---- when work begins


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_nobody_works_before_the_first_checkpoint(mode: UpdateMode) -> None:
    yard = Yard(HERE)
    caller = yard.open(settings(mode))
    other = yard.join(settings(mode))
    with pytest.raises(NotReady, match="first checkpoint"):
        yard.handle(events.VariablesCommitted(caller))
    with pytest.raises(NotReady, match="first checkpoint"):
        yard.variables(other)
    yard.take(caller, 1)
    assert isinstance(yard.handle(events.VariablesCommitted(caller)), effects.Acknowledged)
    assert isinstance(yard.variables(other), effects.VariablesPlaced)


def test_the_next_initializer_is_told_before_there_is_a_checkpoint() -> None:
    yard = Yard(HERE)
    caller = yard.join(settings())
    yard.variables(caller)
    yard.handle(events.PartitionsCreated(caller.job))
    other = yard.join(settings())
    with pytest.raises(NotReady, match="first checkpoint"):
        yard.variables(other)
    yard.handle(events.MemberLeft(caller.incarnation, ""))
    yard.others.remove(caller.incarnation)
    yard.handle(events.WorkersFenced(caller.job, (caller.incarnation,)))
    placed = yard.variables(other)
    assert isinstance(placed, effects.VariablesPlaced)
    assert placed.initializer


def test_partitions_are_created_with_a_log() -> None:
    yard = Yard(HERE)
    yard.variables(yard.join(settings()))
    (wanted,) = [each for each in yard.effects if isinstance(each, effects.CreatePartitions)]
    assert wanted.spec.settings.durability is Durability.WAL


# ---- servers that die before there is a checkpoint


def begin(yard: Yard, mode: UpdateMode, *, feedback: bool = False) -> Caller:
    """A run that begins with a checkpoint of another one, up to where its partitions are restored."""
    files = (ResidualFile("8", FileRef("000000000007/worker-8.safetensors", Written(9, "a" * 64))),) if feedback else ()
    ledger = {"entries": [], "closed": 0, "token": 44}
    layout = plan(VARIABLES, SGD, partitions=4, block_bytes=64)
    job, mode_of = JobId((1 << 32) + 5), settings(mode)
    ranks = mode_of.logical_rank_count
    yard.handle(
        events.RestoreOrdered(
            RestorePoint(
                "default", "/elsewhere", 7, job, 60, mode, ranks, 99, layout, ledger, Token(44), Token(0), 0, files
            )
        )
    )
    caller = yard.join(mode_of)
    restored(yard, caller)
    return caller


def restored(yard: Yard, caller: Caller) -> effects.RestorePartitions:
    wanted = yard.until(effects.RestorePartitions)
    yard.handle(events.PartitionsRestored(caller.job, wanted.map.generation))
    return wanted


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_nobody_works_before_the_first_checkpoint_of_a_run_that_began_with_another_ones(
    mode: UpdateMode, short: bool | None
) -> None:
    yard = Yard(HERE)
    caller = begin(yard, mode)
    perhaps_restart(yard, short)
    with pytest.raises(NotReady, match="begins when its first checkpoint is written"):
        yard.variables(caller)
    with pytest.raises(NotReady, match="begins with a checkpoint at this moment"):
        yard.handle(events.RestoreCancelled("default"))
    taken = yard.take(caller, 8)
    assert (taken.oldest, taken.logs) == (0, set(yard.servers))
    assert isinstance(yard.variables(caller), effects.VariablesPlaced)
    with pytest.raises(NotFound, match="no restore was ordered"):
        yard.handle(events.RestoreCancelled("default"))


@pytest.mark.parametrize("where", [HERE, THERE])
@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("writing", [False, True])
def test_run_that_began_with_a_checkpoint_begins_again_if_a_server_dies_before_its_first_one(
    mode: UpdateMode, writing: bool, where: str, short: bool | None
) -> None:
    """Whoever has the logs: nothing is in them."""
    yard = Yard(HERE, HERE)
    caller = begin(yard, mode)
    late = yard.until(effects.TakeCheckpoint) if writing else None
    gone = yard.servers[0]
    yard.kill(gone)
    perhaps_restart(yard, short)
    yard.servers.append(yard.add_server(where))
    again = restored(yard, caller)
    assert (again.url, [base.number for base in again.bases]) == ("/elsewhere", [7])
    assert not again.bases[0].logs
    assert again.partitions == set(range(4)), "with all partitions"
    assert again.life > 2
    assert gone not in {owner.server for owner in again.map.owners}
    perhaps_restart(yard, short)
    assert yard.state() is JobPhase.RUNNING
    if late is not None:
        yard.handle(events.CheckpointTaken(caller.job, late.draft.number, 8, 60))
    with pytest.raises(NotReady, match="begins when its first checkpoint is written"):
        yard.variables(caller)
    assert yard.take(caller, 9).logs == set(yard.servers)
    assert isinstance(yard.variables(caller), effects.VariablesPlaced)
    # from here on the logs have it
    lost, last = yard.owned(caller, yard.servers[0]), yard.servers[0]
    yard.kill(last)
    perhaps_restart(yard, short)
    yard.servers.append(yard.add_server(HERE))
    wanted = yard.until(effects.RestorePartitions)
    assert wanted.partitions == lost
    assert [(base.number, dict(base.logs)) for base in wanted.bases] == [(9, dict.fromkeys(lost, (last,)))]


def test_what_nobody_has_taken_up_does_not_keep_a_run_from_beginning(short: bool | None) -> None:
    yard = Yard(HERE)
    caller = begin(yard, UpdateMode.ASYNC, feedback=True)
    perhaps_restart(yard, short)
    yard.take(caller, 8)
    placed = yard.variables(caller)
    assert isinstance(placed, effects.VariablesPlaced)
    assert [each.file.worker for each in placed.feedback] == ["8"]


STAGES = ["placed", "created", "committed", "open", "writing"]


def come_to(yard: Yard, stage: str, given: JobSettings) -> Caller:
    """A job with first values, at a stage of its beginning."""
    caller = yard.join(given)
    steps: list[tuple[str, events.Event]] = [
        ("placed", events.VariablesRegistered(caller, VARIABLES, SGD)),
        ("created", events.PartitionsCreated(caller.job)),
        ("committed", events.VariablesCommitted(caller)),
        ("open", events.PartitionsOpened(caller.job)),
    ]
    for name, event in steps[: STAGES.index(stage) + 1]:
        yard.handle(event)
        if name == "created":
            yard.variables(caller)
    if stage == "writing":
        yard.until(effects.TakeCheckpoint)
    return caller


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", list(UpdateMode))
def test_first_values_are_given_again_if_a_server_dies_before_the_first_checkpoint(
    mode: UpdateMode, stage: str, short: bool | None
) -> None:
    yard = Yard(HERE, HERE)
    caller = come_to(yard, stage, settings(mode))
    gone, kept = yard.servers
    yard.kill(gone)
    perhaps_restart(yard, short)
    assert yard.state() is JobPhase.STARTING
    with pytest.raises(NotReady, match="first values"):
        yard.variables(caller)
    assert yard.machine.jobs[-1].recovery.needed
    fresh = yard.add_server(THERE)
    yard.servers.append(fresh)
    while yard.machine.jobs[-1].recovery.needed:
        yard.tick()
    perhaps_restart(yard, short)
    generation = yard.machine.jobs[-1].deployment.generation
    assert generation is not None
    assert generation > 1
    with pytest.raises(StaleGeneration, match="first values of generation 1"):
        yard.handle(events.VariablesCommitted(caller))
    assert yard.variables(caller) is None
    wanted = [each for each in yard.effects if isinstance(each, effects.CreatePartitions)]
    assert {each.server.incarnation: each.generation for each in wanted} == {kept: generation, fresh: generation}
    yard.handle(events.PartitionsCreated(caller.job))  # answers of before mean nothing
    with pytest.raises(NotReady, match="given their partitions"):
        yard.variables(caller)
    yard.handle(events.PartitionsCreated(caller.job, generation))
    placed = yard.variables(caller)
    assert isinstance(placed, effects.VariablesPlaced)
    assert placed.initializer, "who gave them gives them again"
    yard.handle(events.VariablesCommitted(caller, generation))
    yard.handle(events.PartitionsOpened(caller.job))
    assert yard.state() is JobPhase.STARTING
    yard.handle(events.PartitionsOpened(caller.job, generation))
    assert yard.state() is JobPhase.RUNNING
    assert yard.take(caller, 3).logs == {kept, fresh}
    assert isinstance(yard.handle(events.VariablesCommitted(caller, generation)), effects.Acknowledged)


def test_first_values_that_are_in_a_checkpoint_are_not_given_again_when_partitions_move(short: bool | None) -> None:
    """The answer to who gave them was lost."""
    yard = Yard(HERE)
    caller = yard.run()
    yard.kill(yard.servers[0])
    perhaps_restart(yard, short)
    yard.servers.append(yard.add_server(HERE))
    restored(yard, caller)
    assert yard.handle(events.VariablesCommitted(caller, Generation(1))) == effects.Acknowledged()


def test_another_worker_gives_first_values_if_who_gave_them_is_gone_too(short: bool | None) -> None:
    yard = Yard(HERE)
    caller = come_to(yard, "open", settings())
    other = yard.join(settings())
    yard.handle(events.MemberLeft(caller.incarnation, "a fault"))
    yard.others.remove(caller.incarnation)
    yard.handle(events.MemberLeft(yard.servers.pop(), ""))
    perhaps_restart(yard, short)
    yard.handle(events.WorkersFenced(caller.job, (caller.incarnation,)))
    yard.servers.append(yard.add_server(HERE))
    while yard.machine.jobs[-1].recovery.needed:
        yard.tick()
    yard.variables(other)
    yard.handle(events.PartitionsCreated(caller.job, Generation(2)))
    placed = yard.variables(other)
    assert isinstance(placed, effects.VariablesPlaced)
    assert placed.initializer


def test_job_that_ends_before_its_first_checkpoint_ends_if_a_server_dies() -> None:
    """There is nobody who could give first values again."""
    yard = Yard(HERE)
    caller = come_to(yard, "open", settings())
    yard.handle(events.MemberLeft(caller.incarnation, ""))
    yard.others.clear()
    assert yard.state() is JobPhase.FINISHING
    yard.kill(yard.servers[0])
    assert yard.state() is JobPhase.FAILED


# ---- servers that die


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_only_what_was_lost_is_brought_back_from_the_log(mode: UpdateMode, short: bool | None) -> None:
    yard = Yard(HERE, HERE)
    caller = yard.run(settings(mode))
    lost = yard.owned(caller, yard.servers[1])
    gone = yard.servers[1]
    yard.kill(gone)
    perhaps_restart(yard, short)
    wanted = yard.until(effects.RestorePartitions)
    assert wanted.partitions == lost
    (base,) = wanted.bases
    assert base.number == 1
    assert dict(base.logs) == dict.fromkeys(lost, (gone,))
    yard.handle(events.PartitionsRestored(caller.job, wanted.map.generation))
    assert yard.owned(caller, yard.servers[0]) == set(range(4))
    # another checkpoint, so that the next one to read has little to read
    taken = yard.until(effects.TakeCheckpoint)
    assert (taken.oldest, taken.logs) == (1, {gone, yard.servers[0]})


def test_a_server_that_cannot_read_the_log_gets_nothing(short: bool | None) -> None:
    yard = Yard(HERE, THERE)
    caller = yard.run()
    lost = yard.owned(caller, yard.servers[0])
    yard.kill(yard.servers[0])
    perhaps_restart(yard, short)
    for _ in range(3 * SERVER_GRACE_MS // 100):
        assert not [each for each in yard.tick() if isinstance(each, effects.RestorePartitions)]
    recovery = yard.machine.jobs[-1].recovery
    numbers = ", ".join(map(str, sorted(lost)))
    assert recovery.waits_for == f"a server that reaches the logs in folder {HERE}, for partition {numbers}"
    fresh = yard.add_server(HERE)
    yard.servers.append(fresh)
    wanted = yard.until(effects.RestorePartitions)
    assert not recovery.waits_for or short is not None
    assert {owner.partition for owner in wanted.map.owners if owner.server == fresh} == lost


def test_logs_of_all_who_owned_a_partition_are_read(short: bool | None) -> None:
    yard = Yard(HERE)
    caller = yard.run()
    gone = []
    for _ in range(2):
        gone.append(yard.servers[0])
        yard.kill(yard.servers[0])
        yard.servers.append(yard.add_server(HERE))
        wanted = yard.until(effects.RestorePartitions)
        assert wanted.bases[0].logs[P] == tuple(gone)
        yard.handle(events.PartitionsRestored(caller.job, wanted.map.generation))
        perhaps_restart(yard, short)
    # the checkpoint that follows was never written; the next two leave the log of the first behind
    yard.machine.jobs[-1].book.want()
    first = yard.take(caller, 5)
    assert first.logs == {*gone, *yard.servers}
    yard.machine.jobs[-1].book.want()
    second = yard.take(caller, 6)
    assert (second.oldest, second.logs) == (1, {*gone, *yard.servers})
    perhaps_restart(yard, short)
    yard.machine.jobs[-1].book.want()
    third = yard.take(caller, 7)
    assert (third.oldest, third.logs) == (5, set(yard.servers))


def test_older_checkpoints_are_offered_too(short: bool | None) -> None:
    yard = Yard(HERE)
    caller = yard.run()
    book = yard.machine.jobs[-1].book
    for number in (2, 3):
        book.want()
        yard.take(caller, number)
    gone = yard.servers[0]
    yard.kill(gone)
    perhaps_restart(yard, short)
    yard.servers.append(yard.add_server(HERE))
    wanted = yard.until(effects.RestorePartitions)
    assert [base.number for base in wanted.bases] == [3, 2]
    assert all(base.logs[P] == (gone,) for base in wanted.bases)


@pytest.mark.parametrize("failure", [LogDamaged("flipped"), CheckpointDamaged("flipped"), StorageUnavailable("gone")])
def test_damage_ends_the_job_and_an_absent_storage_does_not(failure: ShardyardError) -> None:
    yard = Yard(HERE)
    caller = yard.run()
    yard.kill(yard.servers[0])
    yard.servers.append(yard.add_server(HERE))
    wanted = yard.until(effects.RestorePartitions)
    yard.handle(events.RestoreFailed(caller.job, wanted.map.generation, failure))
    if isinstance(failure, StorageUnavailable):
        again = yard.until(effects.RestorePartitions)
        assert again.map.generation > wanted.map.generation
        assert again.bases == wanted.bases
    else:
        assert yard.state() is JobPhase.FAILED


def test_closed_data_stays_closed(short: bool | None) -> None:
    """What was acknowledged comes back, so nothing is computed again, and nobody waits for a checkpoint at the end."""
    yard = Yard(HERE)
    caller = yard.run()
    yard.handle(events.FeedOpened(caller, 0, FeedSpec(4, "f", 2, 1, shuffle=False, drop_last=False)))
    for _ in range(2):
        lease = yard.handle(events.LeaseRequested(caller, 0))
        if isinstance(lease, FeedDone):
            break
        returned = events.LeaseReturned(caller, 0, lease.source, lease.token)  # type: ignore[attr-defined]
        yard.handle(returned)
        yard.handle(events.LedgerRead(returned, 2))
    yard.kill(yard.servers[0])
    perhaps_restart(yard, short)
    yard.servers.append(yard.add_server(HERE))
    wanted = yard.until(effects.RestorePartitions)
    yard.handle(events.PartitionsRestored(caller.job, wanted.map.generation))
    assert isinstance(yard.handle(events.LeaseRequested(caller, 0)), FeedDone)


def test_a_long_log_asks_for_a_checkpoint() -> None:
    yard = Yard(HERE)
    caller = yard.run(settings(every_log_bytes=1_000, every_s=0))

    def grow(nbytes: int) -> list[effects.Effect]:
        yard.handle(events.HeartbeatReceived(yard.servers[0], Report(), ((caller.job, nbytes),)))
        return [each for each in yard.tick() if isinstance(each, effects.TakeCheckpoint)]

    assert not grow(999)
    assert grow(1_000)
    assert not grow(2_000)  # one is being taken


# ---- trails


def test_logs_needed_are_those_since_the_checkpoint() -> None:
    trails = LogOwners(keep=2)
    trails.begin({P: LogOwner(FIRST, 0, HERE), Q: LogOwner(SECOND, 0, HERE)})
    trails.commit(1)
    trails.commit(4)
    trails.move({P: LogOwner(THIRD, 4, HERE)})
    assert trails.of(P, 4) == (FIRST, THIRD)
    assert trails.of(P, 1) == (FIRST, THIRD)
    assert trails.of(Q, 4) == (SECOND,)
    trails.commit(5)
    assert trails.of(P, 5) == (THIRD,)
    assert trails.of(P, 4) == (FIRST, THIRD)
    assert (trails.oldest, trails.needed) == (4, {FIRST, SECOND, THIRD})
    trails.commit(6)
    assert (trails.oldest, trails.needed) == (5, {SECOND, THIRD})
    again = LogOwners(keep=2)
    ((_, body),) = trails.entries()
    again.restore(Body(json.loads(json.dumps(body))))
    assert again.entries() == trails.entries()
    trails.begin({P: LogOwner(FIRST, 5, HERE)})
    assert trails.of(P, 5) == (FIRST,)


@pytest.mark.parametrize("owner", [[0, 1, 0], [0, 0, 0, "a"], ["x", 1, 0, "a"], [0, 1, -1, "a"], [0, 1, 0, 7]])
def test_spoilt_owners_are_refused(owner: list[object]) -> None:
    with pytest.raises(DamagedRecord):
        LogOwners(keep=2).restore(Body({"owners": [owner], "kept": []}))
