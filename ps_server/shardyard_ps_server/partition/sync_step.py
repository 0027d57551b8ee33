"""One step of a synchronous job in one partition: gather, verdict, apply (ledger.md, rules B1, B2 and B6).

    contribute      records a rank's push; the last one that counts completes the step
    verdict         says which ranks count, with which shares. It is implied by the samples. If gradients are clipped by
                    their global norm, it is the sum that workers bring; with backup workers, it is the coordinator's
                    decision, which workers bring: `take_verdict`
    apply           applies the members' mean, and publishes the next version

If gradients are clipped by norm, the contributions of a complete step become one mean. Its square norm is reported
(`gathered_part`), and the step waits for the verdict, which has the sum over all partitions.

Rows of tables are updated with the step. In a hybrid job they are updated in the moment in which their contribution is
recorded. The ledger then counts them in a lane of their own, because a cut has the rows of contributions to the next
step, but not the contributions themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Rank
from shardyard.domain.push_names import PushName, RankSource, SourceKey
from shardyard.domain.pushes import GatheredPart, Outcome, StepVerdict
from shardyard_ps_server.partition.contribution import Contribution
from shardyard_ps_server.partition.next_version import (
    NO_ROWS,
    Change,
    RowUpdate,
    carry_out,
    compute_values,
    gather,
    publish,
    step_rows,
)
from shardyard_ps_server.partition.partition import Partition, SyncSteps, take_turns
from shardyard_ps_server.partition.step_gate import Groups, StepGate, Verdict, scale_of, verdict
from shardyard_ps_server.rows import row_sums
from shardyard_ps_server.rows.pushed_rows import PushedTableRows


def contribute(partition: Partition, steps: SyncSteps, name: PushName, contribution: Contribution) -> Change:
    """Returns what a rank's contribution changes: it is recorded, or the step is applied with it. Raises TooLarge,
    having changed nothing."""
    source, gate = name.key.source, steps.gate
    assert isinstance(source, RankSource)
    at_once: RowUpdate | None = None
    # a gradient that does not count now may count when it is computed again
    counts_rows = partition.rows_at_once and contribution.groups is not None and not contribution.overflow
    if partition.rows_at_once:
        at_once = _rows_of_one(partition, contribution)
        contribution = contribution.without_rows()

    def advance() -> None:
        partition.ledger.advance(name)
        if counts_rows:
            partition.ledger.advance_rows(name)

    if gate.completes(source.rank):
        return _complete(partition, steps, gate.with_last(source.rank, contribution), advance, at_once)
    kept = _keep(partition, steps, contribution)

    def record() -> Outcome:
        gate.record(source.rank, kept)
        advance()
        return Outcome.RECORDED

    return Change(partition, at_once or NO_ROWS, record)


def _rows_of_one(partition: Partition, contribution: Contribution) -> RowUpdate:
    """Returns what one rank adds to rows that are updated at once. It does not depend on the samples of other ranks.
    Raises TooLarge."""
    mean = row_sums.mean_of([contribution.rows], [1.0], partition.rules.clipping.value)
    times = {each.table: each.now_ms for each in contribution.rows}
    rows = [each._replace(now_ms=times[each.table]) for each in mean]
    rows_scaled = row_sums.scaled(rows, 1 / partition.rules.logical_ranks)
    return RowUpdate(rows_scaled, contribution.table_groups, contribution.gone)


def _keep(partition: Partition, steps: SyncSteps, contribution: Contribution) -> Contribution:
    """Returns the contribution with a copy of its payload, because the sender reuses its memory after the reply."""
    if len(contribution.payload) == 0:
        return contribution
    copy = steps.buffer(partition.payload.nbytes)
    np.copyto(copy, contribution.payload)
    steps.kept.append(copy)
    return contribution._replace(payload=copy)


def _complete(
    partition: Partition,
    steps: SyncSteps,
    contributions: Sequence[Contribution],
    advance: Callable[[], object],
    at_once: RowUpdate | None = None,
) -> Change:
    """Returns what completes the step, because all contributions that count are here. `advance` is called in the moment
    in which that becomes visible."""
    taken = verdict(contributions)
    rows, groups = _mean_rows(partition, taken)
    if partition.rules.clipping.norm and not taken.skips:  # a step that is skipped is skipped everywhere
        mean, own = gather(partition, steps, taken)
        square_norm = partition.dense.square_norm(mean) + row_sums.square_norm(rows)

        def await_verdict() -> Outcome:
            advance()
            steps.gate.gather(square_norm)
            steps.mean = mean._replace(rows=rows, table_groups=groups)
            steps.free_buffers()
            steps.kept = [own]
            partition.changed.notify_all()
            return Outcome.RECORDED

        return Change(partition, NO_ROWS, await_verdict)
    return _apply(partition, steps, taken, at_once or step_rows(partition, rows, groups), advance)


def _mean_rows(partition: Partition, taken: Verdict[Contribution]) -> tuple[Sequence[PushedTableRows], Groups]:
    """Returns the mean gradient of rows, and the settings for it. Raises TooLarge."""
    if taken.skips:
        return (), ()
    groups = next((member.table_groups for member in taken.members if member.rows), ())
    rows = [member.rows for member in taken.members]
    return row_sums.mean_of(rows, taken.shares, partition.rules.clipping.value), groups


def _apply(
    partition: Partition,
    steps: SyncSteps,
    taken: Verdict[Contribution],
    rows: RowUpdate,
    advance: Callable[[], object],
    scale: float = 1.0,
) -> Change:
    """Returns what makes the next version, of values and of rows. Raises TooLarge, having changed nothing."""
    new = compute_values(partition, taken, scale)

    def apply() -> Outcome:
        advance()
        steps.gate.next_step()
        steps.mean = None
        steps.free_buffers()
        publish(partition, new)
        return Outcome.APPLIED

    return Change(partition, rows, apply)


# ---- verdicts that workers bring


def awaits_verdict(partition: Partition, verdict: StepVerdict) -> bool:
    """Returns whether the partition waits for this verdict; False if its step was applied. Changes nothing. Raises
    InvalidRequest for an impossible verdict."""
    with partition.lock:
        return _awaiting(partition, verdict) is not None


def take_verdict(partitions: Sequence[Partition], verdict: StepVerdict, check_current: Callable[[], None]) -> None:
    """Applies the step of those partitions that wait for this verdict; in the others it was applied before. Raises
    Refused errors, InvalidRequest and TooLarge. If one partition refuses to change, those before it have changed."""
    waiting: list[tuple[Partition, SyncSteps]] = []
    try:
        with take_turns(partitions):
            for partition in partitions:
                with partition.lock:
                    check_current()
                    steps = _awaiting(partition, verdict)
                if steps is not None:
                    waiting.append((partition, steps))
            carry_out((_judged(*each, verdict) for each in waiting), lambda *_: None)
    finally:
        for partition, _ in waiting:
            partition.wake()


def _judged(partition: Partition, steps: SyncSteps, verdict: StepVerdict) -> Change:
    """Returns what a verdict that the partition waits for changes. Raises TooLarge, having changed nothing."""
    if steps.gate.awaits_members:
        return _take_members(partition, steps, verdict.members)
    mean = steps.mean
    assert mean is not None
    assert verdict.square_norm is not None
    scale = scale_of(verdict.square_norm, partition.rules.clipping.norm)
    taken = Verdict(() if mean.groups is None else (mean,), (1.0,))
    rows = step_rows(partition, row_sums.scaled(mean.rows, scale), mean.table_groups)
    return _apply(partition, steps, taken, rows, lambda: None, scale)


def gathered_part(partition: Partition, step: int) -> GatheredPart | None:
    """Returns this partition's part of the verdict on that step, if the step waits for it or was applied last."""
    with partition.lock:
        return None if partition.steps is None else partition.steps.gate.gathered(step)


