"""Feeds whose steps have several batches, or are rounds of local steps: how they are cut, counted, listed, recorded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import pytest

from shardyard.checkpoints.manifest import Manifest
from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain import errors
from shardyard.domain.consistency import ConsistencyMode, UpdateMode
from shardyard.domain.ids import Incarnation, JobId, Rank, Token
from shardyard.domain.limits import ACCUMULATE_MAX
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.push_names import DataLease, DataShardSource, RankSource
from shardyard.domain.variables import DType, VariableSpec
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.placement.placement import plan
from shardyard_coordinator.records import Body, DamagedRecord, Entry
from shardyard_coordinator.service import checkpoint_io
from shardyard_coordinator.service.rpcs import data
from shardyard_coordinator.work import checkpoint_copy
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.feeds import FeedOpening, FeedSpec
from shardyard_coordinator.work.quarantine import QuarantinedWork
from shardyard_coordinator.work.step_ledger import StepLedger

WORKER = Incarnation(7)


def spec(samples: int = 100, **more: object) -> FeedSpec:
    given = FeedSpec(samples, "f", 5, 1, shuffle=True, drop_last=False)
    return dataclasses.replace(given, **more)


def made_anew(ledger: StepLedger, entries: Sequence[Entry]) -> StepLedger:
    """As a journal gives them back."""
    for kind, body in entries:
        ledger.restore(kind, Body(json.loads(json.dumps(body))))
    return ledger


# ---- asynchronous


def async_ledger(batches_per_data_shard: int | None) -> DataLedger:
    return DataLedger(batches_per_data_shard=batches_per_data_shard, workers_expected=2, next_token=lambda: Token(1))


@pytest.mark.parametrize(("wanted", "given"), [(1, 4), (4, 4), (5, 8), (None, 4)])
def test_data_shards_are_made_of_whole_pushes(wanted: int | None, given: int) -> None:
    ledger = async_ledger(wanted)
    opened = ledger.open(0, spec(accumulate=4))
    assert opened.batches_per_data_shard == given
    assert opened.units_per_epoch == -(-20 // given)
    lease = ledger.lease(0, WORKER)
    assert isinstance(lease, DataLease)
    assert (lease.begin, lease.end) == (0, given * 5)


def test_samples_of_the_last_data_shard_are_counted() -> None:
    ledger = async_ledger(4)
    ledger.open(0, spec(samples=103, accumulate=4))
    for index in range(6):
        ledger.lease(0, WORKER)
        ledger.close(DataShardSource(0, 0, index), WORKER, Token(1), next_sequence=4 if index < 5 else 1)
    assert ledger.samples_done() == 103


# ---- synchronous


def test_a_step_has_all_batches_of_all_ranks() -> None:
    ledger = StepLedger(logical_ranks=2)
    assert ledger.open(0, spec(samples=103, accumulate=3, epochs=2)) == FeedOpening(0, 4, 0, False)
    assert ledger.open(1, spec(samples=30)) == FeedOpening(0, 3, 8, False)
    assert [ledger.samples_done(step=step) for step in range(12)] == [
        0, 30, 60, 90, 103, 133, 163, 193, 206, 216, 226, 236
    ]  # fmt: skip


def test_a_round_has_the_samples_of_its_steps() -> None:
    ledger = StepLedger(logical_ranks=2, local_steps=4)
    assert ledger.open(0, spec(samples=103, epochs=2)) == FeedOpening(0, 3, 0, False)
    assert [ledger.samples_done(step=step) for step in range(7)] == [0, 40, 80, 103, 143, 183, 206]


def test_drop_last_leaves_out_a_step_not_a_round() -> None:
    ledger = StepLedger(logical_ranks=2, local_steps=4)
    ledger.open(0, spec(samples=98, drop_last=True))
    assert ledger.samples_done(step=9) == 90
    with pytest.raises(errors.InvalidRequest, match="3 samples are fewer than one step of 2 logical ranks of 10"):
        ledger.open(1, spec(samples=3, drop_last=True))


@pytest.mark.parametrize("local_steps", [1, 4])
def test_what_is_in_quarantine_is_listed_by_its_samples(local_steps: int) -> None:
    ledger = StepLedger(logical_ranks=2, local_steps=local_steps)
    ledger.open(0, spec(samples=103, accumulate=2))
    ledger.quarantine.add(QuarantinedWork(RankSource(Rank(1)), 1, 3))
    (batch,) = ledger.quarantined()
    # of a round: the second has the steps from 80 on, of which there are two
    assert (batch.begin, batch.end) == ((30, 40) if local_steps == 1 else (100, 103))
    assert ledger.samples_done(step=8) == 103 - (batch.end - batch.begin)
    again = made_anew(StepLedger(logical_ranks=2, local_steps=local_steps), ledger.entries())
    assert list(again.quarantined()) == [batch]


def test_a_feed_of_other_rounds_cannot_go_on() -> None:
    """As where a run goes on from the checkpoint of one with another number of local steps."""
    first = StepLedger(logical_ranks=2, local_steps=4)
    first.open(0, spec())
    second = StepLedger(logical_ranks=2, local_steps=5)
    checkpoint_copy.begin_with(second, {"entries": [list(entry) for entry in first.entries()]})
    with pytest.raises(errors.FeedConflict, match="expected 3, got 2") as raised:
        second.open(0, spec())
    assert raised.value.facts == {"differs": "steps"}
    third = StepLedger(logical_ranks=2, local_steps=4)
    checkpoint_copy.begin_with(third, {"entries": [list(entry) for entry in first.entries()]})
    assert third.open(0, spec()).units_per_epoch == 3


# ---- agreed on, bounded, recorded


def test_workers_that_accumulate_otherwise_are_refused() -> None:
    for ledger in (StepLedger(logical_ranks=2), async_ledger(4)):
        ledger.open(0, spec(accumulate=2))
        with pytest.raises(errors.FeedConflict, match="accumulate: expected 2, got 3"):
            ledger.open(0, spec(accumulate=3))


@pytest.mark.parametrize(
    ("accumulate", "error"), [(0, errors.InvalidRequest), (ACCUMULATE_MAX, None), (ACCUMULATE_MAX + 1, errors.TooLarge)]
)
def test_how_much_is_accumulated_is_bounded(accumulate: int, error: type[errors.ShardyardError] | None) -> None:
    if error is None:
        spec(accumulate=accumulate).check()
        return
    with pytest.raises(error, match="accumulate"):
        spec(accumulate=accumulate).check()


@pytest.mark.parametrize(("sent", "taken"), [(0, 1), (1, 1), (6, 6)])
def test_who_says_nothing_does_not_accumulate(sent: int, taken: int) -> None:
    request = wire.OpenFeedRequest(samples=10, fingerprint="f", batch_size=5, epochs=1, accumulate=sent)
    assert data.open_feed_event(request).spec.accumulate == taken


def test_records_have_what_is_accumulated() -> None:
    ledger = StepLedger(logical_ranks=2)
    ledger.open(0, spec(accumulate=3))
    again = made_anew(StepLedger(logical_ranks=2), ledger.entries())
    assert again.feed(0).spec.accumulate == 3
    ((kind, body),) = ledger.entries()
    older = {name: value for name, value in body.items() if name != "accumulate"}
    before = StepLedger(logical_ranks=2)
    before.restore(kind, Body(older))
    assert before.feed(0).spec.accumulate == 1, "of a release before"
    with pytest.raises(DamagedRecord):
        StepLedger(logical_ranks=2).restore(kind, Body({**body, "accumulate": 0}))


def test_a_run_can_begin_with_a_checkpoint_that_has_a_step_of_any_rank_in_quarantine() -> None:
    settings = JobSettings(consistency=ConsistencySettings(mode=ConsistencyMode.LOCAL, steps=4, logical_ranks=2))
    ledger = StepLedger(logical_ranks=2, local_steps=4)
    ledger.open(0, spec())
    ledger.quarantine.add(QuarantinedWork(RankSource(Rank(1)), 1, 3))
    sgd = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
    manifest = Manifest(
        number=1,
        job_name="job",
        job=JobId(1),
        seed=0,
        settings=settings.model_dump(mode="json"),
        mode=UpdateMode.SYNC,
        step=2,
        created="2025-01-01T00:00:00+00:00",
        layout=plan([VariableSpec("w", DType.FLOAT32, (4,))], sgd, partitions=1, block_bytes=64),
        partitions=(),
        data_ledger={"entries": [list(entry) for entry in ledger.entries()]},
    )
    assert checkpoint_io._origin_of(manifest, "/somewhere").logical_ranks == 2
