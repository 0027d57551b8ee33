"""Cuts a partition for a checkpoint, now or at a version that is named ahead (ledger.md, rules A9 and B7).

An asynchronous job's partition is cut at once. A synchronous job's checkpoint has the same step of all partitions: the
step is named ahead, and the update that makes that version also makes the cut. A cut copies nothing. Values need
no copy: a version is not written while a reader holds it. Tables have cuts of their own (`tables.cuts`). Optimizer
state is copied while updates go on (`dense_state.StateCut`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from shardyard.domain.errors import InvalidRequest, NotReady, ShardyardError
from shardyard.domain.ids import Version
from shardyard.domain.push_names import ROW_LANE
from shardyard_ps_server.partition.partition import Cut, Partition
from shardyard_ps_server.rows.table_states import Since, cut_tables


def take_cut(partition: Partition, since: Since | None = None, *, seal: bool = False) -> Cut:
    """Cuts the partition as it is now. The cut must be released. `seal`: the partition refuses all changes from then
    on. `since`: for each table the generation that an earlier
    checkpoint has; then only later changes are cut, if they are known. Raises TooLarge, TableError, InvalidRequest if
    another cut is open, and NotReady while a reader reads a whole table."""
    with partition.turn, partition.lock:
        return _cut(partition, since or {}, seal=seal)


def name_cut(
    partition: Partition, number: int, *, between: bool = False, since: Since | None = None, seal: bool = False
) -> None:
    """Names the version at which a synchronous job's partition will be cut; `unname_cut` must follow. `between`: cut
    only between two steps; so a version has passed once a contribution to the next step is recorded. `since`, `seal`:
    as for `take_cut`. Raises InvalidRequest if the version has passed (facts: newest, and with `between` gathering) or
    another cut is open, and what `take_cut` raises."""
    with partition.turn, partition.lock:
        newest = partition.versions.newest.number
        if newest > number:
            raise InvalidRequest(
                f"a checkpoint of step {number} of partition {partition.id}, which is at step {newest}",
                facts={"newest": str(newest)},
            )
        if partition.named_cut is not None:
            raise _busy(partition)
        if between and newest == number and partition.steps is not None and not partition.steps.gate.is_empty:
            raise InvalidRequest(
                f"a checkpoint of step {number} of partition {partition.id}, which has a part of the next one",
                facts={"newest": str(newest), "gathering": str(newest)},
            )
        partition.named_since, partition.named_seal = since or {}, seal
        partition.named_cut = _cut(partition, partition.named_since, seal=seal) if newest == number else number


def cut_if_named(partition: Partition, version: Version) -> None:
    """Called by the update that has made that version, with `changed` held."""
    named = partition.named_cut
    if isinstance(named, int) and version.number >= named:
        try:
            partition.named_cut = _cut(partition, partition.named_since, seal=partition.named_seal)
        except ShardyardError as error:  # the update counts all the same
            partition.named_cut = error


def await_named_cut(partition: Partition, until: float) -> Cut | None:
    """Waits until `until` (time.monotonic) for the cut that was named, and returns it. It must be released. Returns
    None if it does not come in time. Raises what `take_cut` raises."""
    with partition.lock:
        while isinstance(partition.named_cut, int):
            if not partition.wait(until):
                return None
        found, partition.named_cut = partition.named_cut, None
        if isinstance(found, ShardyardError):
            raise found
        return found


def unname_cut(partition: Partition) -> None:
    """Releases the cut that was named, unless `await_named_cut` has returned it."""
    with partition.lock:
        found, partition.named_cut = partition.named_cut, None
    if isinstance(found, Cut):
        found.release()


def unseal(partitions: Iterable[Partition]) -> None:
    """The partitions may change again: no other server continues from the cuts that sealed them."""
    for partition in partitions:
        with partition.turn, partition.lock:
            partition.sealed = False


def block_arrays(partition: Partition, index: int, cut: Cut) -> dict[str, npt.NDArray[Any]]:
    """Returns the arrays of a block at a completed cut: "values", and optimizer state by the slots' names."""
    return partition.dense.arrays(index, cut.values, cut.state.of)


def _cut(partition: Partition, since: Since, *, seal: bool) -> Cut:
    dense, versions, ledger = partition.dense, partition.versions, partition.ledger
    if dense.is_cut:
        raise _busy(partition)
    number = versions.newest.number
    if partition.rules.mirrored and partition.published.step != number:
        raise NotReady(
            f"a checkpoint of partition {partition.id}, which has rows of step {number} and variables of step"
            f" {partition.published.step}",
            why="workers have not given the servers their replicas' state since",
        )
    values, state = versions.values, dense.cut()
    try:
        tables = cut_tables(partition.tables, since)
    except ShardyardError:
        dense.end_cut(state)
        raise
    marks = ledger.marks()
    if partition.steps is not None:
        # contributions to the next step are not in the cut, but rows that were updated at once are
        step = partition.steps.gate.step
        marks = tuple(
            [mark if mark.key.lane == ROW_LANE else mark._replace(next=min(mark.next, step)) for mark in marks]
        )
    versions.hold(values)
    partition.sealed, partition.newest_cut = seal, number

    def release() -> None:
        with partition.lock:
            dense.end_cut(state)
            versions.release(values)

    return Cut(partition.id, versions.newest, marks, ledger.floor, dense.counts, values, state, release, tables)


def _busy(partition: Partition) -> InvalidRequest:
    return InvalidRequest(f"two checkpoints of partition {partition.id} at a time", todo="wait for the first")
