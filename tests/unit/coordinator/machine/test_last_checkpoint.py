"""The end of a job that is written down: its last checkpoint, and what becomes of a job that cannot have one; and
checkpoints that somebody asks for. Further scenarios: transcripts/last_checkpoint.txt."""

from __future__ import annotations

import pytest

from shardyard.config.settings import CheckpointSettings, ConsistencySettings, JobSettings
from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.errors import (
    InvalidRequest,
    JobFailed,
    NotFound,
    NotReady,
    ServerLost,
    ShardyardError,
    StorageUnavailable,
)
from shardyard.domain.ids import Caller, MemberRole
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.push_names import DataLease, DoneDataShards
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import JobPhase
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.work.feeds import FeedSpec
from tests.support.machine_yards import MachineYard

LEASE_MS = 1_000_000
VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)),)
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
SETTINGS = JobSettings(partitions=2, checkpoint=CheckpointSettings(every_s=0), idle_ms=20_000)
SYNC = JobSettings(
    partitions=2,
    checkpoint=CheckpointSettings(every_s=0),
    consistency=ConsistencySettings(mode=ConsistencyMode.SYNC),
    idle_ms=20_000,
)
FULL = StorageUnavailable("no space left")


class Yard(MachineYard):
    """A machine, and checkpoints that end as the test says."""

    def __init__(self, settings: JobSettings = SETTINGS, url: str | None = "somewhere") -> None:
        super().__init__(lease_ms=LEASE_MS, checkpoints=url)
        self.agent = self.register(MemberRole.AGENT, "a:1")
        self.taking: list[effects.TakeCheckpoint] = []
        self.forgetting: list[effects.ForgetSources] = []
        self.dropped = 0
        self.servers = [self.register(MemberRole.SERVER, f"s:{index}") for index in range(2)]
        self.worker = self.join(settings)
        self.open_job(self.worker, VARIABLES, SGD)

    def handle(self, event: events.Event) -> object:
        answer = super().handle(event)
        for effect in self.effects:
            match effect:
                case effects.TakeCheckpoint():
                    self.taking.append(effect)
                case effects.ForgetSources():
                    self.forgetting.append(effect)
                case effects.DropJob():
                    self.dropped += 1
                case _:
                    pass
        return answer

    def join(self, settings: JobSettings = SETTINGS) -> Caller:
        return self.join_as(self.register(MemberRole.WORKER), settings)

    def lease(self, worker: Caller) -> DataLease:
        answer = self.handle(events.LeaseRequested(worker, 0))
        assert isinstance(answer, DataLease)
        return answer

    def close(self, worker: Caller, lease: DataLease) -> None:
        returned = events.LeaseReturned(worker, 0, lease.source, lease.token)
        self.handle(returned)
        self.handle(events.LedgerRead(returned, 99))

    def restart(self, *, from_snapshot: bool = False) -> list[effects.Effect]:
        """Another coordinator goes on from the records."""
        self.taking = []
        return super().restart(from_snapshot=from_snapshot)

    def report(self, step: int) -> None:
        self.handle(events.HeartbeatReceived(self.worker.incarnation, Report(step=step)))

    def tick(self, ms: int = 100) -> None:
        self.now_ms += ms
        self.handle(events.Ticked())

    def commit(self) -> None:
        taken = self.taking.pop(0)
        self.handle(events.CheckpointTaken(self.worker.job, taken.draft.number, taken.draft.number, taken.draft.step))

    def break_off(self, failure: ShardyardError = FULL) -> None:
        self.handle(events.CheckpointFailed(self.worker.job, self.taking.pop(0).draft.number, failure))

    def kill_worker(self) -> None:
        members = self.machine.members
        pid = next(each.registration.pid for each in members if each.incarnation == self.worker.incarnation)
        self.handle(events.ExitReported(self.agent, pid, -9))

    def leave(self) -> None:
        self.handle(events.MemberLeft(self.worker.incarnation, ""))

    def ask(self, ticket: int = 0, name: str = "") -> effects.CheckpointProgress:
        answer = self.handle(events.CheckpointRequested(None, name, ticket))
        assert isinstance(answer, effects.CheckpointProgress)
        return answer

    @property
    def state(self) -> JobPhase:
        return self.machine.jobs[-1].phase


