"""A job that is told to stop: who decides, where a synchronous one ends, what a restart brings back."""

from __future__ import annotations

import pytest

from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain import errors, limits
from shardyard.domain.consistency import ConsistencyMode, Stop
from shardyard.domain.ids import Caller, Generation, Incarnation, MemberRole, PartitionId, Rank, Token, Version
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.push_names import RankSource, SourceKey, Watermark
from shardyard.domain.variables import DType, VariableSpec
from shardyard.wire import lease_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import JobState, StopTaken
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.members.roster import LATE_MS
from shardyard_coordinator.modes.stopping import Stopping
from shardyard_coordinator.service import ledger_replies
from shardyard_coordinator.service.rpcs import jobs, members
from shardyard_coordinator.storage.checkpoint_book import Committed
from shardyard_coordinator.work.feeds import FeedSpec
from tests.support.machine_yards import MachineYard

VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)),)
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
ASYNC = JobSettings(partitions=2)
SYNC = JobSettings(
    partitions=2, consistency=ConsistencySettings(mode=ConsistencyMode.SYNC), workers_expected=2, rank_grace_ms=0
)
FEED = FeedSpec(samples=100, fingerprint="f", batch_size=10, epochs=1, shuffle=True, drop_last=False)


class Yard(MachineYard):
    def __init__(self, settings: JobSettings, workers: int = 2, checkpoints: str | None = None) -> None:
        super().__init__(checkpoints=checkpoints)
        self.reads: list[effects.Effect] = []
        self.server = self.register(MemberRole.SERVER, "s:0")
        self.settings = settings
        self.workers = [self.join() for _ in range(workers)]
        self.open_job(self.workers[0], VARIABLES, SGD)

    def handle(self, event: events.Event) -> object:
        answer = super().handle(event)
        self.reads += self.wanted(effects.ReadSteps)
        return answer

    def join(self) -> Caller:
        return self.join_as(self.register(MemberRole.WORKER), self.settings)

    def stop(self, caller: Caller | None = None, reason: str = "") -> StopTaken:
        answer = self.handle(events.StopRequested(caller, "" if caller else self.settings.name, reason))
        assert isinstance(answer, StopTaken)
        return answer

    def say(self, caller: Caller, reached: int | None = None, step: int = 0) -> effects.HeartbeatReply:
        return self.beat(caller.incarnation, Report(step=step, reached=reached))

    def read(self, step: int) -> Stop | None:
        """The servers have said how far the job is."""
        (read,) = self.wanted(effects.ReadSteps)
        assert isinstance(read, effects.ReadSteps)
        assert [key.source for key in read.sources] == [RankSource(Rank(0)), RankSource(Rank(1))]
        self.handle(events.StepsRead(read.job, read.map.generation, step))
        return self.stops

    def leave(self, caller: Caller, error: str = "") -> None:
        self.handle(events.MemberLeft(caller.incarnation, error))

    def advance(self, ms: int) -> None:
        """Time passes, and all that there are beat."""
        for _ in range(0, ms, 100):
            self.now_ms += 100
            for member in self.machine.members:
                self.beat(member.incarnation)
            self.handle(events.Ticked())

    @property
    def stops(self) -> Stop | None:
        return self.machine.jobs[-1].stopping.stop


# ---- who decides


def test_a_worker_or_a_person_stops_a_job_and_all_workers_hear_of_it() -> None:
    for asker in (0, None):
        yard = Yard(ASYNC)
        caller = None if asker is None else yard.workers[asker]
        taken = yard.stop(caller, "enough")
        assert (taken.first, taken.stop) == (True, Stop("enough", caller and caller.incarnation, True, 0))
        assert [yard.say(worker).stop for worker in yard.workers] == [taken.stop] * 2
        who = f"worker {caller.incarnation}" if caller else "a person"
        assert f"is told to stop by {who}: enough" in yard.told[-1]


