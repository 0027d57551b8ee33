"""Backup workers (docs/internals/ledger.md, rule B6): who counts in a step, what is made up for, and when; the servers'
side."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.config import configuration
from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain.consistency import Clipping, ConsistencyMode, UpdateMode
from shardyard.domain.errors import ConfigurationError, InvalidRequest, NotFound, NotReady
from shardyard.domain.ids import Caller, Incarnation, MemberRole, PartitionId, Rank, Token
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.push_names import RankSource, SourceKey
from shardyard.domain.pushes import GatheredPart, Outcome, StepVerdict
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.flows import work_verdicts
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.records import Body
from shardyard_coordinator.work import checkpoint_copy
from shardyard_coordinator.work.feeds import FeedSpec
from shardyard_coordinator.work.quarantine import QuarantinedWork
from shardyard_coordinator.work.step_ledger import StepLedger
from shardyard_ps_server.hosting import admission, orders, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.checkpoint_cuts import take_cut
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.step_gate import StepGate
from shardyard_ps_server.partition.sync_step import gathered_part, take_verdict
from shardyard_ps_server.partition.update_rules import UpdateRules
from tests.support import servers_with_logs as logs
from tests.support.machine_yards import MachineYard
from tests.unit.ps_server.partition import test_verdicts as verdicts

VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)),)
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
R0, R1, R2 = Rank(0), Rank(1), Rank(2)


def feed_of(samples: int, epochs: int = 1, batch_size: int = 2) -> FeedSpec:
    return FeedSpec(samples, "f", batch_size, epochs, shuffle=True, drop_last=False)


# ---- what is made up for


def positions(ledger: StepLedger, feed: int, step: int, rank: Rank) -> list[tuple[int, int]]:
    """The samples, as epoch and position, that a rank has at a step of the feed."""
    found = ledger.feed(feed)
    batch = found.make_up.batch(step, rank)
    if batch is None:
        return []
    epoch, begin, end = found.span(batch.rank, batch.step)
    return [(epoch, each) for each in range(begin, end)]


@given(
    ranks=st.integers(2, 5),
    samples=st.integers(1, 40),
    epochs=st.integers(1, 3),
    feeds=st.integers(1, 3),
    data=st.data(),
)
def test_promise_2_whoever_comes_late_each_sample_counts_once_an_epoch(
    ranks: int, samples: int, epochs: int, feeds: int, data: st.DataObject
) -> None:
    backup_workers = data.draw(st.integers(1, ranks - 1))
    ledger = StepLedger(logical_ranks=ranks, backup_workers=backup_workers)
    spec = feed_of(samples, epochs)
    step = 0
    for feed in range(feeds):
        assert ledger.open(feed, spec).first_step == step
        counted: Counter[tuple[int, int]] = Counter()
        condemned: set[tuple[int, int]] = set()
        while ledger.feed(feed).make_up.end != step:
            assert step < 10_000, "it comes to an end"
            working = [Rank(rank) for rank in range(ranks) if positions(ledger, feed, step, Rank(rank))]
            assert working, "a step is there for some samples"
            if data.draw(st.integers(0, 19)) == 0 and not ledger.quarantine.has(RankSource(working[0]), step):
                ledger.quarantine.add(QuarantinedWork(RankSource(working[0]), step, 3))
                condemned.update(positions(ledger, feed, step, working[0]))
            left_out = None
            for rank in data.draw(st.permutations(range(ranks))):
                ledger.verdicts.tell(step, [Rank(rank)])
                left_out = ledger.verdicts.due(step, ledger.working(step))
                if left_out is not None:
                    break
            assert left_out is not None
            assert len(left_out) <= backup_workers
            for rank in sorted(set(range(ranks)) - set(left_out)):
                counted.update(positions(ledger, feed, step, Rank(rank)))
            ledger.decide(step, left_out)
            step += 1
            quarantined = sum(each.end - each.begin for each in ledger.quarantined())
            taken = ledger.samples_done(step=step) - feed * samples * epochs
            if not quarantined:
                assert taken == sum(counted.values()), "and the books say so"
        assert counted + Counter(condemned) >= Counter({(e, s): 1 for e in range(epochs) for s in range(samples)})
        assert set(counted.values()) <= {1}
        assert ledger.feed(feed).close(step)


def test_what_is_made_up_is_known_when_the_step_before_is_decided_and_not_earlier() -> None:
    ledger = StepLedger(logical_ranks=3, backup_workers=1)
    ledger.open(0, feed_of(12))
    with pytest.raises(NotReady, match="data set 1 begins when"):
        ledger.open(1, feed_of(12))
    with pytest.raises(InvalidRequest, match="feed 0 is planned to step 2"):
        ledger.made_up(0, 1)
    ledger.decide(0, [R1])
    with pytest.raises(NotReady, match="step 1 is not decided"):
        ledger.made_up(0, 2)
    ledger.decide(1, [])
    assert ledger.made_up(0, 2) == ({R0: (0, R1)}, None)
    assert not ledger.feed(0).close(3)
    ledger.decide(2, [R2])  # which had nothing to do
    assert ledger.made_up(0, 3) == ({}, 3)
    assert ledger.made_up(0, 2) == ({R0: (0, R1)}, 3)
    assert ledger.open(1, feed_of(12)).first_step == 3
    with pytest.raises(NotFound):
        ledger.made_up(2, 3)


def test_batch_that_is_made_up_for_goes_to_another_rank_each_time() -> None:
    ledger = StepLedger(logical_ranks=3, backup_workers=1)
    ledger.open(0, feed_of(6))
    ledger.decide(0, [R0])
    given_to = []
    for step in range(1, 4):
        ((rank, batch),) = ledger.made_up(0, step)[0].items()
        assert batch == (0, R0)
        given_to.append(rank)
        ledger.verdicts.tell(step, {R0, R1, R2} - {rank})
        assert ledger.verdicts.due(step, ledger.working(step)) is None, "a step that has samples counts some"
        ledger.decide(step, [rank])  # else it would end here
    assert given_to == [0, 1, 2]


def test_a_job_without_backup_workers_ends_as_planned() -> None:
    ledger = StepLedger(logical_ranks=3)
    ledger.open(0, feed_of(12))
    assert ledger.open(1, feed_of(12)).first_step == 2
    assert not ledger.feed(0).close(1)
    assert ledger.feed(0).close(2)
    assert not ledger.verdicts.entries()


# ---- the coordinator

SETTINGS = JobSettings(
    partitions=2,
    consistency=ConsistencySettings(mode=ConsistencyMode.SYNC, logical_ranks=3, backup_workers=1),
    workers_expected=3,
    rank_grace_ms=0,
)


class Yard(MachineYard):
    def __init__(self, settings: JobSettings = SETTINGS) -> None:
        super().__init__(checkpoints="/checkpoints")
        self.register(MemberRole.SERVER, "s:0")
        self.workers = [self.join_as(self.register(MemberRole.WORKER), settings) for _ in range(3)]
        self.open_job(self.workers[0], VARIABLES, SGD)

    def tell(self, step: int, *ranks: int, worker: int = 0) -> tuple[Rank, ...] | None:
        answer = self.handle(events.StepReported(self.workers[worker], step, tuple(map(Rank, ranks))))
        assert isinstance(answer, effects.StepDecision)
        return answer.members

    @property
    def feeds(self) -> StepLedger:
        feeds = self.machine.jobs[-1].feeds
        assert isinstance(feeds, StepLedger)
        return feeds


def test_verdict_comes_when_enough_ranks_are_there_and_is_the_same_for_ever(short: bool) -> None:
    yard = Yard()
    yard.handle(events.FeedOpened(yard.workers[0], 0, feed_of(60)))
    assert yard.tell(0, 1) is None
    assert yard.tell(0, 1) is None, "said twice it is one rank"
    assert not yard.wanted(effects.Persist)
    assert yard.tell(0, 0, worker=1) == (R0, R1)
    (record,) = yard.wanted(effects.Persist)
    assert isinstance(record, effects.Persist)
    assert yard.effects.index(record) == 0, "written down before it is told"
    late = yard.machine.jobs[-1].ranks.owner(2)  # type: ignore[union-attr]
    assert {**record.body, "job": 0} == {"job": 0, "first": 0, "left_out": [[2]], "dropped": [[late, 1]]}
    assert yard.tell(0, 2) == (R0, R1)
    assert not yard.wanted(effects.Persist)
    assert (yard.job().dropped, work_verdicts.dropped_by(yard.machine.jobs[-1], late or Incarnation(0))) == (1, 1)
    yard.restart(from_snapshot=short)
    assert yard.tell(0, 2) == (R0, R1)
    assert yard.tell(0) == (R0, R1)
    assert yard.job().dropped == 1
    assert yard.tell(1, 0, 1, 2) == (R0, R1, R2)


def test_who_comes_late_is_told_to_wait_where_a_step_can_do_without_him() -> None:
    """Three planned steps, one that makes up for what was dropped in them, and a last one, of which each rank with
    samples may be needed."""
    consistency = SETTINGS.consistency.model_copy(update={"backup_patience": 0.0})
    yard = Yard(SETTINGS.model_copy(update={"consistency": consistency}))
    yard.handle(events.FeedOpened(yard.workers[0], 0, feed_of(18)))
    advice = []
    for step in range(4):
        yard.now_ms += 100
        for rank in (0, 1):
            yard.tell(step, rank, worker=rank)
        yard.now_ms += 50
        answer = yard.handle(events.StepReported(yard.workers[2], step, ()))
        assert isinstance(answer, effects.StepDecision)
        advice.append(answer.left_ms)
    assert [len(yard.feeds.working(step)) == 3 for step in range(5)] == [True, True, True, True, False]
    assert advice == [0, 138, 138, 0]
    yard.restart()
    answer = yard.handle(events.StepReported(yard.workers[2], 3, ()))
    assert answer == effects.StepDecision((R0, R1))


def test_others_are_waited_for_a_little_once_enough_are_there() -> None:
    yard = Yard()
    for step in range(2):
        yard.now_ms += 200
        for rank in range(3):
            yard.tell(step, rank, worker=rank)
    yard.now_ms += 180
    assert yard.tell(2, 0) is None
    answer = yard.handle(events.StepReported(yard.workers[1], 2, (R1,)))
    assert answer == effects.StepDecision(None, again_ms=20)
    assert not yard.wanted(effects.Persist)
    yard.now_ms += 19
    assert yard.tell(2, 1, worker=1) is None
    yard.now_ms += 1
    assert yard.tell(2, 1, worker=1) == (R0, R1), "not for longer"
    yard.now_ms += 190
    yard.tell(3, 0)
    assert yard.tell(3, 1, worker=1) is None
    yard.now_ms += 5
    assert yard.tell(3, 2, worker=2) == (R0, R1, R2), "who comes meanwhile counts, and nobody waits on"


def test_ranks_that_were_told_before_a_restart_are_told_again(short: bool) -> None:
    yard = Yard()
    assert yard.tell(0, 1) is None
    yard.restart(from_snapshot=short)
    assert yard.tell(0, 0) is None
    assert yard.tell(0, 1) == (R0, R1)


def test_contributions_that_cannot_be_are_refused() -> None:
    yard = Yard()
    with pytest.raises(InvalidRequest, match="step 0 is not decided yet"):
        yard.tell(1, 0)
    with pytest.raises(InvalidRequest, match="logical rank 3"):
        yard.tell(0, 0, 3)
    plain = Yard(JobSettings(partitions=2, workers_expected=3))
    for event in (events.StepReported(plain.workers[0], 0, (R0,)), events.MakeupRequested(plain.workers[0], 0, 0)):
        with pytest.raises(InvalidRequest, match="has no backup workers"):
            plain.handle(event)


def test_job_that_has_stopped_opens_no_data_set_behind_one_that_is_not_made_up_for() -> None:
    """Nobody knows where it would begin; nobody waits for that either."""
    yard = Yard()
    worker = yard.workers[0]
    yard.handle(events.FeedOpened(worker, 0, feed_of(12)))
    yard.tell(0, 0, 1)
    with pytest.raises(NotReady, match="data set 1 begins when"):
        yard.handle(events.FeedOpened(worker, 1, feed_of(12)))
    yard.handle(events.StopRequested(worker, "", "enough"))
    with pytest.raises(NotReady):
        yard.handle(events.FeedOpened(worker, 1, feed_of(12)))
    for each in yard.workers:
        yard.beat(each.incarnation, Report(step=1, stop_reached=1))
    (read,) = yard.wanted(effects.ReadSteps)
    assert isinstance(read, effects.ReadSteps)
    yard.handle(events.StepsRead(read.job, read.map.generation, 1))
    for feed in (1, 2):
        opening = yard.handle(events.FeedOpened(worker, feed, feed_of(12)))
        assert (opening.done, len(yard.feeds)) == (True, 1)  # type: ignore[attr-defined]
    opening = yard.handle(events.FeedOpened(worker, 0, feed_of(12)))
    assert not opening.done  # type: ignore[attr-defined]


def test_who_is_gone_is_forgotten_and_what_it_dropped_is_not(short: bool) -> None:
    yard = Yard()
    owner = yard.machine.jobs[-1].ranks.owner(2)  # type: ignore[union-attr]
    assert owner is not None
    yard.tell(0, 0, 1)
    yard.kill(owner)
    yard.restart(from_snapshot=short)
    assert (yard.job().dropped, work_verdicts.dropped_by(yard.machine.jobs[-1], owner)) == (1, 0)


def test_batch_that_came_late_is_never_condemned_under_its_old_name() -> None:
    """Its samples count at another step: listed as well they would be in the books twice."""
    settings = SETTINGS.model_copy(update={"data": SETTINGS.data.model_copy(update={"poison_deaths": 1})})
    yard = Yard(settings)
    yard.handle(events.FeedOpened(yard.workers[0], 0, feed_of(60)))
    yard.tell(0, 0, 1)
    job = yard.machine.jobs[-1]
    assert job.ranks is not None
    yard.kill(job.ranks.owner(2) or Incarnation(0))
    (fence,) = yard.wanted(effects.FenceOnServers) or [None]
    assert isinstance(fence, effects.FenceOnServers)
    yard.handle(events.WorkersFenced(fence.job, fence.workers))
    owner = job.ranks.owner(2)
    assert owner is not None
    token = next(lease.token for lease in job.ranks.of(owner) if lease.rank == 2)
    answer = yard.handle(events.BatchBegun(Caller(job.id, owner), RankSource(R2), token, 0, 0))
    assert isinstance(answer, effects.BatchVerdict)
    assert answer.counts is False
    assert not len(job.feeds.quarantine)


def test_checkpoint_has_the_verdicts_before_its_step_and_the_next_run_takes_them_over() -> None:
    yard = Yard()
    yard.handle(events.FeedOpened(yard.workers[0], 0, feed_of(12)))
    copied = yard.feeds.entries(verdicts=False)
    yard.tell(0, 0, 1)
    yard.tell(1, 1, 2)
    yard.tell(2, 0, 1)
    job = yard.machine.jobs[-1]
    kept = {"entries": [[kind, dict(body)] for kind, body in (*copied, *work_verdicts.verdicts_before(job, 2))]}
    then = StepLedger(logical_ranks=3, backup_workers=1)
    checkpoint_copy.begin_with(then, kept, 2)
    assert then.verdicts.decided == 2
    assert then.made_up(0, 2) == ({R0: (0, R2), R1: (1, R0)}, None)
    assert then.samples_done(step=2) == 8
    bare = StepLedger(logical_ranks=3, backup_workers=1)
    checkpoint_copy.begin_with(bare, {"entries": [[kind, dict(body)] for kind, body in copied]}, 1)
    assert (bare.verdicts.decided, bare.verdicts.members(0)) == (1, ()), "a run without backup workers says nothing"


def test_verdicts_are_kept_until_no_partition_can_stand_there_again() -> None:
    ledger = StepLedger(logical_ranks=3, backup_workers=1)
    ledger.open(0, feed_of(12))
    for step, left_out in enumerate([[R2], [], [R1]]):
        ledger.decide(step, left_out)
    early = {"entries": [[kind, dict(body)] for kind, body in ledger.entries(verdicts=False)]}
    assert ledger.feed(0).close(3)
    checkpoint_copy.forget_made_up(ledger, early)
    assert ledger.verdicts.members(0) == (R0, R1)
    copy = {"entries": [[kind, dict(body)] for kind, body in ledger.entries(verdicts=False)]}
    checkpoint_copy.forget_made_up(ledger, copy)
    assert ledger.verdicts.members(2) == (), "who counted is not known any more"
    assert ledger.made_up(0, 3) == ({}, 3)
    again = StepLedger(logical_ranks=3, backup_workers=1)
    for kind, body in ledger.entries():
        again.restore(kind, Body(body))
    assert again.entries() == ledger.entries()
    assert again.open(1, feed_of(12)).first_step == ledger.open(1, feed_of(12)).first_step == 3


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"job.consistency.mode": "async", "job.consistency.backup_workers": 1}, "consistency.mode"),
        (
            {
                "job.consistency.mode": "sync",
                "job.consistency.logical_ranks": 2,
                "job.consistency.backup_workers": 2,
            },
            "consistency.logical_ranks",
        ),
    ],
)
def test_settings_that_leave_nobody_to_wait_for_are_refused(given: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match="backup_workers") as refused:
        configuration.load(None, {}, given)
    assert named in str(refused.value)


# ---- servers


def late(ranks: int = 3, backup_workers: int = 1, norm: float = 0.0) -> Partition:
    clipping = Clipping(norm=norm)
    made = Partition(
        verdicts.LAYOUT,
        verdicts.PARTITION,
        UpdateRules(UpdateMode.SYNC, ranks, clipping=clipping, backup_workers=backup_workers),
    )
    for rank in range(ranks):
        made.open_source(SourceKey(RankSource(Rank(rank))), Token(1))
    return made


def nexts(partition: Partition, ranks: int = 3) -> list[int]:
    return [partition.watermark(SourceKey(RankSource(Rank(rank)))).next for rank in range(ranks)]


def members(step: int, *ranks: int) -> StepVerdict:
    return StepVerdict(step, members=tuple(map(Rank, ranks)))


def decide(partition: Partition, step: int, *ranks: int) -> None:
    take_verdict([partition], members(step, *ranks), verdicts.current)


def give(partition: Partition, rank: int, step: int, value: float) -> Outcome:
    return verdicts.push(partition, rank, step, verdicts.gradient([value] * 8))


@pytest.mark.parametrize("arrival", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_members_count_and_nobody_else_whoever_has_contributed(arrival: Sequence[int]) -> None:
    partition = late()
    for rank in arrival:
        assert give(partition, rank, 0, 10.0**rank) is Outcome.RECORDED
    assert partition.describe()[0].number == 0, "nobody knows who counts"
    decide(partition, 0, 0, 2)
    assert verdicts.values(partition)[:8] == [-50.5] * 8
    assert nexts(partition) == [1, 1, 1]
    assert give(partition, 1, 0, 10.0) is Outcome.DROPPED
    assert give(partition, 2, 0, 100.0) is Outcome.DUPLICATE


def test_step_waits_for_its_members_and_is_over_for_the_others() -> None:
    partition = late()
    give(partition, 0, 0, 4.0)
    decide(partition, 0, 0, 1)
    assert nexts(partition) == [1, 0, 1]
    assert give(partition, 2, 0, 100.0) is Outcome.DROPPED
    assert partition.describe()[0].number == 0
    assert give(partition, 1, 0, 2.0) is Outcome.APPLIED
    assert verdicts.values(partition)[:8] == [-3.0] * 8
    give(partition, 2, 1, 1.0)
    give(partition, 0, 1, 1.0)
    decide(partition, 1, 0, 2)
    assert give(partition, 1, 1, 1.0) is Outcome.DROPPED
    assert partition.describe()[0].number == 2


def test_verdict_is_taken_once_and_another_one_is_refused() -> None:
    partition = late()
    give(partition, 0, 0, 4.0)
    for step, ranks in ((0, (0,)), (0, (0, 3)), (1, (0, 1))):
        with pytest.raises(InvalidRequest):
            decide(partition, step, *ranks)
    with pytest.raises(InvalidRequest):
        take_verdict([partition], StepVerdict(0, 4.0), verdicts.current)
    decide(partition, 0, 0, 1)
    decide(partition, 0, 0, 1)
    with pytest.raises(InvalidRequest, match="others were named before"):
        decide(partition, 0, 0, 2)
    give(partition, 1, 0, 2.0)
    decide(partition, 0, 0, 2)  # of a step that was taken, nothing is looked at
    assert partition.describe()[0].number == 1
    with pytest.raises(InvalidRequest, match="whose steps need none"):
        decide(verdicts.clipped(3, norm=0.0), 0, 0, 1)


def test_empty_contributions_are_present_and_weigh_nothing() -> None:
    partition = late()
    assert verdicts.push(partition, 2, 0, verdicts.EMPTY) is Outcome.RECORDED
    give(partition, 1, 0, 3.0)
    decide(partition, 0, 1, 2)
    assert verdicts.values(partition)[:8] == [-3.0] * 8


def test_checkpoint_between_verdict_and_members_has_none_of_the_step() -> None:
    partition = late()
    give(partition, 0, 0, 4.0)
    decide(partition, 0, 0, 1)
    cut = take_cut(partition)
    assert [mark.next for mark in cut.marks] == [0, 0, 0]
    cut.release()


def test_the_mean_of_the_members_is_clipped() -> None:
    partition = late(norm=1.0)
    for rank in range(3):
        give(partition, rank, 0, float(rank))
    assert gathered_part(partition, 0) is None
    decide(partition, 0, 0, 2)
    assert gathered_part(partition, 0) == GatheredPart(verdicts.PARTITION, 0, 8.0)
    decide(partition, 0, 0, 2)
    assert give(partition, 1, 0, 1.0) is Outcome.DROPPED
    take_verdict([partition], StepVerdict(0, 100.0, (R0, R2)), verdicts.current)
    assert verdicts.values(partition)[:8] == [-1.0 / (10.0 + 1e-6)] * 8


def test_waits_name_the_verdict_then_the_members() -> None:
    gate: StepGate[verdicts.Word] = StepGate(PartitionId(1), 3, backup_workers=1)
    assert gate.awaits_members
    gate.record(R0, verdicts.Word())
    assert gate.name_members((R0, R2)) == (R1,)
    assert not gate.awaits_members
    assert gate.missing() == (R2,)
    assert not gate.is_empty


# ---- logs


@pytest.fixture
def wal(tmp_path: Path) -> Iterator[logs.Yard]:
    with logs.yard_of(tmp_path, UpdateMode.SYNC) as made:
        made.rules = dataclasses.replace(made.rules, backup_workers=1)
        yield made


def bring(store: Store, verdict: StepVerdict) -> None:
    order = logs.order_of(store, 0)
    pushes.take_verdict(store, admission.admit(store, order.caller, order.server, order.generation), order, verdict)


@pytest.mark.parametrize("after", range(6))
def test_promise_3_steps_without_their_latest_ranks_come_back_to_the_bit(wal: logs.Yard, after: int) -> None:
    """Wherever the server dies: before a verdict, behind it, when a late push has come."""
    first = wal.first()
    saved = wal.save(first, 2)
    one, two = RankSource(R0), RankSource(R1)
    ways = [
        lambda: logs.push(first, 0, source=one),
        lambda: bring(first, members(0, 0)),
        lambda: logs.push(first, 0, source=two),
        lambda: bring(first, members(1, 1)),
        lambda: logs.push(first, 1, source=two),
    ]
    outcomes = [way() for way in ways[:after]]
    assert after < 3 or outcomes[2] == {Outcome.DROPPED}
    before = logs.state(first)
    second = wal.successor(saved, 2, logs.FIRST)
    assert logs.state(second) == before
    for way in (partial(bring, second, members(0, 0)), partial(bring, second, members(1, 1))):
        if after:
            way()
        after = max(0, after - 2)
    if 2 <= len(outcomes) < 5:  # before it has counted in a later step
        assert logs.push(second, 0, source=two) == {Outcome.DROPPED}


def test_server_refuses_backup_workers_that_leave_nobody() -> None:
    for mode, ranks, backups in ((UpdateMode.ASYNC, 2, 1), (UpdateMode.SYNC, 2, 2)):
        store = Store()
        store.become(Incarnation(3), logs.COORDINATOR.term)
        with pytest.raises(InvalidRequest, match="backup workers in job"):
            orders.create(
                store,
                CreateRequest(
                    logs.JOB, logs.GENERATION, logs.LAYOUT, logs.OWNED, UpdateRules(mode, ranks, backup_workers=backups)
                ),
            )
        store.close()