def begun(settings: JobSettings = SETTINGS) -> Yard:
    """With a first checkpoint, of step 0."""
    yard = Yard(settings)
    yard.tick()
    yard.commit()
    return yard


# ---- the last one


@pytest.mark.parametrize("settings", [SETTINGS, SYNC])
def test_job_is_finished_when_its_last_checkpoint_is_committed(settings: JobSettings) -> None:
    yard = begun(settings)
    yard.report(step=40)
    yard.leave()
    assert (yard.state, yard.dropped) == (JobPhase.FINISHING, 0)
    yard.tick()
    assert yard.taking[0].draft.step == 40
    yard.commit()
    assert (yard.state, yard.dropped) == (JobPhase.FINISHED, 2)


def test_job_that_is_not_written_down_ends_at_once() -> None:
    yard = Yard(url=None)
    yard.report(step=40)
    yard.leave()
    assert yard.state is JobPhase.FINISHED


@pytest.mark.parametrize("failure", [StorageUnavailable("no space left"), NotReady("server 1.2 does not answer")])
def test_job_whose_last_checkpoint_fails_tries_again_for_its_idle_time_and_says_so(failure: ShardyardError) -> None:
    """What came after the newest one would be lost with the job."""
    yard = begun()
    yard.report(step=40)
    yard.leave()
    for number in range(4):
        assert yard.state is JobPhase.FINISHING
        yard.tick(1_000 << number)
        yard.break_off(failure)
    assert yard.state is JobPhase.FINISHING
    said = f"its last checkpoint, which failed at last by: {failure.what}; it ends without after 20 s"
    assert any(said in text for text in yard.told)
    yard.tick(SETTINGS.idle_ms)
    assert yard.state is JobPhase.FINISHED
    late = f"without its last checkpoint: it was not written within 20 s, which failed at last by: {failure.what}"
    assert any(late in text for text in yard.told)


@pytest.mark.parametrize("restarts", [False, True])
def test_job_whose_workers_are_gone_for_good_is_written_down_before_it_fails(restarts: bool) -> None:
    yard = begun()
    yard.report(step=40)
    yard.kill_worker()
    yard.tick(SETTINGS.idle_ms - 1)
    assert yard.state is JobPhase.RUNNING
    yard.tick(1)
    assert yard.state is JobPhase.FINISHING
    if restarts:
        yard.restart()
    yard.tick()
    yard.commit()
    assert (yard.state, yard.dropped) == (JobPhase.FAILED, 2)
    failure = yard.machine.jobs[-1].failure
    assert failure is not None
    assert "has had no worker for 20 s" in failure.what


def test_job_whose_workers_are_gone_for_good_fails_at_once_where_partitions_have_no_server() -> None:
    yard = begun()
    yard.report(step=40)
    yard.kill_worker()
    for server in yard.servers:
        yard.handle(events.MemberLeft(server, ""))
    yard.tick(SETTINGS.idle_ms)
    assert yard.state is JobPhase.FAILED


def test_script_that_is_started_again_at_once_does_not_join_the_job_that_ends() -> None:
    yard = begun()
    yard.report(step=40)
    yard.leave()
    former = yard.worker.job
    again = yard.register(MemberRole.WORKER)
    join = events.JobJoined(again, SETTINGS.name, SETTINGS)
    with pytest.raises(NotReady, match="writes its last checkpoint"):
        yard.handle(join)
    yard.tick()
    yard.commit()
    answer = yard.handle(join)
    assert isinstance(answer, effects.Joined)
    assert (answer.started, answer.job > former) == (True, True)


def test_server_that_dies_before_the_last_checkpoint_is_recovered_from_first() -> None:
    yard = begun()
    yard.report(step=40)
    yard.leave()
    yard.tick()
    late = yard.taking.pop()
    yard.handle(events.MemberLeft(yard.servers[0], ""))
    yard.handle(events.CheckpointTaken(yard.worker.job, late.draft.number, 9, 40))
    assert yard.state is JobPhase.FINISHING, "it was broken off"
    yard.tick(5_000)
    attempt = yard.machine.jobs[0].recovery.attempt
    assert attempt is not None
    yard.handle(events.PartitionsRestored(yard.worker.job, attempt.map.generation))
    yard.tick()
    yard.commit()
    assert yard.state is JobPhase.FINISHED


