"""A synchronous job that goes over to asynchronous updates while it runs: before which step, with which data, what a
restart brings back. Scenarios of single conditions: transcripts/switching_from_steps.txt."""

from __future__ import annotations

import itertools

import pytest

from shardyard.config.settings import CheckpointSettings, ConsistencySettings, DataSettings, JobSettings
from shardyard.domain import errors, limits
from shardyard.domain.consistency import Consistency, ConsistencyMode, Durability, SwitchPoint
from shardyard.domain.ids import Incarnation, Rank, Token
from shardyard.domain.push_names import DataLease, DataShardSource, RankSource
from shardyard.wire import lease_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import effects
from shardyard_coordinator.core.effects import SwitchTaken
from shardyard_coordinator.modes.pending_switch import PendingSwitch
from shardyard_coordinator.service.rpcs import members
from shardyard_coordinator.work import ledger_conversion
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.feeds import FeedSpec
from shardyard_coordinator.work.quarantine import QuarantinedWork
from shardyard_coordinator.work.step_ledger import StepLedger
from tests.support.switching_yards import ASYNC, FEED, SYNC, SwitchingYard

JOB = JobSettings(
    partitions=2,
    workers_expected=2,
    rank_grace_ms=0,
    consistency=ConsistencySettings(mode=SYNC, logical_ranks=2, staleness=4),
    data=DataSettings(batches_per_data_shard=3),
)


class Yard(SwitchingYard):
    def __init__(self, settings: JobSettings = JOB) -> None:
        super().__init__(settings, "/c", FEED)

    def switch(self, mode: ConsistencyMode | None = ASYNC, staleness: int | None = None) -> SwitchTaken:
        return super().switch(mode, staleness)

    def write(self, step: int) -> bool:
        """Whether a checkpoint is begun; it is taken then."""
        self.tick()
        begun = bool(self.wanted(effects.TakeCheckpoint))
        if begun:
            self.complete_checkpoint(step)
        return begun

    def go_over(self, step: int) -> effects.RestorePartitions:
        """From asked to what the servers are told."""
        self.write(0)
        self.switch()
        self.settle(reached=step)
        for caller in self.workers:
            self.switch_point_told(caller, step)
        assert self.write(step)
        self.tick()
        return self.restoring


# ---- what is asked


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"checkpoint": CheckpointSettings(url="never")}, "has no checkpoints"),
        ({"consistency": JOB.consistency.model_copy(update={"backup_workers": 1})}, "backup"),
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


def test_job_with_logs_is_refused() -> None:
    yard = Yard()
    job = yard.machine.jobs[-1]
    job.settings = job.settings.model_copy(update={"durability": Durability.WAL})
    with pytest.raises(errors.InvalidRequest, match="keeps logs"):
        yard.switch()


# ---- restarts


def moments() -> list[str]:
    return ["asked", "settled", "gone over", "restored", "given up"]


@pytest.mark.parametrize("moment", moments())
def test_restart_at_any_moment_goes_on_in_one_mode(moment: str, short: bool) -> None:
    yard = Yard()
    yard.write(0)
    yard.switch()
    if moment == "given up":
        yard.switch(SYNC)
    if moment in ("settled", "gone over", "restored"):
        yard.settle(reached=7)
    if moment in ("gone over", "restored"):
        yard.switch_point_told(yard.workers[0], 7)
        yard.write(7)
        yard.tick()
        if moment == "restored":
            yard.restored(yard.restoring)
    halt, mode = yard.switch_point_told(yard.workers[0]), yard.machine.jobs[-1].settings.consistency.mode.updates
    yard.restart(from_snapshot=short)
    assert (yard.switch_point_told(yard.workers[0]), yard.machine.jobs[-1].settings.consistency.mode.updates) == (
        halt,
        mode,
    )
    assert yard.machine.snapshot() == yard.machine.snapshot()
    if moment == "asked":
        yard.settle(reached=7)
    if moment in ("asked", "settled"):
        yard.switch_point_told(yard.workers[0], 7)
        assert yard.write(7)
    if moment in ("asked", "settled", "gone over"):
        yard.tick()
        yard.restored(yard.restoring)
    if moment == "given up":
        assert yard.switch().first
        assert yard.switch_point_told(yard.workers[0]) == SwitchPoint(2)
        return
    lease = yard.lease(yard.workers[1])
    assert isinstance(lease, DataLease)
    assert lease.source == DataShardSource(0, 0, 4)


