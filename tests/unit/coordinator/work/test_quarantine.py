"""Batches that kill their workers: which are condemned, when, and that it is never forgotten (rule A13). Further
scenarios: transcripts/quarantine.txt."""

from __future__ import annotations

import pytest

from shardyard.config.settings import ConsistencySettings, DataSettings, JobSettings
from shardyard.domain import limits
from shardyard.domain.consistency import ConsistencyMode, UpdateMode
from shardyard.domain.errors import NotFound, StaleToken
from shardyard.domain.ids import Caller, Incarnation, JobId, MemberRole, Rank, Term, Token
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.push_names import DataLease, DataShardSource, LeasedSource, RankSource
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import BatchVerdict
from shardyard_coordinator.machine import job_views
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.records import Body, DamagedRecord
from shardyard_coordinator.service import status
from shardyard_coordinator.work import checkpoint_copy
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.feeds import FeedSpec
from shardyard_coordinator.work.quarantine import QUARANTINED_MAX, Quarantine, QuarantinedWork, Suspects
from shardyard_coordinator.work.step_ledger import StepLedger
from tests.simulation.restoring import numbered, renew, state_of
from tests.support.machine_yards import MachineYard

SPEC = FeedSpec(samples=95, fingerprint="f", batch_size=10, epochs=2, shuffle=True, drop_last=False)
VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)),)
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
SHARD = DataShardSource(0, 0, 0)
MAX = limits.SEQUENCE_MAX


class Yard(MachineYard):
    """A machine with one server, and workers that come, lease, announce and die."""

    def __init__(self, mode: UpdateMode = UpdateMode.ASYNC, deaths: int = 3, checkpoints: str | None = None) -> None:
        super().__init__(checkpoints=checkpoints)
        self.settings = JobSettings(
            workers_expected=1,
            rank_grace_ms=0,
            consistency=ConsistencySettings(mode=ConsistencyMode(mode.value), logical_ranks=2),
            data=DataSettings(batches_per_data_shard=5, poison_deaths=deaths),
        )
        self.job_id = JobId(0)
        self.server = self.register(MemberRole.SERVER, "s:1")
        first = self.hire()
        self.open_job(self.caller(first), VARIABLES, SGD)
        self.handle(events.FeedOpened(self.caller(first), 0, SPEC))
        self.first = first

    def handle(self, event: events.Event) -> object:
        """Servers refuse at once whom they are told to."""
        answer = super().handle(event)
        for wanted in self.effects:
            if isinstance(wanted, effects.FenceOnServers):
                self.handle(events.WorkersFenced(wanted.job, wanted.workers))
        return answer

    def hire(self) -> Incarnation:
        worker = self.register(MemberRole.WORKER)
        self.job_id = self.join_as(worker, self.settings).job
        return worker

    def caller(self, worker: Incarnation) -> Caller:
        return Caller(self.job_id, worker)

    def lease(self, worker: Incarnation) -> DataLease:
        found = self.handle(events.LeaseRequested(self.caller(worker), 0))
        assert isinstance(found, DataLease), found
        return found

    def begin(
        self, worker: Incarnation, source: LeasedSource, token: Token, sequence: int, highest: int = 0
    ) -> BatchVerdict:
        found = self.handle(events.BatchBegun(self.caller(worker), source, token, sequence, highest))
        assert isinstance(found, BatchVerdict), found
        return found

    def die_at(self, *sequences: int) -> None:
        """One worker after the other, each at a batch of the first data shard."""
        for sequence in sequences:
            worker = self.hire()
            lease = self.lease(worker)
            assert lease.source == SHARD
            for batch in range(sequence + 1):
                assert self.begin(worker, SHARD, lease.token, batch).counts
            self.kill(worker)

    def condemned(self) -> list[tuple[LeasedSource, int, int]]:
        return [(each.source, each.sequence, each.deaths) for each in self.machine.jobs[0].feeds.quarantine]


def test_deaths_at_different_batches_condemn_none() -> None:
    yard = Yard()
    yard.lease(yard.first)
    yard.kill(yard.first)
    yard.die_at(0, 1, 2, 3, 4)
    worker = yard.hire()
    lease = yard.lease(worker)
    assert all(yard.begin(worker, SHARD, lease.token, batch).counts for batch in range(5))
    assert yard.condemned() == []


