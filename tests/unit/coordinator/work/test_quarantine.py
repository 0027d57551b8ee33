"""Batches that kill their workers: which are condemned, when, and that it is never forgotten (rule A13). Further
scenarios: transcripts/quarantine.txt."""

from __future__ import annotations

import pytest

from shardyard.domain import limits
from shardyard.domain.errors import NotFound
from shardyard.domain.ids import Incarnation, JobId, Rank, Term, Token
from shardyard.domain.push_names import DataLease, DataShardSource, RankSource
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import BatchVerdict
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
from tests.support.transcript_commands import do
from tests.support.transcripts import Stage

SPEC = FeedSpec(samples=95, fingerprint="f", batch_size=10, epochs=2, shuffle=True, drop_last=False)
SHARD = DataShardSource(0, 0, 0)
MAX = limits.SEQUENCE_MAX


def test_list_of_a_job_that_is_not_there_is_refused() -> None:
    with pytest.raises(NotFound):
        status.list_quarantined(MachineYard().machine, JobId(77))


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
    stage = Stage()
    for command in (
        "yard servers=1",
        "settings default workers_expected=1 rank_grace_ms=0 data.batches_per_data_shard=5 data.poison_deaths=3",
        "join a",
        "run a",
        "feed a samples=95 epochs=2",
        "lease a",
        "kill a",
        "fenced a",
        *(f"die-at {name} {at}" for name, at in (("b", 2), ("c", 2), ("d", 1))),
        "join e",
        "lease e",
        "batch e 2",
        "batch e 3",
    ):
        do(stage, command)
    yard, lease = stage.yard, stage.leases["e"]
    assert lease.source == SHARD
    (condemned,) = yard.machine.jobs[0].feeds.quarantine
    assert (condemned.source, condemned.sequence) == (SHARD, 2)
    renew(yard.machine, 0)
    for persisted in (yard.persisted, yard.machine.snapshot()):
        again = Machine(term=Term(1), lease_ms=1_000, now_ms=0).restored(numbered(persisted))
        assert state_of(again) == state_of(yard.machine)
        event = events.BatchBegun(stage.caller("e"), SHARD, lease.token, 2, 0)
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
