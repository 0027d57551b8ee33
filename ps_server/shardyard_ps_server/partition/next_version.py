"""What an update does once it is decided: it computes values, changes rows, and makes both visible.

    compute_values    allocates all memory that the update needs, and writes values into a buffer that nobody reads
    update_rows       changes rows in place, and copies what readers of earlier versions still need
    publish           makes the values the newest version, in the same moment in which the ledger advances

What a push or a verdict changes in a partition is a `Change`. `carry_out` carries out those of several partitions: it
copies and updates rows in one call for each table, before it makes the first change visible.

Called by the thread that has the partition's turn. Until `update_rows` begins, an error leaves the partition as it was.
An error inside `update_rows` leaves it torn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, NamedTuple

from shardyard.domain.errors import Internal, TooLarge
from shardyard.domain.pushes import Outcome
from shardyard.runtime.failpoints import failpoint
from shardyard_ps_server.partition.checkpoint_cuts import cut_if_named
from shardyard_ps_server.partition.contribution import Contribution
from shardyard_ps_server.partition.partition import Partition, SyncSteps
from shardyard_ps_server.partition.step_gate import Groups, Verdict
from shardyard_ps_server.rows.partition_tables import RowPush, RowsToRead, push_rows, read_rows
from shardyard_ps_server.rows.pushed_rows import ExpiredIds, PushedTableRows
from shardyard_ps_server.rows.row_overlay import RowDiff
from shardyard_ps_server.values.versions import Bytes


class RowUpdate(NamedTuple):
    """Gradients of rows with their settings, and ids that expire. `diff`: memory for a copy of the rows before the
    update, so that look-ups read one version; None: look-ups may see the change before the push is acknowledged."""

    rows: Sequence[PushedTableRows]
    groups: Groups
    gone: Sequence[ExpiredIds] = ()
    diff: RowDiff | None = None


NO_ROWS: Final = RowUpdate((), ())


class Change(NamedTuple):
    """What a push or a verdict changes in a partition, with all memory that this needs. `end` makes it visible; it is
    called with `changed` held, after the rows have changed."""

    partition: Partition
    rows: RowUpdate
    end: Callable[[], Outcome]


def carry_out(changes: Iterable[Change], ended: Callable[[Partition, Outcome], None]) -> None:
    """Carries out the changes of different partitions, and calls `ended` for each, with `changed` held. If an error
    comes instead of a change, those before it are carried out."""
    ready: list[Change] = []
    try:
        for change in changes:
            ready.append(change)
    finally:
        update_rows([(change.partition, change.rows) for change in ready])
        with ExitStack() as ending:  # what is computed is published, whatever happens after another partition
            for change in reversed(ready):
                ending.callback(_end, change, ended)


def _end(change: Change, ended: Callable[[Partition, Outcome], None]) -> None:
    partition = change.partition
    with partition.lock:
        outcome = change.end()
        if partition.overlay.end_update():
            partition.changed.notify_all()
        ended(partition, outcome)
    failpoint("push.after_partition")


def compute_values(partition: Partition, taken: Verdict[Contribution], scale: float = 1.0) -> Bytes:
    """Returns the next version's values: the present ones if no member has a gradient of a variable. Raises TooLarge,
    having changed nothing."""
    rules, dense, values = partition.rules, partition.dense, partition.versions.values
    if not any(True in member.present for member in taken.members):
        return values
    if rules.logical_ranks > 1 or scale != 1.0:
        dense.reserve_sums()
    # with a norm, the mean was made when the norm was computed
    steps = partition.steps
    if steps is not None and rules.clipping.value and not rules.clipping.norm and taken.members and not taken.skips:
        mean, own = gather(partition, steps, taken)
        steps.spare.append(own)  # nobody takes it in this turn
        taken = Verdict((mean,), (1.0,))
    new = partition.blank()
    dense.update(taken.members, taken.shares, values, new, scale, skips=taken.skips)
    failpoint("push.before_publish")
    return new


def gather(partition: Partition, steps: SyncSteps, taken: Verdict[Contribution]) -> tuple[Contribution, Bytes]:
    """Returns the members' mean, and its buffer. Raises TooLarge."""
    partition.dense.reserve_sums()
    own, limit = steps.buffer(partition.payload.nbytes), partition.rules.clipping.value
    return partition.dense.gather(taken.members, taken.shares, partition.versions.values, own, limit), own