def test_no_verdict_while_a_checkpoint_may_have_copied_the_ledger_already() -> None:
    """A checkpoint with an empty push that its data ledger does not list would count the batch in some partitions."""
    yard = Yard(deaths=2, checkpoints="memory://c")
    yard.lease(yard.first)
    yard.kill(yard.first)
    yard.die_at(0)
    worker = yard.hire()
    lease = yard.lease(worker)
    yard.handle(events.Ticked())
    job = yard.machine.jobs[0]
    draft = job.book.draft
    assert draft is not None
    assert yard.begin(worker, SHARD, lease.token, 0) == BatchVerdict(None, MAX)
    assert yard.condemned() == []
    yard.handle(events.CheckpointTaken(job.id, draft.number, draft.number, draft.step))
    assert yard.begin(worker, SHARD, lease.token, 0).counts is False


def test_verdict_outlives_a_restore_that_takes_the_data_shard_back() -> None:
    yard = Yard(deaths=2, checkpoints="memory://c")
    yard.handle(events.Ticked())
    job = yard.machine.jobs[0]
    draft = job.book.draft
    assert draft is not None
    yard.handle(events.CheckpointTaken(job.id, draft.number, draft.number, draft.step))
    yard.lease(yard.first)
    yard.kill(yard.first)
    yard.die_at(3)
    worker = yard.hire()
    lease = yard.lease(worker)
    assert yard.begin(worker, SHARD, lease.token, 3).counts is False
    returned = events.LeaseReturned(yard.caller(worker), 0, SHARD, lease.token)
    assert yard.handle(events.LedgerRead(returned, 5)) == effects.LeaseClosed(done=True)
    assert not job.suspects.has(SHARD)
    yard.kill(worker)
    checkpoint_copy.reopen(job.feeds, job.book.committed.data_ledger)
    again = yard.lease(yard.hire())
    assert (again.source, again.announce_until) == (SHARD, 4), "announced as far as there is something to hear"


# ---- synchronous


def rank_lease(yard: Yard, worker: Incarnation, rank: int = 0) -> tuple[Token, int]:
    found = next(each for each in job_views.ranks_of(yard.machine.jobs[0], worker) if each.rank == rank)
    return found.token, found.announce_until


def test_step_of_a_logical_rank_that_kills_its_workers_does_not_count() -> None:
    yard = Yard(UpdateMode.SYNC)
    source = RankSource(Rank(0))
    assert rank_lease(yard, yard.first)[1] == 0
    yard.kill(yard.first)
    for _ in range(2):
        worker = yard.hire()
        token, announce_until = rank_lease(yard, worker)
        assert announce_until == MAX
        assert yard.begin(worker, source, token, 3).counts
        assert yard.begin(worker, RankSource(Rank(1)), rank_lease(yard, worker, 1)[0], 3).counts
        assert yard.begin(worker, source, token, 4).counts
        yard.kill(worker)
    worker = yard.hire()
    token, _ = rank_lease(yard, worker)
    assert yard.begin(worker, source, token, 3).counts
    assert yard.begin(worker, source, token, 4).counts is False
    assert yard.condemned() == [(source, 4, 3)]
    assert yard.begin(worker, source, token, 5) == BatchVerdict(True, 5), "two steps further it is trusted again"
    assert rank_lease(yard, worker)[1] == 5, "a job that goes back to a checkpoint announces what is condemned"


def test_announcing_a_step_that_is_not_ones_own_is_refused() -> None:
    yard = Yard(UpdateMode.SYNC)
    token, _ = rank_lease(yard, yard.first)
    with pytest.raises(StaleToken):
        yard.begin(yard.first, RankSource(Rank(0)), Token(token + 9), 0)
    with pytest.raises(NotFound):
        yard.begin(yard.first, RankSource(Rank(0)), token, 99)
    with pytest.raises(NotFound):
        yard.begin(yard.first, SHARD, token, 0)


# ---- what is listed


def test_list_has_the_samples_by_position() -> None:
    yard = Yard(deaths=2)
    for _ in range(2):
        yard.handle(
            events.LedgerRead(
                events.LeaseReturned(yard.caller(yard.first), 0, (lease := yard.lease(yard.first)).source, lease.token),
                5,
            )
        )
    last = yard.lease(yard.first)
    assert last.source == DataShardSource(0, 1, 0)
    for _ in range(3):
        worker = yard.machine.jobs[0].workers[0]
        held = yard.lease(worker)
        verdict = yard.begin(worker, held.source, held.token, 1)
        yard.hire()
        yard.kill(worker)
    assert verdict.counts is False
    listed = status.list_quarantined(yard.machine, yard.job_id)
    (batch,) = listed.batches
    assert (batch.feed, batch.epoch, batch.begin, batch.end) == (0, 1, 10, 20)
    assert [(each.feed, each.samples, each.shuffle) for each in listed.feeds] == [(0, SPEC.samples, SPEC.shuffle)]
    (counts,) = job_views.feed_counts(yard.machine.jobs[0], 1)
    assert counts.quarantined == 1
    with pytest.raises(NotFound):
        status.list_quarantined(yard.machine, JobId(77))


