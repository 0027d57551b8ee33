"""An asynchronous job that goes over to synchronous steps while it runs: what is waited for, at which step it begins,
with which samples, what a restart brings back; and there and back again."""

from __future__ import annotations

import itertools

import pytest

from shardyard.config.settings import CheckpointSettings, ConsistencySettings, DataSettings, JobSettings
from shardyard.domain import errors, limits
from shardyard.domain.consistency import Consistency, ConsistencyMode, Durability, SwitchPoint, UpdateMode
from shardyard.domain.ids import Caller, Incarnation, MemberRole, PartitionId, Rank, Token, Version
from shardyard.domain.push_names import (
    DataLease,
    DataShardSource,
    RankSource,
    Source,
    SourceKey,
    Watermark,
    WorkerSource,
)
from shardyard.wire import lease_messages
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import LeaseClosed, SwitchTaken
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.records import Body
from shardyard_coordinator.service import ledger_replies
from shardyard_coordinator.storage.restore_point import RestorePoint
from shardyard_coordinator.work import ledger_conversion
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.feeds import FeedOpening, FeedSpec, LeaseWait
from shardyard_coordinator.work.quarantine import QuarantinedWork
from shardyard_coordinator.work.step_ledger import StepLedger
from tests.support.switching_yards import ASYNC, BOUNDED, FEED, SGD, SYNC, VARIABLES, SwitchingYard

SHARD = 3
JOB = JobSettings(
    partitions=2,
    workers_expected=2,
    rank_grace_ms=0,
    consistency=ConsistencySettings(mode=ASYNC, logical_ranks=2, staleness=4),
    data=DataSettings(batches_per_data_shard=SHARD),
)


class Yard(SwitchingYard):
    def __init__(
        self, settings: JobSettings = JOB, checkpoints: str | None = "/c", feed: FeedSpec | None = FEED
    ) -> None:
        super().__init__(settings, checkpoints, feed)

    def switch(self, mode: ConsistencyMode | None = SYNC, staleness: int | None = None) -> SwitchTaken:
        return super().switch(mode, staleness)

    def leased(self, caller: Caller) -> DataLease:
        found = self.lease(caller)
        assert isinstance(found, DataLease), found
        return found

    def close(self, caller: Caller, lease: DataLease, batches: int = SHARD) -> object:
        generation = self.machine.jobs[-1].deployment.generation
        assert generation is not None
        returned = events.LeaseReturned(caller, lease.source.feed, lease.source, lease.token)
        return self.handle(events.LedgerRead(returned, batches, generation))

    def compute(self, shards: int) -> None:
        for _ in range(shards):
            self.close(self.workers[0], self.leased(self.workers[0]))

    def begin_writing(self) -> effects.TakeCheckpoint:
        self.tick()
        (taking,) = self.wanted(effects.TakeCheckpoint)
        assert isinstance(taking, effects.TakeCheckpoint)
        return taking

    def end_writing(self, taking: effects.TakeCheckpoint) -> None:
        number = taking.draft.number
        self.handle(events.CheckpointTaken(taking.subject.job, number, number, taking.draft.step))

    def write(self) -> None:
        self.end_writing(self.begin_writing())

    def go_over(self, version: int = 9) -> effects.RestorePartitions:
        """From asked to what the servers are told."""
        self.switch()
        self.settle(version)
        self.write()
        self.tick()
        return self.restoring

    def opened(self, feed: int = 0, spec: FeedSpec = FEED) -> FeedOpening:
        answer = self.handle(events.FeedOpened(self.workers[0], feed, spec))
        assert isinstance(answer, FeedOpening)
        return answer

    @property
    def mode(self) -> UpdateMode:
        return self.machine.jobs[-1].settings.consistency.mode.updates


# ---- what is waited for


