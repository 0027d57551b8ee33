"""Converts a job's data ledger to a step ledger, and a step ledger to a data ledger.

A job that switches between asynchronous and synchronous updates continues with a new ledger. What the old ledger has
counted is done in the new one, and what is in quarantine stays there. Only this module knows both ledgers.
"""

from __future__ import annotations

from dataclasses import replace

from shardyard.domain.errors import InvalidRequest
from shardyard.domain.push_names import DataShardSource
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.step_ledger import StepLedger


def take_over_steps(ledger: DataLedger, steps: StepLedger, step: int) -> list[tuple[DataShardSource, int]]:
    """Fills an empty data ledger from the steps of a job that stands before `step`. Returns each data shard that is
    partly counted, with the number of its batches that are."""
    assert not len(ledger)
    begun: list[tuple[DataShardSource, int]] = []
    for feed in steps.opened:
        part = ledger.continue_feed(feed.spec, *feed.place(step), feed.batches_per_data_shard or None)
        if part is not None:
            begun.append(part)
    for left_out in steps.quarantined():
        if isinstance(left_out.condemned.source, DataShardSource):  # from before there were steps
            ledger.quarantine.add(left_out.condemned)
            continue
        size, batches = steps.feed(left_out.feed).spec.batch_size, ledger.feed(left_out.feed).batches_per_data_shard
        for at in range(left_out.begin, left_out.end, size):
            index, rest = divmod(at, batches * size)
            source = DataShardSource(left_out.feed, left_out.epoch, index)
            ledger.quarantine.add(replace(left_out.condemned, source=source, sequence=rest // size))
    return begun


def take_over_data(steps: StepLedger, ledger: DataLedger, step: int) -> None:
    """Fills an empty step ledger from a data ledger whose begun data shards are all done. The first step is `step`.
    Raises InvalidRequest if the rest cannot be dealt in steps."""
    assert not len(steps)
    assert ledger.is_drained
    check(steps, ledger)
    for shards in ledger.opened:
        steps.continue_feed(shards.spec, step, shards.place(), shards.batches_per_data_shard)
    for condemned in ledger.quarantine:
        steps.quarantine.add(condemned)


def check(steps: StepLedger, ledger: DataLedger) -> None:
    """Raises InvalidRequest if what is left of an asynchronous job's feeds cannot be dealt in steps."""
    *before, _ = ledger.counts(len(ledger))
    for each in before:
        if not each.finished:
            raise InvalidRequest(
                f"data set {each.feed + 1} was begun before all of data set {each.feed} was done",
                why="in a synchronous job the steps of one data set follow those of the other",
                todo="go through each job.batches to its end",
            )
    for shards in ledger.opened:
        steps.check_feed(shards.spec)