# ---- on command


def test_checkpoint_that_is_asked_for_is_taken_and_told() -> None:
    yard = begun()
    yard.report(step=7)
    first = yard.ask()
    assert (first.taken, first.failure, first.job_name, first.url) == (None, None, SETTINGS.name, "somewhere")
    yard.tick()
    assert yard.ask(first.ticket).taken is None
    yard.commit()
    taken = yard.ask(first.ticket).taken
    assert taken is not None
    assert (taken.number, taken.step) == (2, 7)


def test_failure_of_a_checkpoint_is_told_to_who_asked() -> None:
    yard = begun()
    ticket = yard.ask().ticket
    yard.tick()
    yard.break_off()
    assert yard.ask(ticket).failure is FULL


def test_ticket_is_good_for_a_job_that_has_ended_meanwhile() -> None:
    yard = begun()
    yard.report(step=7)
    ticket = yard.ask().ticket
    yard.leave()
    yard.tick()
    yard.commit()
    assert yard.state is JobPhase.FINISHED
    taken = yard.ask(ticket, SETTINGS.name).taken
    assert taken is not None
    assert taken.step == 7


def test_nobody_is_written_down_who_cannot_be() -> None:
    yard = begun()
    with pytest.raises(NotFound, match="no job 'other'"):
        yard.ask(name="other")
    other = yard.join(JobSettings(name="other", checkpoint=CheckpointSettings(url="never")))
    with pytest.raises(InvalidRequest, match="2 jobs run: 'default', 'other'"):
        yard.ask()
    with pytest.raises(InvalidRequest, match="has no checkpoints"):
        yard.handle(events.CheckpointRequested(other, "", 0))
    third = yard.join(JobSettings(name="third"))
    with pytest.raises(NotReady, match="no values yet"):
        yard.handle(events.CheckpointRequested(third, "", 0))


def test_ticket_of_a_job_that_failed_brings_its_failure() -> None:
    yard = Yard()
    ticket = yard.ask().ticket
    yard.handle(events.MemberLeft(yard.servers[0], ""))
    with pytest.raises(JobFailed) as caught:
        yard.ask(ticket, SETTINGS.name)
    assert isinstance(caught.value, ServerLost)


# ---- what servers may forget (rule A7)


@pytest.mark.parametrize("restarts", [False, True])
def test_servers_forget_what_was_closed_when_a_committed_checkpoint_was_begun(restarts: bool) -> None:
    yard = begun()
    other = yard.join()
    yard.handle(events.FeedOpened(yard.worker, 0, FeedSpec(100, "f", 10, 1, shuffle=False, drop_last=False)))
    first, held = yard.lease(yard.worker), yard.lease(other)
    yard.close(yard.worker, first)
    second = yard.lease(yard.worker)
    yard.close(yard.worker, second)
    if restarts:
        yard.restart()
    yard.ask()
    yard.tick()
    assert yard.taking[0].draft.floor == held.token
    third = yard.lease(yard.worker)
    yard.close(yard.worker, third)  # too late for this one
    yard.commit()
    told = yard.forgetting[-1]
    assert (told.done, told.floor, told.workers) == ((DoneDataShards(0, 5, 3, frozenset({1})),), held.token, ())
    assert [first.source in told.done[0], held.source in told.done[0], third.source in told.done[0]] == [
        True,
        False,
        False,
    ]


def test_sources_of_workers_are_forgotten_when_nothing_more_can_come_from_them() -> None:
    yard = begun()
    left, dead = yard.join(), yard.join()
    yard.handle(events.MemberLeft(left.incarnation, ""))
    yard.kill(dead.incarnation)
    assert dead.incarnation in yard.machine.jobs[0].roster.fencing
    yard.ask()
    yard.tick()
    yard.commit()
    assert yard.forgetting[-1].workers == (left.incarnation,)
    yard.handle(events.WorkersFenced(yard.worker.job, (dead.incarnation,)))
    yard.ask()
    yard.tick()
    yard.commit()
    assert yard.forgetting[-1].workers == (left.incarnation, dead.incarnation)


def test_ranks_are_not_forgotten() -> None:
    yard = begun(SYNC)
    yard.ask()
    yard.tick()
    assert yard.taking[0].draft.floor == 0
    yard.commit()
    assert yard.forgetting == []