def test_samples_in_quarantine_are_not_counted() -> None:
    books = DataLedger(batches_per_data_shard=5, workers_expected=1, next_token=lambda: Token(1))
    books.open(0, SPEC)
    books.quarantine.add(QuarantinedWork(DataShardSource(0, 0, 1), 4, 3))
    worker = Incarnation(1)
    done = []
    for _ in range(2):
        lease = books.lease(0, worker)
        assert isinstance(lease, DataLease)
        books.close(lease.source, worker, lease.token, next_sequence=5)
        done.append(books.samples_done())
    assert done == [50, 90], "the last batch of the epoch has 5 samples"
    steps = StepLedger(logical_ranks=2)
    steps.open(0, SPEC)
    steps.quarantine.add(QuarantinedWork(RankSource(Rank(1)), 4, 3))
    assert [steps.samples_done(step=step) for step in (4, 5, 6)] == [80, 90, 110]
    (batch,) = steps.quarantined()
    assert (batch.epoch, batch.begin, batch.end) == (0, 90, 95)


# ---- records


def test_records_bring_back_who_died_where_and_what_is_condemned() -> None:
    yard = Yard()
    yard.lease(yard.first)
    yard.kill(yard.first)
    yard.die_at(2, 2, 1)
    worker = yard.hire()
    lease = yard.lease(worker)
    assert yard.begin(worker, SHARD, lease.token, 2).counts is False
    yard.begin(worker, SHARD, lease.token, 3)
    renew(yard.machine, 0)
    for persisted in (yard.persisted, yard.machine.snapshot()):
        again = Machine.restore(numbered(persisted), term=Term(1), lease_ms=1_000, now_ms=0)
        assert state_of(again) == state_of(yard.machine)
        event = events.BatchBegun(yard.caller(worker), SHARD, lease.token, 2, 0)
        assert again.handle(event, 0) == [effects.Reply(BatchVerdict(False, MAX))]


@pytest.mark.parametrize(
    "changes", [{"sequence": 5}, {"epoch": 2}, {"index": 2}, {"feed": 1}, {"rank": 0}, {"deaths": 0}, {"sequence": -1}]
)
def test_record_of_a_batch_that_cannot_be_is_refused(changes: dict[str, int]) -> None:
    books = DataLedger(batches_per_data_shard=5, workers_expected=1, next_token=lambda: Token(1))
    books.open(0, SPEC)
    body = {"feed": 0, "epoch": 0, "index": 0, "sequence": 0, "deaths": 2}
    with pytest.raises(DamagedRecord):
        books.restore("batch_quarantined", Body({**body, **changes}))
    books.restore("batch_quarantined", Body({**body, "sequence": 1}))
    with pytest.raises(DamagedRecord, match="twice"):
        books.restore("batch_quarantined", Body({**body, "sequence": 1}))


def test_checkpoint_lists_what_is_in_quarantine() -> None:
    books = DataLedger(batches_per_data_shard=5, workers_expected=1, next_token=lambda: Token(1))
    books.open(0, SPEC)
    books.quarantine.add(QuarantinedWork(SHARD, 1, 3))
    kept = {"entries": [[kind, body] for kind, body in books.entries()]}
    checkpoint_copy.reopen(books, kept)
    assert books.quarantine.has(SHARD, 1)


# ---- bounds


def test_quarantine_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert QUARANTINED_MAX >= 1_000
    monkeypatch.setattr("shardyard_coordinator.work.quarantine.QUARANTINED_MAX", 1)
    found = Quarantine()
    assert not found.full
    found.add(QuarantinedWork(SHARD, 0, 2))
    assert found.full


def test_only_so_many_suspects_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardyard_coordinator.work.quarantine.SUSPECTS_MAX", 2)
    suspects = Suspects(3)
    sources = [DataShardSource(0, 0, index) for index in range(3)]
    for source in sources:
        suspects.lose(Incarnation(1), [source])
    assert [suspects.has(source) for source in sources] == [False, True, True]
