"""The copy of a job's ledger in a checkpoint, and what it says when partitions go back to that checkpoint.

A copy is the ledger's records from when the checkpoint was begun, before any partition was cut (rule A9). Only the work
that it lists as done is certainly in all partitions of the checkpoint. So when partitions go back, work that was done
since is open again (rule A11), and a run that begins with the checkpoint begins with its copy. Must not know: storage,
servers, when a job goes back.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardyard.domain import limits
from shardyard.domain.push_names import DataShardSource, DoneDataShards
from shardyard_coordinator.records import Body, Entry, checked_items, checked_number, require
from shardyard_coordinator.work.data_ledger import DataLedger, new_data_ledger
from shardyard_coordinator.work.feeds import entries_of
from shardyard_coordinator.work.step_ledger import StepLedger

Copy = Mapping[str, object]


def entries_for_copy(ledger: DataLedger | StepLedger) -> list[Entry]:
    return ledger.entries(verdicts=False) if isinstance(ledger, StepLedger) else ledger.entries()


def begin_with(ledger: DataLedger | StepLedger, copy: Copy, step: int = 0) -> None:
    """Fills an empty ledger from the copy in another run's checkpoint, which is of that step. What was leased is free.
    Raises DamagedRecord."""
    assert not len(ledger)
    if isinstance(ledger, DataLedger):
        then = _read(copy)
        for shards in then.opened:
            shards.returned, shards.held = sorted([*shards.returned, *shards.held]), {}
            shards.forget_reached()
        ledger.opened, ledger.quarantine = then.opened, then.quarantine
        return
    for kind, body in sorted(entries_of(copy), key=lambda entry: entry[0] == "feed_closed"):  # after its make-up
        ledger.restore(kind, body)
    if ledger.backup_workers and step and not ledger.verdicts.decided:
        ledger.decided_before(step)
    decided = ledger.verdicts.decided
    require(not ledger.backup_workers or decided >= step, f"a checkpoint of step {step}, and verdicts on {decided}")


def reopen(ledger: DataLedger | StepLedger, copy: Copy) -> list[DataShardSource]:
    """Partitions were restored from the checkpoint with this copy, and may lack what was done since. Opens that again.
    Returns the data shards that are free again. Raises DamagedRecord."""
    if isinstance(ledger, StepLedger):
        done = _done_feeds(ledger, copy)
        for feed, each in enumerate(ledger.opened):
            each.done = each.done and feed in done
        return []
    then = _read(copy)
    reopened: list[DataShardSource] = []
    for feed, shards in enumerate(ledger.opened):
        before = then.opened[feed] if feed < len(then) else None
        reopened += [shards.source(number) for number in shards.reopen(before)]
    again = frozenset(reopened)
    ledger.last_closed = {worker: end for worker, end in ledger.last_closed.items() if end[0] not in again}
    return reopened


def finished_since(ledger: DataLedger | StepLedger, copy: Copy) -> int | None:
    """The first feed that is done, and was not done in the copy. Raises DamagedRecord."""
    if isinstance(ledger, StepLedger):
        done, now = _done_feeds(ledger, copy), [each.done for each in ledger.opened]
    else:
        done = frozenset(shards.feed for shards in _read(copy).opened if shards.done == shards.total)
        now = [shards.done == shards.total for shards in ledger.opened]
    return next((feed for feed, is_done in enumerate(now) if is_done and feed not in done), None)


def forget_made_up(ledger: StepLedger, copy: Copy) -> None:
    """The checkpoint with this copy is now the newest: no partition goes back into a feed that is done in it. Forgets
    what such feeds made up for. Raises DamagedRecord."""
    if not ledger.verdicts.decided:
        return
    done = _done_feeds(ledger, copy)
    condemned = [each.sequence for each in ledger.quarantine]
    for feed, each in enumerate(ledger.opened):
        end = each.make_up.end
        if end is None or not each.done or feed not in done:
            break
        if any(each.planned_end <= step < end for step in condemned):  # samples not named yet
            break
        ledger.verdicts.forget_before(end)
        each.make_up.forget()


def done_data_shards(copy: Copy) -> tuple[DoneDataShards, ...]:
    """The data shards that are done in the copy. Raises DamagedRecord."""
    return tuple(
        DoneDataShards(each.feed, each.per_epoch, each.begun, frozenset((*each.returned, *each.held)))
        for each in _read(copy).opened
        if each.begun
    )


def begun_in_steps(copy: Copy) -> tuple[tuple[DataShardSource, int], ...]:
    """The data shards that were partly computed as steps while the job was synchronous. All partitions have counted
    their batches below the number beside them. Raises DamagedRecord."""
    body = Body(copy)
    found: list[tuple[DataShardSource, int]] = []
    for item in body.items("begun") if body.has("begun") else ():
        feed, epoch, index, batch = (
            checked_number(each, "a data shard that is begun") for each in checked_items(item, "begun", count=4)
        )
        found.append((DataShardSource(feed, epoch, index), batch))
    return tuple(found)


def first_step(copy: Copy) -> int:
    """The step that all logical ranks compute next, if the checkpoint was written when the job was asynchronous; else
    0. Raises DamagedRecord."""
    body = Body(copy)
    return body.number("step", most=limits.SEQUENCE_MAX) if body.has("step") else 0


def _read(copy: Copy) -> DataLedger:
    then = new_data_ledger()
    for kind, body in entries_of(copy):
        then.restore(kind, body)
    return then


def _done_feeds(ledger: StepLedger, copy: Copy) -> frozenset[int]:
    """The feeds that are done in the copy of a synchronous job's ledger."""
    then = StepLedger(
        logical_ranks=ledger.logical_ranks, local_steps=ledger.local_steps, backup_workers=ledger.backup_workers
    )
    begin_with(then, copy)
    return frozenset(feed for feed, each in enumerate(then.opened) if each.done)
