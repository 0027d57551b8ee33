"""What an update does once it is decided: it computes values, changes rows, and makes both visible.

    compute_values    allocates all memory that the update needs, and writes values into a buffer that nobody reads
    update_rows       changes rows in place, and copies what readers of earlier versions still need
    publish           makes the values the newest version, in the same moment in which the ledger advances

Called by the thread that has the partition's turn. Until `update_rows` begins, an error leaves the partition as it was.
An error inside `update_rows` leaves it torn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from shardyard.domain.errors import Internal, TooLarge
from shardyard.runtime.failpoints import failpoint
from shardyard_ps_server.partition.checkpoint_cuts import cut_if_named
from shardyard_ps_server.partition.contribution import Contribution
from shardyard_ps_server.partition.partition import Partition, SyncSteps
from shardyard_ps_server.partition.step_gate import Groups, Verdict
from shardyard_ps_server.rows.partition_tables import RowPush, push_rows
from shardyard_ps_server.rows.pushed_rows import ExpiredIds, PushedTableRows
from shardyard_ps_server.rows.row_overlay import RowDiff
from shardyard_ps_server.values.versions import Bytes


class RowUpdate(NamedTuple):
    """Gradients of rows with their settings, and ids that expire. `diff`: a copy of the rows before the update, so that
    look-ups read one version; None: look-ups may see the change before the push is acknowledged."""

    rows: Sequence[PushedTableRows]
    groups: Groups
    gone: Sequence[ExpiredIds] = ()
    diff: RowDiff | None = None


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
    """Returns the row update of a step: what changes, what expires, and, if rows have versions, a copy of both. Raises
    TooLarge, having changed nothing."""
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
    """Changes rows of several partitions in place, each table in one call."""
    changing: list[Partition] = []
    pushes: list[RowPush] = []
    for partition, update in updates:
        if update.diff is not None:
            with partition.lock:
                partition.overlay.add([update.diff], begins=True)
        if not update.rows and not update.gone:
            continue
        if update.diff is None:
            _copy_for_pins(partition, [update.rows, update.gone], begins=True)
        step = partition.versions.newest.number + 1
        before_expiry = None if partition.overlay.is_unsaved else partial(_copy_expiring, partition)
        pushes.append(RowPush(partition.rows, update.rows, update.groups, step, update.gone, before_expiry))
        changing.append(partition)
    try:
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


def end_rows(partition: Partition) -> None:
    """Called when the push that changed rows has counted, with `changed` held."""
    if partition.overlay.end_update():
        partition.changed.notify_all()


def _copy_expiring(partition: Partition, gone: ExpiredIds) -> None:
    _copy_for_pins(partition, [[gone]], begins=False)


def _copy_for_pins(
    partition: Partition, changing: Sequence[Sequence[PushedTableRows | ExpiredIds]], *, begins: bool
) -> None:
    """Copies rows that are about to change, if a reader has pinned them. `begins`: the push has changed nothing yet."""
    overlay = partition.overlay
    with partition.lock:
        wanted, number = overlay.wants_diff(begins=begins), partition.versions.newest.number
    if not wanted:
        return
    try:
        diffs = [partition.rows.set_aside(rows, number) for rows in changing]
    except TooLarge:
        with partition.lock:
            overlay.give_up("the server has no memory for what changes")
        return
    with partition.lock:
        overlay.add(diffs, begins=begins)
