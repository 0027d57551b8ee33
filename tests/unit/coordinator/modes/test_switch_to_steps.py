"""An asynchronous job that goes over to synchronous steps while it runs: what is waited for, at which step it begins,
with which samples, what a restart brings back. Scenarios of single conditions: transcripts/switching_to_steps.txt."""

from __future__ import annotations

import itertools

import pytest

from shardyard.config.settings import CheckpointSettings, ConsistencySettings, DataSettings, JobSettings
from shardyard.domain import errors, limits
from shardyard.domain.consistency import ConsistencyMode, Durability, SwitchPoint, UpdateMode
from shardyard.domain.ids import Caller, Incarnation, PartitionId, Rank, Token, Version
from shardyard.domain.push_names import (
    DataLease,
    DataShardSource,
    RankSource,
    SourceKey,
    Watermark,
)
from shardyard.wire import lease_messages
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import SwitchTaken
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.records import Body
from shardyard_coordinator.service import ledger_replies
from shardyard_coordinator.storage.restore_point import RestorePoint
from shardyard_coordinator.work import ledger_conversion
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.feeds import FeedOpening, FeedSpec
from shardyard_coordinator.work.quarantine import QuarantinedWork
from shardyard_coordinator.work.step_ledger import StepLedger
from tests.support.switching_yards import ASYNC, FEED, SYNC, SwitchingYard

SHARD = 3
JOB = JobSettings(
    partitions=2,
    workers_expected=2,
    rank_grace_ms=0,
    consistency=ConsistencySettings(mode=ASYNC, logical_ranks=2, staleness=4),
    data=DataSettings(batches_per_data_shard=SHARD),
)


class Yard(SwitchingYard):
    def __init__(self, settings: JobSettings = JOB) -> None:
        super().__init__(settings, "/c", FEED)

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

    def write(self) -> None:
        self.tick()
        self.complete_checkpoint()

    def go_over(self, version: int = 9) -> effects.RestorePartitions:
        """From asked to what the servers are told."""
        self.switch()
        self.settle(version)
        self.write()
        self.tick()
        return self.restoring

    def opened(self) -> FeedOpening:
        answer = self.handle(events.FeedOpened(self.workers[0], 0, FEED))
        assert isinstance(answer, FeedOpening)
        return answer

    @property
    def mode(self) -> UpdateMode:
        return self.machine.jobs[-1].settings.consistency.mode.updates


# ---- what is asked


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"checkpoint": CheckpointSettings(url="never")}, "has no checkpoints"),
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


# ---- going over


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
    halt, mode = yard.switch_point_told(yard.workers[0]), yard.mode
    yard.restart(from_snapshot=short)
    assert (yard.switch_point_told(yard.workers[0]), yard.mode) == (halt, mode)
    assert yard.machine.snapshot() == yard.machine.snapshot()
    if moment == "given up":
        assert yard.switch().first
        assert yard.switch_point_told(yard.workers[0]) == SwitchPoint(2, to_steps=True)
        return
    if moment == "asked":
        yard.settle(9)
    if moment in ("asked", "settled"):
        yard.switch_point_told(yard.workers[0], step=9)
        yard.write()
    if moment != "restored":
        yard.tick()
        assert yard.restoring.first_step == 9
        yard.restored(yard.restoring)
    assert yard.opened() == FeedOpening(SHARD, 10, 9, done=False, begun=(0, 30))


def test_records_of_a_drain_that_do_not_fit_are_refused() -> None:
    yard = Yard()
    yard.compute(1)
    yard.go_over()
    records = yard.persisted
    kinds = [each.kind for each in records]
    over, closed = kinds.index("job_switched"), kinds.index("data_closed")
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
        end = min(40 + steps_taken, steps.feed(0).end)
        for step, rank in itertools.product(range(40, end), range(ranks)):
            epoch, begin, last = steps.feed(0).span(rank, step)
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
    with pytest.raises(errors.MalformedPayload, match=r"without the watermark of .* in partition 1"):
        ledger_replies.highest_version(reply(4), asked, [0, 1])
    with pytest.raises(errors.MalformedPayload, match="at most"):
        ledger_replies.highest_version(reply(4, limits.SEQUENCE_MAX + 1), asked, [0, 1])


def test_halt_that_drains_travels_as_it_is() -> None:
    for given in (SwitchPoint(3, to_steps=True), SwitchPoint(1, True, 7, True)):
        assert lease_messages.switch_point_from_wire(lease_messages.switch_point_to_wire(given)) == given