def test_the_first_to_say_so_decides() -> None:
    yard = Yard(ASYNC)
    first = yard.stop(yard.workers[1], "loss is nan")
    again = yard.stop(None, "tea")
    assert (again.first, again.stop) == (False, first.stop)
    assert not yard.wanted(effects.Persist)


def test_nobody_stops_a_job_that_is_not_there_or_not_his() -> None:
    yard = Yard(ASYNC)
    with pytest.raises(errors.NotFound, match="no job 'other'"):
        yard.handle(events.StopRequested(None, "other", ""))
    with pytest.raises(errors.StaleIncarnation):
        yard.handle(events.StopRequested(Caller(yard.workers[0].job, Incarnation(99)), "", ""))
    yard.leave(yard.workers[0])
    yard.leave(yard.workers[1])
    with pytest.raises(errors.NotFound, match="is finished"):
        yard.stop()


def test_one_that_joins_a_job_that_stops_is_told_at_once() -> None:
    yard = Yard(ASYNC)
    taken = yard.stop()
    worker = yard.register(MemberRole.WORKER)
    joined = yard.handle(events.JobJoined(worker, ASYNC.name, ASYNC))
    assert isinstance(joined, effects.Joined)
    assert joined.stop == taken.stop


# ---- where a synchronous job ends


def test_step_is_settled_once_every_living_worker_has_said_how_far_it_came() -> None:
    yard = Yard(SYNC)
    first, second = yard.workers
    assert yard.stop(first).stop == Stop("", first.incarnation)
    yard.advance(500)
    assert yard.say(first, 7).stop == Stop("", first.incarnation)
    assert yard.say(second, 8).stop == Stop("", first.incarnation)
    assert yard.read(7) == Stop("", first.incarnation, True, 8)
    assert yard.told[-1].endswith("stops before step 8")
    assert yard.say(first, 7).stop == Stop("", first.incarnation, True, 8)


def test_step_is_no_earlier_than_the_job_is() -> None:
    yard = Yard(SYNC)
    first, second = yard.workers
    yard.stop()
    yard.leave(first)  # it had computed all ranks alone
    yard.handle(events.WorkersFenced(first.job, (first.incarnation,)))
    yard.say(second, 0)
    assert yard.read(6) == Stop("", None, True, 6)


def test_nothing_is_settled_while_one_that_is_gone_may_still_contribute() -> None:
    yard = Yard(SYNC)
    first, second = yard.workers
    yard.stop()
    yard.kill(first.incarnation)
    yard.say(second, 6)
    assert not yard.wanted(effects.ReadSteps)
    yard.handle(events.WorkersFenced(first.job, (first.incarnation,)))
    yard.handle(events.Ticked())
    assert yard.read(7) == Stop("", None, True, 7)


def test_steps_that_could_not_be_read_are_read_again() -> None:
    yard = Yard(SYNC)
    yard.stop()
    for worker in yard.workers:
        yard.say(worker, 2)
    (read,) = yard.wanted(effects.ReadSteps)
    assert isinstance(read, effects.ReadSteps)
    yard.say(yard.workers[0], 2)
    assert not yard.wanted(effects.ReadSteps)
    yard.handle(events.StepsUnread(read.job))
    yard.handle(events.Ticked())
    (read,) = yard.wanted(effects.ReadSteps)
    assert isinstance(read, effects.ReadSteps)
    yard.handle(events.StepsRead(read.job, Generation(read.map.generation - 1), 2))
    assert yard.stops == Stop("")
    yard.handle(events.Ticked())
    assert yard.read(2) == Stop("", None, True, 2)


def test_answer_that_comes_after_another_has_joined_settles_nothing() -> None:
    yard = Yard(SYNC)
    yard.stop()
    for worker in yard.workers:
        yard.say(worker, 2)
    third = yard.join()
    (read,) = [each for each in yard.reads if isinstance(each, effects.ReadSteps)]
    yard.handle(events.StepsRead(read.job, read.map.generation, 2))
    assert yard.stops == Stop("")
    yard.say(third, 0)
    assert yard.read(2) == Stop("", None, True, 2)