def publish(partition: Partition, new: Bytes, number: int | None = None) -> None:
    """Called with `changed` held. `number`: as in Versions.publish."""
    version = partition.versions.publish(new, number)
    partition.changed.notify_all()
    if partition.steps is not None:
        cut_if_named(partition, version)


# ---- rows


def step_rows(partition: Partition, rows: Sequence[PushedTableRows], groups: Groups) -> RowUpdate:
    """Returns the row update of a step: what changes, what expires, and, if rows have versions, memory for a copy of
    both. Raises TooLarge, having changed nothing."""
    if not partition.rows.names:
        return RowUpdate(rows, groups)
    number = partition.versions.newest.number
    gone = partition.rows.sweep(rows, number + 1)
    changing: list[PushedTableRows | ExpiredIds] = [*rows, *partition.rows.with_rows(gone)]
    try:
        diff = partition.rows.set_aside(changing, number)
    except TooLarge:
        with partition.lock:
            if not partition.overlay.nbytes:
                raise
            partition.overlay.lose_pins("the server needs the memory for a step")
        diff = partition.rows.set_aside(changing, number)
    return RowUpdate(rows, groups, gone, diff)


def update_rows(updates: Sequence[tuple[Partition, RowUpdate]]) -> None:
    """Copies rows of several partitions as they are, where a version still needs them, and changes them in place: each
    table in one call."""
    changing: list[Partition] = []
    pushes: list[RowPush] = []
    copies: list[tuple[Partition, Sequence[RowDiff]]] = []
    for partition, update in updates:
        changes = bool(update.rows or update.gone)
        if update.diff is not None:
            copies.append((partition, [update.diff]))
        elif changes:
            copies.append((partition, _diffs_for_pins(partition, [update.rows, update.gone], begins=True)))
        if changes:
            step = partition.versions.newest.number + 1
            before_expiry = None if partition.overlay.is_unsaved else partial(_copy_expiring, partition)
            pushes.append(RowPush(partition.rows, update.rows, update.groups, step, update.gone, before_expiry))
            changing.append(partition)
    if not copies:
        return
    try:
        _copy(copies, begins=True)
        for _ in changing:
            failpoint("rows.before_update")
        push_rows(pushes)
    except BaseException:
        for partition, push in zip(changing, pushes, strict=True):
            partition.torn = Internal(
                f"rows of update {push.step} of partition {partition.id} are applied in part",
                why="memory was refused in the middle of the update, and it cannot be undone",
                todo="give the server more memory; its partitions are restored without that push",
            )
        raise


def _copy_expiring(partition: Partition, gone: ExpiredIds) -> None:
    _copy([(partition, _diffs_for_pins(partition, [[gone]], begins=False))], begins=False)


def _diffs_for_pins(
    partition: Partition, changing: Sequence[Sequence[PushedTableRows | ExpiredIds]], *, begins: bool
) -> Sequence[RowDiff]:
    """Returns memory for copies of rows that are about to change, if a reader has pinned them. `begins`: the push has
    changed nothing yet."""
    overlay = partition.overlay
    with partition.lock:
        wanted, number = overlay.wants_diff(begins=begins), partition.versions.newest.number
    try:
        return [partition.rows.set_aside(rows, number) for rows in changing] if wanted else []
    except TooLarge:
        with partition.lock:
            overlay.give_up("the server has no memory for what changes")
        return []


def _copy(copies: Sequence[tuple[Partition, Sequence[RowDiff]]], *, begins: bool) -> None:
    """Copies rows into diffs, and keeps these for readers."""
    read_rows(
        [
            (partition.rows, [RowsToRead(table, *of_table) for table, of_table in diff.rows.items()])
            for partition, diffs in copies
            for diff in diffs
        ]
    )
    for partition, diffs in copies:
        if diffs:
            with partition.lock:
                partition.overlay.add(diffs, begins=begins)
