"""How a push enters a partition: is it new, and what does it change.

    1. `check_push`    checks the push in each partition before any partition applies it (docs/internals/ledger.md,
                       rule A4)
    2. `apply_push`    takes the turn, and checks again:
         duplicate       the ledger has counted this name: nothing changes (rule A2)
         synchronous     `sync_step` records it as its rank's contribution, and may apply the step
         asynchronous    it is an update, corrected for its staleness if the job asks for that
       The ledger advances in the same moment in which the change becomes visible.

`apply_to_all` does both for all partitions of a small push, in one thread. It changes the rows of all of them in one
call for each table, before the first ledger advances. A large push is applied by several threads, one partition each.
In a job with a log, a push is recorded between 1 and 2: `begin_logged` decides what the record says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from shardyard.domain.errors import InvalidRequest
from shardyard.domain.push_names import PushName, RankSource
from shardyard.domain.pushes import Outcome, PartResult
from shardyard_ps_server.partition import sync_step
from shardyard_ps_server.partition.contribution import Contribution
from shardyard_ps_server.partition.next_version import (
    NO_ROWS,
    Change,
    RowUpdate,
    carry_out,
    compute_values,
    publish,
)
from shardyard_ps_server.partition.partition import Partition, take_turns
from shardyard_ps_server.partition.staleness import Staleness
from shardyard_ps_server.partition.step_gate import Verdict
from shardyard_ps_server.values.versions import Bytes, aligned_empty


def check_push(partition: Partition, name: PushName, contribution: Contribution) -> None:
    """Raises what `apply_push` would raise; changes nothing."""
    _admit(partition, name, contribution, check_nothing)


def apply_push(
    partition: Partition, name: PushName, contribution: Contribution, check_current: Callable[[], None]
) -> PartResult:
    """Counts the work once. Raises Refused errors, InvalidRequest, NotReady, RateMismatch and TooLarge, having changed
    nothing."""
    return apply_to_all([(partition, contribution)], name, check_current)[0]


def apply_to_all(
    work: Sequence[tuple[Partition, Contribution]], name: PushName, check_current: Callable[[], None]
) -> tuple[PartResult, ...]:
    """As `check_push` and then `apply_push` for each of several partitions. Takes all turns first, so each partition is
    checked once: nothing can change between the checks and the changes. If one partition refuses to change, those
    before it have changed."""
    results: list[PartResult] = []

    def add_result(partition: Partition, outcome: Outcome) -> None:
        counted, newest = partition.ledger.next(name.key), partition.versions.newest
        results.append(PartResult(partition.id, outcome, counted, newest))

    try:
        with take_turns([partition for partition, _ in work]):
            admitted = [_admit(partition, name, contribution, check_current) for partition, contribution in work]
            carry_out(
                (_change(partition, name, *each) for (partition, _), each in zip(work, admitted, strict=True)),
                add_result,
            )
    finally:
        for (partition, _), result in zip(work, results, strict=False):
            _wake_after(partition, result)
    return tuple(results)


def _wake_after(partition: Partition, result: PartResult) -> None:
    if result.outcome is Outcome.APPLIED or partition.rules.clipping.norm:
        partition.wake()


def _change(partition: Partition, name: PushName, duplicate: bool, contribution: Contribution) -> Change:
    """Returns what an admitted push changes in a partition. Raises TooLarge, having changed nothing."""
    if duplicate:
        return Change(partition, NO_ROWS, partial(_repeated, partition, name))
    if partition.steps is not None:
        return sync_step.contribute(partition, partition.steps, name, contribution)
    return _change_alone(partition, name, contribution)


def _admit(
    partition: Partition, name: PushName, contribution: Contribution, check_current: Callable[[], None]
) -> tuple[bool, Contribution]:
    """Returns whether the push is a duplicate, and the part of it that may count. Raises if the push is refused."""
    with partition.lock:
        check_current()
        if partition.torn is not None:
            partition.check_whole()
        if partition.ledger.is_duplicate(name):  # rule A2
            return True, contribution
        if partition.sealed:
            partition.check_unsealed()  # rule C9
        if partition.stale is not None:
            partition.stale.check(contribution.base, partition.versions.newest)
        recorded = []
        if partition.steps is not None:
            source = name.key.source
            if not isinstance(source, RankSource) or name.first != name.last:
                raise InvalidRequest(
                    f"{name} in a synchronous job", todo="name the push by its logical rank and one step"
                )
            partition.steps.gate.check(source.rank, name.first, contribution)
            if contribution.rows:
                if not partition.ledger.counts_rows(name):
                    contribution = contribution.without_rows()
                recorded = [rows for other in partition.steps.gate.recorded for rows in other.rows]
    if contribution.rows:
        partition.rows.check_room(contribution.rows, recorded)
    return False, contribution


def _repeated(partition: Partition, name: PushName) -> Outcome:
    """Returns the outcome of a duplicate: its work was counted before, or its step was applied without it (backup
    workers)."""
    source = name.key.source
    if partition.steps is None or not isinstance(source, RankSource):
        return Outcome.DUPLICATE
    return Outcome.DROPPED if partition.steps.gate.has_dropped(source.rank, name.last) else Outcome.DUPLICATE


def check_nothing() -> None:
    """For changes that were checked before: when their record was appended to the log."""


# ---- asynchronous


def _change_alone(partition: Partition, name: PushName, contribution: Contribution) -> Change:
    """Returns the update that a push to an asynchronous job makes. An empty push makes no version."""
    makes = contribution.groups is not None and contribution.weight > 0
    stale = partition.stale if makes and not contribution.overflow else None
    staleness, compensated = 0, True
    applied = contribution
    if stale is not None:
        applied, staleness, compensated = _correct(partition, stale, contribution)
    new = compute_values(partition, Verdict((applied,), (1.0,), contribution.overflow)) if makes else None

    def apply() -> Outcome:
        partition.ledger.advance(name)
        if new is not None:
            publish(partition, new)
        if stale is not None:
            stale.count(contribution.base, staleness, compensated=compensated)
            stale.passed(contribution.base)
        return Outcome.APPLIED

    return Change(partition, RowUpdate(applied.rows, applied.table_groups, applied.gone), apply)


def _correct(partition: Partition, stale: Staleness, contribution: Contribution) -> tuple[Contribution, int, bool]:
    """Returns the gradient to apply, its staleness, and whether it is compensated, or needs no compensation. Raises
    TooLarge."""
    base, groups, now = contribution.base, contribution.groups, partition.versions.values
    assert groups is not None
    with partition.lock:
        newest = partition.versions.newest
        staleness = stale.staleness(base, newest)
        values = stale.find(base)
        if values is not None:
            partition.versions.hold(values)
    try:
        applied = contribution._replace(
            groups=stale.groups(groups, staleness),
            table_groups=stale.row_groups(contribution.table_groups, staleness),
        )
        changed = values is not None and values is not now
        if changed or stale.rule.decay:
            payload = _compensate(partition, stale, contribution, now if values is None else values, now)
            if changed:
                applied = applied._replace(payload=payload)
        return applied, staleness, values is not None or base is None or base.version == newest
    finally:
        if values is not None:
            partition.release(values)


def _compensate(partition: Partition, stale: Staleness, contribution: Contribution, base: Bytes, now: Bytes) -> Bytes:
    """Returns the compensated payload. All memory of the update is allocated before the mean of squares takes the
    gradient in. Raises TooLarge."""
    nbytes = partition.payload.nbytes
    if not len(contribution.payload):
        return contribution.payload
    if stale.compensated is None:
        stale.compensated = aligned_empty(nbytes)
    if stale.rule.decay:
        if stale.squares is None:
            stale.squares = aligned_empty(nbytes)
            stale.squares[:] = 0
        room = partition.blank()
        with partition.lock:
            partition.versions.return_unused(room)
    partition.dense.compensate(contribution, stale.rule, base, now, stale.compensated, stale.squares)
    return stale.compensated


# ---- with a log


def begin_logged(partition: Partition, contribution: Contribution) -> Contribution:
    """Decides the time of the rows of a push that is about to be recorded, and what expires with it. Called by one
    thread at a time. `end_logged` must follow when the push has taken effect, or never will."""
    if not contribution.rows:
        return contribution
    with partition.lock:
        step = partition.versions.newest.number + 1
    rows, gone = partition.rows.begin_logged(contribution.rows, step)
    return contribution._replace(rows=rows, gone=gone)


def end_logged(partition: Partition, contribution: Contribution) -> None:
    if contribution.rows:
        partition.rows.end_logged(contribution.rows, contribution.gone)