def test_data_shards_that_were_begun_are_done_and_no_other_is_begun() -> None:
    yard = Yard()
    first, second = yard.workers
    lease = yard.leased(first)
    assert yard.switch().consistency == Consistency(1, SYNC)
    assert [yard.halted(each) for each in yard.workers] == [SwitchPoint(1, drains=True)] * 2
    waiting = yard.lease(second)
    assert isinstance(waiting, LeaseWait)
    assert "to go over to sync" in waiting.waiting_for
    assert yard.leased(first) == lease, "it has the one that it has"
    yard.tick()
    assert not yard.wanted(effects.ReadSteps), "a data shard is under way"
    standing = yard.job().consistency
    assert standing.HasField("step")
    assert (standing.step, standing.draining) == (0, f"data shard 0.0.0 (worker {first.incarnation})")
    assert yard.close(first, lease) == LeaseClosed(done=True)
    assert isinstance(yard.lease(first), LeaseWait)
    yard.tick()
    assert yard.read.versions
    assert [key.source for key in yard.read.sources] == [RankSource(Rank(0)), RankSource(Rank(1))]


def test_what_a_lost_worker_has_begun_is_computed_by_another_first() -> None:
    yard = Yard()
    first, second = yard.workers
    lease = yard.leased(first)
    yard.switch()
    yard.handle(events.MemberLeft(first.incarnation, "power"))
    again = yard.leased(second)
    assert again.source == lease.source
    yard.halted(second)
    assert not yard.wanted(effects.ReadSteps)
    yard.close(second, again)
    yard.handle(events.WorkersFenced(second.job, (first.incarnation,), ()))
    yard.tick()
    assert yard.wanted(effects.ReadSteps)


def test_all_living_workers_say_that_they_push_nothing_of_their_own() -> None:
    yard = Yard()
    yard.switch()
    yard.halted(yard.workers[0])
    yard.tick()
    assert not yard.wanted(effects.ReadSteps)
    yard.halted(yard.workers[1])
    assert yard.wanted(effects.ReadSteps)


def test_job_whose_worker_pushes_its_own_work_meanwhile_stays_as_it_is() -> None:
    yard = Yard()
    yard.switch()
    yard.halted(yard.workers[0], 1)
    assert "stays async, since worker" in yard.told[-1]
    assert yard.told_to_halt(yard.workers[0]) is None
    assert isinstance(yard.lease(yard.workers[0]), DataLease)


def test_checkpoint_that_was_begun_before_is_not_the_one(short: bool) -> None:
    yard = Yard()
    yard.compute(2)
    before = yard.begin_writing()
    yard.switch()
    yard.settle(6)
    yard.end_writing(before)
    yard.tick()
    assert yard.mode is UpdateMode.ASYNC
    (taking,) = yard.wanted(effects.TakeCheckpoint)
    assert isinstance(taking, effects.TakeCheckpoint)
    yard.restart(from_snapshot=short)
    yard.tick()
    assert yard.mode is UpdateMode.ASYNC, "after a restart neither"


def test_partitions_that_go_back_have_their_work_computed_again_and_the_step_is_settled_anew() -> None:
    yard = Yard()
    yard.write()
    yard.compute(2)
    yard.switch()
    yard.settle(6)
    assert yard.told_to_halt(yard.workers[0]) == SwitchPoint(1, True, 6, True)
    yard.register(MemberRole.SERVER, "s:1")
    yard.handle(events.MemberLeft(yard.server, ""))
    yard.tick()
    yard.restored(yard.restoring)
    assert yard.told_to_halt(yard.workers[0]) == SwitchPoint(1, drains=True)
    yard.write()
    yard.tick()
    assert yard.mode is UpdateMode.ASYNC, "two data shards are free again"
    yard.compute(2)
    yard.settle(8)
    assert yard.told_to_halt(yard.workers[0]) == SwitchPoint(1, True, 8, True)


def test_job_may_be_told_to_stay_until_it_has_gone_over() -> None:
    yard = Yard()
    yard.switch()
    yard.settle(6)
    with pytest.raises(errors.NotReady, match="is going over to sync"):
        yard.switch(BOUNDED, 2)
    assert yard.switch(ASYNC).consistency == Consistency(0, ASYNC)
    assert isinstance(yard.lease(yard.workers[0]), DataLease)
    yard.switch()
    yard.handle(events.StopRequested(yard.workers[0], "", "enough"))
    assert yard.told_to_halt(yard.workers[0]) is None