def test_one_that_died_is_not_waited_for_and_one_that_joined_is() -> None:
    yard = Yard(SYNC)
    first, second = yard.workers
    yard.stop(first)
    yard.say(first, 7)
    third = yard.join()
    yard.kill(second.incarnation)
    yard.handle(events.WorkersFenced(first.job, (second.incarnation,)))
    yard.handle(events.Ticked())
    assert not yard.wanted(effects.ReadSteps)
    yard.say(third, 0)
    assert yard.read(6) == Stop("", first.incarnation, True, 7)


def test_the_last_one_missing_may_leave_instead() -> None:
    yard = Yard(SYNC)
    first, second = yard.workers
    yard.stop()
    yard.say(first, 3)
    yard.leave(second)
    yard.handle(events.WorkersFenced(first.job, (second.incarnation,)))
    yard.handle(events.Ticked())
    assert yard.read(3) == Stop("", None, True, 3)


def test_what_a_worker_has_said_stays_true() -> None:
    yard = Yard(SYNC)
    yard.stop()
    yard.say(yard.workers[0], 7)
    yard.say(yard.workers[0], 5)
    yard.say(yard.workers[1], 6)
    assert yard.read(5) == Stop("", None, True, 7)


def test_missing_workers_are_named_while_they_are_waited_for() -> None:
    yard = Yard(SYNC)
    yard.stop()
    yard.say(yard.workers[0], 7)
    yard.advance(1_500)
    (waits,) = yard.job().waits
    assert waits.startswith(f"worker {yard.workers[1].incarnation} to hear that it shall stop, for")
    yard.say(yard.workers[1], 7)
    yard.advance(200)
    assert yard.job().waits == []


# ---- the end of the job


def test_the_last_goodbye_finishes_a_stopped_job_whose_data_is_not_done() -> None:
    yard = Yard(ASYNC.model_copy(update={"workers_expected": 2}))
    yard.handle(events.FeedOpened(yard.workers[0], 0, FEED))
    taken = yard.stop(yard.workers[0], "enough")
    for worker in yard.workers:
        yard.leave(worker)
    job = yard.machine.jobs[-1]
    assert (job.state, job.stopping.stop) == (JobState.FINISHED, taken.stop)


def test_stopped_job_without_workers_waits_for_one_that_is_restarted_then_finishes() -> None:
    yard = Yard(ASYNC)
    yard.stop()
    for worker in yard.workers:
        yard.kill(worker.incarnation)
    yard.advance(LATE_MS - 200)
    assert yard.machine.jobs[-1].state is JobState.RUNNING
    yard.advance(300)
    assert yard.machine.jobs[-1].state is JobState.FINISHED


def test_feed_of_a_stopped_job_is_left_once_a_checkpoint_has_its_steps() -> None:
    yard = Yard(SYNC, checkpoints="/kept")
    first, second = yard.workers
    yard.handle(events.FeedOpened(first, 0, FEED))
    returned = events.LeaseReturned(first, 0, None, Token(0))

    def done(reached: int) -> bool:
        answer = yard.handle(events.LedgerRead(returned, reached))
        assert isinstance(answer, effects.LeaseClosed)
        return answer.done

    assert not done(3)
    yard.stop()
    assert not done(3)
    for worker in (first, second):
        yard.say(worker, 3)
    yard.read(3)
    book = yard.machine.jobs[-1].keeping.book
    book.committed = Committed(1, 2, {})
    assert (done(2), done(3)) == (False, False)
    book.committed = Committed(2, 3, {})
    assert (done(2), done(3)) == (False, True)
    assert not yard.machine.jobs[-1].feeds.is_closed(0)


# ---- a restart


