"""A job that is told to stop: what tests/unit/coordinator/transcripts/stopping.txt does not show."""

from __future__ import annotations

import pytest

from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain import errors, limits
from shardyard.domain.consistency import ConsistencyMode, Stop
from shardyard.domain.ids import Caller, Incarnation, MemberRole, PartitionId, Rank, Token, Version
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.push_names import RankSource, SourceKey, Watermark
from shardyard.domain.variables import DType, VariableSpec
from shardyard.wire import lease_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import StopTaken
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.modes.stopping import Stopping
from shardyard_coordinator.service import ledger_replies
from shardyard_coordinator.service.rpcs import jobs, members
from shardyard_coordinator.storage.checkpoint_book import Committed
from shardyard_coordinator.work.feeds import FeedSpec
from tests.support.machine_yards import MachineYard

VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)),)
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
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
        return self.beat(caller.incarnation, Report(step=step, stop_reached=reached))

    def read(self, step: int) -> Stop | None:
        """The servers have said how far the job is."""
        (read,) = self.wanted(effects.ReadSteps)
        assert isinstance(read, effects.ReadSteps)
        assert [key.source for key in read.sources] == [RankSource(Rank(0)), RankSource(Rank(1))]
        self.handle(events.StepsRead(read.job, read.map.generation, step))
        return self.stops

    @property
    def stops(self) -> Stop | None:
        return self.machine.jobs[-1].stopping.stop


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
    book = yard.machine.jobs[-1].book
    book.committed = Committed(1, 2, {})
    assert (done(2), done(3)) == (False, False)
    book.committed = Committed(2, 3, {})
    assert (done(2), done(3)) == (False, True)
    assert not yard.machine.jobs[-1].feeds.feed(0).done


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


def test_what_a_peer_says_of_a_stop_is_bounded() -> None:
    too_far = wire.StopReached(reached=limits.SEQUENCE_MAX + 1)
    with pytest.raises(errors.TooLarge, match="is at step"):
        members.heartbeat_event(wire.HeartbeatRequest(stop_reached=too_far))
    long = "x" * (limits.TEXT_CHARACTERS_MAX + 1)
    with pytest.raises(errors.TooLarge, match="the reason of a stop"):
        jobs.stop_job_event(wire.StopJobRequest(reason=long))
    for broken in (wire.Stop(reason=long), wire.Stop(step=limits.SEQUENCE_MAX + 1)):
        with pytest.raises(errors.TooLarge):
            lease_messages.stop_from_wire(broken)
    assert members.heartbeat_event(wire.HeartbeatRequest()).report.stop_reached is None
    assert members.heartbeat_event(wire.HeartbeatRequest(stop_reached=wire.StopReached())).report.stop_reached == 0


def test_ledgers_of_a_job_that_stops_name_all_ranks_in_all_partitions() -> None:
    first, second = (SourceKey(RankSource(Rank(rank))) for rank in range(2))
    found = [
        (first, [Watermark(PartitionId(0), 4, Version(0, 3)), Watermark(PartitionId(1), 5, Version(0, 3))]),
        (second, [Watermark(PartitionId(0), 3, Version(0, 3)), Watermark(PartitionId(1), 3, Version(0, 3))]),
    ]
    reply = server_wire.ReadLedgerReply(sources=lease_messages.watermarks_to_wire(found))
    assert ledger_replies.highest_next(reply, [first, second], [PartitionId(0), PartitionId(1)]) == 5
    for sources, partitions in (([SourceKey(RankSource(Rank(2)))], [0]), ([first], [0, 2])):
        with pytest.raises(errors.MalformedPayload, match="watermark"):
            ledger_replies.highest_next(reply, sources, [PartitionId(each) for each in partitions])


def test_what_was_said_before_the_stop_is_no_answer_to_it() -> None:
    stopping = Stopping(by_steps=True)
    stopping.on_reached(Incarnation(3), 9)
    stopping.ask("", None)
    assert stopping.missing([Incarnation(3)]) == (3,)


def test_an_asynchronous_job_settles_nothing() -> None:
    stopping = Stopping(by_steps=False)
    stopping.ask("", None)
    stopping.on_reached(Incarnation(3), 9)
    assert not stopping.is_due([Incarnation(3)])
    assert stopping.missing([Incarnation(3)]) == ()
    assert not stopping.is_over(0)