# ---- what is asked


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"checkpoint": CheckpointSettings(url="never")}, "is not written down"),
        ({"consistency": JOB.consistency.model_copy(update={"staleness_scaling": "inverse"})}, "staleness_scaling"),
    ],
)
def test_job_that_could_not_go_over_is_refused_and_nothing_has_changed(
    changed: dict[str, object], expected: str
) -> None:
    yard = Yard(JOB.model_copy(update=changed))
    before = yard.machine.snapshot()
    with pytest.raises((errors.InvalidRequest, errors.ConfigurationError), match=expected):
        yard.switch()
    assert yard.machine.snapshot() == before


def test_job_with_logs_or_with_steps_of_its_scripts_own_is_refused() -> None:
    yard = Yard()
    job = yard.machine.jobs[-1]
    settings, job.settings = job.settings, job.settings.model_copy(update={"durability": Durability.WAL})
    with pytest.raises(errors.InvalidRequest, match="keeps logs"):
        yard.switch()
    job.settings = settings
    yard.beat(yard.workers[0].incarnation, Report(pushed=1))
    with pytest.raises(errors.InvalidRequest, match=r"outside of job\.batches"):
        yard.switch()


def test_job_that_has_begun_no_data_set_is_not_switched() -> None:
    with pytest.raises(errors.NotReady, match="has not begun"):
        Yard(feed=None).switch()


def test_data_sets_that_steps_could_not_deal_are_refused() -> None:
    yard = Yard()
    yard.opened(1)
    with pytest.raises(errors.InvalidRequest, match="data set 1 was begun before all of data set 0"):
        yard.switch()
    small = FeedSpec(samples=7, fingerprint="f", batch_size=5, epochs=1, shuffle=True, drop_last=True)
    with pytest.raises(errors.InvalidRequest, match="step of 2 logical ranks"):
        Yard(feed=small).switch()


def test_data_set_that_is_opened_meanwhile_and_steps_could_not_deal_ends_the_switch() -> None:
    yard = Yard()
    yard.switch()
    yard.opened(1)
    yard.settle(3)
    yard.write()
    yard.tick()
    assert yard.mode is UpdateMode.ASYNC
    assert any("stays async, since data set 1" in each for each in yard.told)
    assert yard.told_to_halt(yard.workers[0]) is None


# ---- going over


def test_steps_begin_above_all_versions_with_what_data_shards_have_left_of_the_epoch() -> None:
    yard = Yard()
    yard.compute(2)
    restore = yard.go_over(9)
    kinds = [each.kind for each in yard.persisted]
    gone = kinds[kinds.index("job_went_over") :]
    assert gone[:5] == ["job_went_over", "checkpoint_committed", "partitions_lost", "rank_given", "rank_given"]
    assert (restore.subject.mode, restore.subject.switches, restore.subject.logical_ranks) == (UpdateMode.SYNC, 1, 2)
    assert (len(restore.partitions), restore.step, restore.begun) == (2, 9, ())
    assert yard.opened() == FeedOpening(SHARD, 10, 9, done=False, begun=(0, 2 * SHARD * FEED.batch_size))
    leases = [lease for each in yard.workers for lease in yard.beat(each.incarnation).ranks]
    assert sorted(lease.rank for lease in leases) == [0, 1]


def test_first_step_is_not_before_one_of_which_a_worker_has_told() -> None:
    yard = Yard()
    yard.beat(yard.workers[0].incarnation, Report(step=12))
    assert yard.go_over(9).step == 12