def test_records_of_a_halt_that_do_not_fit_are_refused() -> None:
    yard = Yard()
    yard.go_over(7)
    records = yard.persisted
    kinds = [each.kind for each in records]
    asked, over = kinds.index("switch_asked"), kinds.index("job_switched")
    odd = {"mode": "sync"}, {"left": 5}, {"step": -1}
    changed = [effects.Persist(records[over].kind, {**records[over].body, **each}) for each in odd]
    settled = records[kinds.index("switch_settled")]
    for again in (
        [*records[: asked + 1], records[asked]],
        [*records[:asked], settled],
        [*records[:asked], effects.Persist("switch_cancelled", {"job": records[asked].body["job"]})],
        [*records[: over + 1], records[over]],
        *([*records[:over], each] for each in changed),
    ):
        yard.persisted = again
        with pytest.raises(errors.ConfigurationError, match="cannot be taken"):
            yard.restart()


def test_halts_of_before_are_remembered_by_their_count_alone() -> None:
    halting = PendingSwitch()
    assert halting.entries() == []
    halting.ask(Consistency(1, ASYNC))
    halting.cancel()
    assert halting.entries() == [("switches_before", {"switch": 1})]


# ---- whose data is what


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("ranks", "size", "accumulate", "shard"), [(1, 4, 1, 3), (2, 3, 1, 4), (3, 2, 2, 3), (4, 1, 3, 7)]
)
def test_steps_and_data_shards_together_have_each_sample_of_an_epoch_once(
    ranks: int, size: int, accumulate: int, shard: int, drop_last: bool
) -> None:
    spec = FeedSpec(53, "f", size, 2, shuffle=True, drop_last=drop_last, accumulate=accumulate)
    units = spec.cut(ranks, 1)
    for step in range(2 * units.per_epoch + 1):
        steps = StepLedger(logical_ranks=ranks)
        steps.open(0, spec)
        counted: list[list[int]] = [[], []]
        for before in range(step):
            epoch, index = divmod(before, units.per_epoch)
            for rank in range(ranks):
                counted[epoch] += range(*units.span(index, rank))
        tokens = itertools.count(1)
        leases = DataLedger(batches_per_data_shard=shard, workers_expected=1, next_token=lambda: Token(next(tokens)))  # noqa: B023 - called here
        begun = dict(ledger_conversion.take_over_steps(leases, steps, step))
        assert all(next_ % accumulate == 0 for next_ in begun.values())
        while isinstance(lease := leases.lease(0, Incarnation(9)), DataLease):
            assert begun.get(lease.source, 0) * size < lease.end - lease.begin
            counted[lease.source.epoch] += range(lease.begin + begun.get(lease.source, 0) * size, lease.end)
            leases.close(lease.source, Incarnation(9), lease.token, next_sequence=shard + accumulate)
        whole = [units.samples_per_epoch, 53 - 53 % size] if drop_last else [53]
        for each in counted:
            assert sorted(each) in [list(range(samples)) for samples in whole], (step, each)


def test_what_is_in_quarantine_stays_there_batch_by_batch() -> None:
    spec = FeedSpec(60, "f", 3, 2, shuffle=True, drop_last=False, accumulate=2)
    steps = StepLedger(logical_ranks=2)
    steps.open(0, spec)
    steps.quarantine.add(QuarantinedWork(RankSource(Rank(1)), 6, deaths=3))
    steps.quarantine.add(QuarantinedWork(RankSource(Rank(0)), 7, parameter="w", worker=Incarnation(5)))
    samples = [(each.epoch, at) for each in steps.quarantined() for at in range(each.begin, each.end)]
    leases = DataLedger(batches_per_data_shard=8, workers_expected=1, next_token=lambda: Token(1))
    ledger_conversion.take_over_steps(leases, steps, 7)
    listed = list(leases.quarantined())
    assert [(each.epoch, at) for each in listed for at in range(each.begin, each.end)] == samples
    assert [(each.condemned.deaths, each.condemned.parameter) for each in listed] == [(3, "")] * 2 + [(0, "w")] * 2


# ---- at the door


def test_halt_travels_as_it_is_and_is_bounded() -> None:
    for given in (SwitchPoint(3), SwitchPoint(1, True, 7)):
        assert lease_messages.switch_point_from_wire(lease_messages.switch_point_to_wire(given)) == given
    with pytest.raises(errors.TooLarge):
        lease_messages.switch_point_from_wire(wire.SwitchPoint(number=1, settled=True, step=limits.SEQUENCE_MAX + 1))
    heard = wire.HeartbeatRequest(switch_reached=wire.SwitchReached(number=2, reached=5))
    assert members.heartbeat_event(heard).report.switch_reached == (2, 5)
    with pytest.raises(errors.TooLarge):
        members.heartbeat_event(
            wire.HeartbeatRequest(switch_reached=wire.SwitchReached(number=2, reached=limits.SEQUENCE_MAX + 1))
        )