def _awaiting(partition: Partition, verdict: StepVerdict) -> SyncSteps | None:
    """Returns the steps of the partition, if they wait for this verdict."""
    rules, steps = partition.rules, partition.steps
    needed = rules.clipping.norm or (rules.backup_workers and verdict.members)
    if steps is None or not needed:
        raise InvalidRequest(f"a verdict on step {verdict.step} of partition {partition.id}, whose steps need none")
    return steps if steps.gate.judges(verdict) else None


def _take_members(partition: Partition, steps: SyncSteps, members: Sequence[Rank]) -> Change:
    """Returns what a verdict changes that names the ranks that count (backup workers)."""
    present = steps.gate.present(members)
    if present is not None:
        return _complete(partition, steps, present, lambda: _close(partition, steps.gate, members))

    def await_members() -> Outcome:
        _close(partition, steps.gate, members)
        partition.changed.notify_all()
        return Outcome.RECORDED

    return Change(partition, NO_ROWS, await_members)


def _close(partition: Partition, gate: StepGate[Contribution], members: Sequence[Rank]) -> None:
    """Ends the step for the ranks that are not members, whether they have contributed or not."""
    step = gate.step
    for rank in gate.name_members(members):
        partition.ledger.pass_over(SourceKey(RankSource(rank)), step + 1)