def test_servers_have_heard_it_with_their_partitions_and_workers_with_the_map() -> None:
    yard = Yard()
    restore = yard.go_over()
    waiting = yard.lease(yard.workers[0])
    assert isinstance(waiting, LeaseWait)
    with pytest.raises(errors.NotReady, match="goes over to sync"):
        yard.handle(events.VariablesRegistered(yard.workers[0], VARIABLES, SGD))
    yard.restored(restore)
    assert yard.told_to_halt(yard.workers[0]) is None
    placed = yard.handle(events.VariablesRegistered(yard.workers[0], VARIABLES, SGD))
    assert isinstance(placed, effects.VariablesPlaced)
    assert (placed.map, placed.consistency) == (restore.map, Consistency(1, SYNC))
    yard.tick()
    assert not yard.wanted(effects.PaceServers)
    assert yard.wanted(effects.TakeCheckpoint), "the newest one is asynchronous"
    for worker in yard.workers:
        yard.beat(worker.incarnation, Report(switches=1))
    standing = yard.job().consistency
    assert (standing.servers, list(standing.behind), standing.HasField("step")) == (True, [], False)
    with pytest.raises(errors.InvalidRequest, match="leases logical ranks"):
        yard.lease(yard.workers[0])


def test_who_speaks_of_data_shards_afterwards_is_told_nothing_wrong() -> None:
    yard = Yard()
    lease = yard.leased(yard.workers[0])
    yard.close(yard.workers[0], lease)
    yard.restored(yard.go_over())
    caller = yard.workers[0]
    returned = events.LeaseReturned(caller, 0, lease.source, lease.token)
    assert yard.handle(returned) == LeaseClosed(done=True)
    assert yard.close(caller, lease) == LeaseClosed(done=True)
    with pytest.raises(errors.StaleToken, match="has gone over to sync"):
        yard.handle(events.BatchBegun(caller, lease.source, lease.token, 0, 0))


def test_server_that_dies_before_the_next_checkpoint_stands_before_the_first_step_again() -> None:
    yard = Yard()
    yard.restored(yard.go_over(9))
    yard.register(MemberRole.SERVER, "s:1")
    yard.handle(events.MemberLeft(yard.server, ""))
    yard.tick()
    assert (yard.restoring.step, yard.restoring.subject.mode) == (9, UpdateMode.SYNC)
    assert len(yard.restoring.partitions) == 2


def test_next_checkpoint_has_its_own_steps() -> None:
    yard = Yard()
    yard.restored(yard.go_over(9))
    yard.write()
    yard.register(MemberRole.SERVER, "s:1")
    yard.handle(events.MemberLeft(yard.server, ""))
    yard.tick()
    assert yard.restoring.step == 0


def test_job_does_not_go_back_to_a_checkpoint_of_steps_that_it_has_taken_before() -> None:
    yard = Yard()
    yard.restored(yard.go_over(9))
    yard.write()
    job = yard.machine.jobs[-1]
    committed, layout = job.book.committed, job.deployment.layout
    assert committed is not None
    assert layout is not None
    origin = RestorePoint(
        name=JOB.name,
        url="/c",
        number=committed.number - 1,
        job=job.id,
        mode=UpdateMode.SYNC,
        step=3,
        layout=layout,
        data_ledger=committed.data_ledger,
        token=Token(0),
        floor=Token(0),
        logical_ranks=2,
        seed=0,
        created_s=0,
    )
    with pytest.raises(errors.InvalidRequest, match="of before it was switched"):
        yard.handle(events.RestoreOrdered(origin))


# ---- restarts


@pytest.mark.parametrize("moment", ["asked", "settled", "gone over", "restored", "given up"])
def test_restart_at_any_moment_goes_on_in_one_mode(moment: str, short: bool) -> None:
    yard = Yard()
    yard.compute(2)
    yard.switch()
    if moment == "given up":
        yard.switch(ASYNC)
    if moment in ("settled", "gone over", "restored"):
        yard.settle(9)
    if moment in ("gone over", "restored"):
        yard.write()
        yard.tick()
        if moment == "restored":
            yard.restored(yard.restoring)
    halt, mode = yard.told_to_halt(yard.workers[0]), yard.mode
    yard.restart(from_snapshot=short)
    assert (yard.told_to_halt(yard.workers[0]), yard.mode) == (halt, mode)
    assert yard.machine.snapshot() == yard.machine.snapshot()
    if moment == "given up":
        assert yard.switch().first
        assert yard.told_to_halt(yard.workers[0]) == SwitchPoint(2, drains=True)
        return
    if moment == "asked":
        yard.settle(9)
    if moment in ("asked", "settled"):
        yard.write()
    if moment != "restored":
        yard.tick()
        assert yard.restoring.step == 9
        yard.restored(yard.restoring)
    assert yard.opened() == FeedOpening(SHARD, 10, 9, done=False, begun=(0, 30))