def test_a_stop_and_its_step_outlive_the_coordinator(short: bool) -> None:
    yard = Yard(SYNC)
    taken = yard.stop(yard.workers[0], "lo\u0161")
    yard.say(yard.workers[0], 7)
    yard.restart(from_snapshot=short)
    assert yard.stops == taken.stop
    yard.say(yard.workers[1], 6)
    assert yard.stops == taken.stop
    yard.say(yard.workers[0], 7)
    settled = yard.read(6)
    assert settled == Stop("lo\u0161", yard.workers[0].incarnation, True, 7)
    yard.restart(from_snapshot=short)
    assert yard.stops == settled


def test_records_of_an_asynchronous_stop_come_back(short: bool) -> None:
    yard = Yard(ASYNC)
    taken = yard.stop()
    yard.restart(from_snapshot=short)
    assert yard.stops == taken.stop


def test_records_that_do_not_fit_are_refused() -> None:
    yard = Yard(SYNC)
    yard.stop()
    for worker in yard.workers:
        yard.say(worker, 2)
    yard.read(2)
    kinds = [each.kind for each in yard.persisted]
    asked, settled = kinds.index("stop_asked"), kinds.index("stop_settled")
    for kept in ([*range(asked + 1), asked], [*range(settled + 1), settled], [*range(asked), settled]):
        again = [yard.persisted[at] for at in kept]
        before, yard.persisted = yard.persisted, again
        machine = yard.machine
        with pytest.raises(errors.ConfigurationError, match="cannot be taken"):
            yard.restart()
        yard.machine, yard.persisted = machine, before


# ---- at the door


def test_what_a_peer_says_of_a_stop_is_bounded() -> None:
    too_far = wire.StopHeard(reached=limits.SEQUENCE_MAX + 1)
    with pytest.raises(errors.TooLarge, match="has come to step"):
        members.heartbeat_event(wire.HeartbeatRequest(stop_heard=too_far))
    long = "x" * (limits.TEXT_CHARACTERS_MAX + 1)
    with pytest.raises(errors.TooLarge, match="the reason of a stop"):
        jobs.stop_job_event(wire.StopJobRequest(reason=long))
    for broken in (wire.Stop(reason=long), wire.Stop(step=limits.SEQUENCE_MAX + 1)):
        with pytest.raises(errors.TooLarge):
            lease_messages.stop_from_wire(broken)
    assert members.heartbeat_event(wire.HeartbeatRequest()).report.reached is None
    assert members.heartbeat_event(wire.HeartbeatRequest(stop_heard=wire.StopHeard())).report.reached == 0


def test_ledgers_of_a_job_that_stops_name_all_ranks_in_all_partitions() -> None:
    first, second = (SourceKey(RankSource(Rank(rank))) for rank in range(2))
    found = [
        (first, [Watermark(PartitionId(0), 4, Version(0, 3)), Watermark(PartitionId(1), 5, Version(0, 3))]),
        (second, [Watermark(PartitionId(0), 3, Version(0, 3)), Watermark(PartitionId(1), 3, Version(0, 3))]),
    ]
    reply = server_wire.ReadLedgerReply(sources=lease_messages.watermarks_to_wire(found))
    assert ledger_replies.highest_next(reply, [first, second], [PartitionId(0), PartitionId(1)]) == 5
    for sources, partitions in (([SourceKey(RankSource(Rank(2)))], [0]), ([first], [0, 2])):
        with pytest.raises(errors.MalformedPayload, match="watermarks of"):
            ledger_replies.highest_next(reply, sources, [PartitionId(each) for each in partitions])


def test_what_was_said_before_the_stop_is_no_answer_to_it() -> None:
    stopping = Stopping(by_steps=True)
    stopping.hear(Incarnation(3), 9)
    stopping.ask("", None)
    assert stopping.missing([Incarnation(3)]) == (3,)


def test_an_asynchronous_job_settles_nothing() -> None:
    stopping = Stopping(by_steps=False)
    stopping.ask("", None)
    stopping.hear(Incarnation(3), 9)
    assert not stopping.is_due([Incarnation(3)])
    assert stopping.missing([Incarnation(3)]) == ()
    assert not stopping.is_over(0)