def test_records_of_a_drain_that_do_not_fit_are_refused() -> None:
    yard = Yard()
    yard.compute(1)
    yard.go_over()
    records = yard.persisted
    kinds = [each.kind for each in records]
    over, closed = kinds.index("job_went_over"), kinds.index("data_closed")
    odd = {"mode": "async"}, {"mode": "hybrid"}, {"left": 5}, {"step": -1}
    changed = [effects.Persist(records[over].kind, {**records[over].body, **each}) for each in odd]
    for again in (
        [*records[: over + 1], records[over]],
        [*records[:closed], *records[closed + 1 : over + 1]],
        *([*records[:over], each] for each in changed),
    ):
        yard.persisted = again
        with pytest.raises(errors.ConfigurationError, match="cannot be taken"):
            yard.restart()


# ---- there and back again


def test_job_goes_back_to_data_shards_where_steps_end_and_their_names_mean_what_they_did(short: bool) -> None:
    yard = Yard()
    yard.compute(2)
    yard.restored(yard.go_over(9))
    for worker in yard.workers:
        yard.beat(worker.incarnation, Report(step=10, switches=1))
    yard.switch(ASYNC)
    for worker in yard.workers:
        yard.halted(worker, 10, halt=2, step=10)
    yard.handle(events.StepsRead(yard.read.job, yard.read.map.generation, 10))
    taking = yard.begin_writing()
    yard.handle(events.CheckpointTaken(taking.subject.job, taking.draft.number, taking.draft.number, 10))
    yard.tick()
    # 6 batches of data shards, and a step of 2: the third data shard has 2 of its 3
    assert yard.restoring.begun == ((DataShardSource(0, 0, 2), 2),)
    yard.restored(yard.restoring)
    yard.restart(from_snapshot=short)
    assert yard.leased(yard.workers[0]).source == DataShardSource(0, 0, 2)
    assert yard.opened().batches_per_data_shard == SHARD


@pytest.mark.parametrize(
    ("ranks", "size", "accumulate", "shard"), [(1, 4, 1, 3), (2, 3, 1, 4), (3, 2, 2, 4), (4, 1, 3, 6)]
)
def test_data_shards_and_steps_by_turns_have_each_sample_of_an_epoch_once(
    ranks: int, size: int, accumulate: int, shard: int
) -> None:
    spec = FeedSpec(53, "f", size, 3, shuffle=True, drop_last=False, accumulate=accumulate)
    tokens = itertools.count(1)
    worker = Incarnation(9)

    def leases(length: int) -> DataLedger:
        return DataLedger(batches_per_data_shard=length, workers_expected=1, next_token=lambda: Token(next(tokens)))

    for shards, steps_taken, other in itertools.product(range(7), range(7), (shard, shard + 3)):
        counted: list[list[int]] = [[], [], []]
        ledger = leases(shard)
        ledger.open(0, spec)
        for _ in range(shards):
            lease = ledger.lease(0, worker)
            assert isinstance(lease, DataLease)
            counted[lease.source.epoch] += range(lease.begin, lease.end)
            ledger.close(lease.source, worker, lease.token, next_sequence=99)
        steps = StepLedger(logical_ranks=ranks)
        ledger_conversion.take_over_data(steps, ledger, 40)
        again = StepLedger(logical_ranks=ranks)
        for kind, body in steps.entries():
            again.restore(kind, Body(body))
        assert again.entries() == steps.entries()
        end = min(40 + steps_taken, steps.end(0))
        for step, rank in itertools.product(range(40, end), range(ranks)):
            epoch, begin, last = steps._feeds[0].span(rank, step)
            counted[epoch] += range(begin, last)
        assert steps.samples_done(step=end) == sum(map(len, counted))
        back = leases(other)  # the job's settings are others now: names mean what they did all the same
        begun = dict(ledger_conversion.take_over_steps(back, again, end))
        while isinstance(lease := back.lease(0, worker), DataLease):
            first = begun.get(lease.source, 0) * size
            assert first % (size * accumulate) == 0
            counted[lease.source.epoch] += range(lease.begin + first, lease.end)
            back.close(lease.source, worker, lease.token, next_sequence=99)
        assert [sorted(each) for each in counted] == [list(range(53))] * 3, (shards, steps_taken)


def test_what_is_in_quarantine_stays_there_by_turns() -> None:
    spec = FeedSpec(60, "f", 3, 2, shuffle=True, drop_last=False)
    ledger = DataLedger(batches_per_data_shard=4, workers_expected=1, next_token=lambda: Token(1))
    ledger.open(0, spec)
    lease = ledger.lease(0, Incarnation(9))
    assert isinstance(lease, DataLease)
    ledger.close(lease.source, Incarnation(9), lease.token, next_sequence=4)
    ledger.quarantine.add(QuarantinedWork(DataShardSource(0, 0, 0), 2, deaths=3))
    steps = StepLedger(logical_ranks=2)
    ledger_conversion.take_over_data(steps, ledger, 5)
    (listed,) = steps.quarantined()
    assert (listed.epoch, listed.begin, listed.end) == (0, 6, 9)
    assert steps.counts(1, step=5)[0].quarantined == 1
    assert steps.samples_done(step=6) == 12 + 6 - 3
    steps.quarantine.add(QuarantinedWork(RankSource(Rank(1)), 6, deaths=3))
    samples = [(each.epoch, each.begin, each.end) for each in steps.quarantined()]
    back = DataLedger(batches_per_data_shard=4, workers_expected=1, next_token=lambda: Token(1))
    ledger_conversion.take_over_steps(back, steps, 7)
    assert [(each.epoch, each.begin, each.end) for each in back.quarantined()] == samples


# ---- at the door


def test_highest_version_is_that_of_all_partitions_and_bounded() -> None:
    def reply(*numbers: int) -> server_wire.ReadLedgerReply:
        key = SourceKey(RankSource(Rank(0)))
        marks = [Watermark(PartitionId(at), 0, Version(1, each)) for at, each in enumerate(numbers)]
        return server_wire.ReadLedgerReply(sources=lease_messages.watermarks_to_wire([(key, marks)]))

    asked = [SourceKey(RankSource(Rank(0)))]
    assert ledger_replies.highest_version(reply(4, 7), asked, [0, 1]) == 7
    with pytest.raises(errors.MalformedPayload, match=r"partitions \[0\]"):
        ledger_replies.highest_version(reply(4), asked, [0, 1])
    with pytest.raises(errors.MalformedPayload, match="at most"):
        ledger_replies.highest_version(reply(4, limits.SEQUENCE_MAX + 1), asked, [0, 1])


def test_halt_that_drains_travels_as_it_is() -> None:
    for given in (SwitchPoint(3, drains=True), SwitchPoint(1, True, 7, True)):
        assert lease_messages.halt_from_wire(lease_messages.halt_to_wire(given)) == given


def test_own_work_of_a_worker_is_of_before_where_there_are_steps() -> None:
    yard = Yard()
    yard.restored(yard.go_over())
    caller = yard.workers[0]
    source: Source = WorkerSource(caller.incarnation)
    said = events.NotFiniteReported(caller, source, Token(0), 0, 0, "w", count=1, in_a_row=1, step=3)
    with pytest.raises(errors.StaleToken, match="has gone over to sync"):
        yard.handle(said)
