"""Reads one partition by version: values, rows of tables, and pins of both (ledger.md, rules B3 and C7).

The buffer of a version's values is not written while a reader holds it, so reading needs no copy. Rows change in place:
a reader looks them up as they are, and then puts back what has changed since the version (`row_overlay`). A version can
be read until the one after the next is made. A pin keeps a version for longer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from shardyard.checkpoints.partition_file import VALUES
from shardyard.domain.errors import InvalidRequest, NotFound, NotReady
from shardyard.domain.ids import Version
from shardyard.domain.limits import PULL_WAIT_MS_MAX
from shardyard.domain.optimizers import PartitionSlots
from shardyard.domain.pulls import NotReadyPart
from shardyard.domain.tables.row_ids import Ids
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.rows.partition_tables import RowsToRead, read_rows
from shardyard_ps_server.rows.pushed_rows import Floats
from shardyard_ps_server.rows.row_overlay import PinnedRows, merged, put_back, union
from shardyard_ps_server.tables.cuts import Chunk
from shardyard_ps_server.values.versions import Bytes, VersionPin, aligned_copy

# ---- values


def hold_version(
    partition: Partition, number: int, exactly: bool, until: float
) -> tuple[Version, Bytes] | NotReadyPart:
    """Waits until `until` (time.monotonic) for that version, or, unless `exactly`, for that or a later one. Does not
    wait for a step that needs a verdict, because the caller may have to bring it. The caller may read the buffer until
    it calls `Partition.release`. Raises NotFound if an exact version has passed."""
    with partition.lock:
        missing = await_version(partition, number, until)
        if missing is not None:
            return missing
        newest = partition.versions.newest
        wanted = number if exactly else newest.number
        buffer = partition.versions.find(wanted)
        if buffer is None:
            raise _passed(partition, wanted)
        partition.versions.hold(buffer)
        return Version(newest.life, wanted), buffer


def is_to_come(partition: Partition, number: int) -> bool:
    """Whether the version is not there yet, and comes without a verdict that the caller may have to bring."""
    if partition.versions.newest.number >= number:
        return False
    gate = None if partition.steps is None else partition.steps.gate
    return gate is None or not (gate.awaits_verdict and gate.step == number - 1)


def read_optimizer(
    partition: Partition, number: int | None, *, values: bool = False
) -> tuple[PartitionSlots, dict[str, Bytes]]:
    """The optimizer's state between two updates, copied; updates wait for the copy. `values`: with the values before
    it. Raises NotFound (facts: newest) if the partition has another version than `number`, TooLarge."""
    with partition.turn:
        partition.check_whole()
        with partition.lock:
            version = partition.versions.newest
        if number not in (None, version.number):
            raise NotFound(
                f"the optimizer's state at version {number} of partition {partition.id}, which is at {version.number}",
                why="state changes in place, so only that of the newest version is there",
                todo="read the newest",
                facts={"newest": str(version.number)},
            )
        slots = {VALUES: aligned_copy(partition.versions.values)} if values else {}
        slots |= partition.dense.slots.copied()
        counts = tuple(partition.dense.counts.tolist())
        return PartitionSlots(partition.id, counts, tuple(slots), version), slots


def await_version(partition: Partition, number: int, until: float) -> NotReadyPart | None:
    """Waits for that version or a later one. Returns what is missing if it does not come in time."""
    while partition.versions.newest.number < number:
        if not is_to_come(partition, number) or not partition.wait(until):
            return _not_ready(partition, number)
    return None


def _not_ready(partition: Partition, number: int) -> NotReadyPart:
    waits_for = "a push"
    if partition.steps is not None:
        gate = partition.steps.gate
        if gate.awaits_verdict or gate.awaits_members:
            waits_for = f"the verdict on step {gate.step}"
        else:
            ranks = ", ".join(str(rank) for rank in gate.missing()[:8])
            waits_for = f"logical rank {ranks} of step {gate.step}"
    return NotReadyPart(partition.id, partition.versions.newest, number, waits_for)


def _passed(partition: Partition, number: int) -> NotFound:
    newest = partition.versions.newest.number
    return NotFound(
        f"version {number} of partition {partition.id}, whose newest is {newest}",
        why="a partition keeps its last two versions",
        facts={"partition": str(partition.id), "newest": str(newest)},
    )


# ---- rows


def look_up_rows(
    asked: Sequence[tuple[Partition, Sequence[RowsToRead]]], number: int | None = None, until: float = 0.0
) -> None:
    """Writes rows of several partitions into `out` as they are now, each table in one call. If rows have versions, all
    of a partition are of one version. `number`: that version; the call waits for it until `until` (time.monotonic).
    Changes nothing. Raises NotReady if the version does not come in time, NotFound (facts: newest) if it has passed,
    InvalidRequest if rows have no versions."""
    while asked:
        wanted = [_row_version(partition, number, until) for partition, _ in asked]
        read_rows([(partition.rows, rows) for partition, rows in asked])
        changed = [each for each, version in zip(asked, wanted, strict=True) if not _put_back(*each, version)]
        if changed and number is not None:
            raise _passed(changed[0][0], number)
        asked = changed


def _put_back(partition: Partition, rows: Sequence[RowsToRead], version: int | None) -> bool:
    """Turns rows that were just read into those of a version; None: rows have none. Returns False if a step later than
    the next was applied meanwhile."""
    if version is None:
        return True
    with partition.lock:
        diff = partition.overlay.last
    if diff is None or diff.number < version:
        return True
    if diff.number == version:
        for each in rows:
            diff.put_back(each.table, each.ids, each.out)
    return diff.number == version


def _row_version(partition: Partition, number: int | None, until: float) -> int | None:
    """Returns the version to read; None if rows have no versions."""
    partition.check_whole()
    if not partition.rules.rows_have_versions:
        if number is not None:
            raise InvalidRequest(
                f"rows of version {number} of partition {partition.id}, whose rows are updated as they come",
                todo="look them up as they are",
            )
        return None
    with partition.lock:
        if number is None:
            return partition.versions.newest.number
        missing = await_version(partition, number, until)
        if missing is not None:
            raise NotReady(
                f"rows of version {number} of partition {partition.id}, which is at version {missing.have.number} and"
                f" waits for {missing.waiting_for}"
            )
        last = partition.overlay.last
        if number < (partition.versions.newest.number if last is None else last.number):
            raise _passed(partition, number)
        return number


def read_table(partition: Partition, table: int) -> Iterator[Chunk]:
    """Yields all rows of a table as they are between two updates. Raises NotReady while another reader does so."""
    found = partition.rows.items(table)
    with partition.turn:
        partition.check_whole()
        first = next(found, None)
    if first is not None:
        yield first
        yield from found


# ---- pins


def pin_version(partition: Partition, number: int | None, *, rows: bool = False) -> VersionPin:
    """Keeps that version, None: the newest, from its beginning until `unpin`. The memory that updates need beside it is
    allocated now. `rows`: keeps rows of tables too, for `look_up_pinned`. Raises InvalidRequest (facts: newest) if the
    version has passed, TooLarge, and NotReady while an update changes rows without copying them."""
    versions = partition.versions
    while True:
        with partition.lock:
            if rows:
                _await_copies(partition)
            if not versions.is_short_of_buffers:
                pin, newest = versions.pin(number), versions.newest.number
                if pin is not None and rows and not partition.overlay.pin(pin, newest):
                    versions.unpin(pin)
                    pin = None
                break
        buffer = versions.allocate()
        with partition.lock:
            versions.return_unused(buffer)
    if pin is None:
        raise InvalidRequest(
            f"version {number} of partition {partition.id}, whose newest is {newest}",
            why="a partition keeps its last two versions",
            todo="name a later one",
            facts={"newest": str(newest)},
        )
    return pin


def _await_copies(partition: Partition) -> None:
    """Waits for the end of an update that changes rows without copying them."""
    until = time.monotonic() + PULL_WAIT_MS_MAX / 1000
    while partition.overlay.is_unsaved:
        partition.check_whole()
        if not partition.wait(until):
            raise NotReady(f"a version of partition {partition.id}, which is taking a push")


def unpin(partition: Partition, pin: VersionPin) -> None:
    """Releases a pin. A second call does nothing."""
    with partition.lock:
        partition.versions.unpin(pin)
        partition.overlay.unpin(pin)


def await_pinned(partition: Partition, pin: VersionPin, until: float) -> Version | NotReadyPart:
    """Waits until `until` (time.monotonic) for a pinned version. Raises NotFound if it will not come."""
    with partition.lock:
        while pin.version is None:
            if pin.lost:
                raise NotFound(
                    f"version {pin.number} of partition {partition.id}, which has gone back", todo="take a new snapshot"
                )
            if not partition.wait(until):
                return _not_ready(partition, pin.number)
        return pin.version


def hold_pinned(partition: Partition, pin: VersionPin) -> tuple[Version, Bytes]:
    """Returns a pinned version. The caller may read the buffer until it calls `Partition.release`. Raises NotReady."""
    with partition.lock:
        if pin.version is None or pin.buffer is None:
            raise NotReady(f"version {pin.number} of partition {partition.id}, which is not there yet")
        partition.versions.hold(pin.buffer)
        return pin.version, pin.buffer


def look_up_pinned(partition: Partition, asked: Sequence[RowsToRead], pin: VersionPin) -> None:
    """Writes rows into `out` as a pinned version has them. Raises NotReady if the version does not exist yet,
    VersionPassed if its rows are not kept any more, InvalidRequest if it was pinned without rows."""
    partition.check_whole()
    pinned = _pinned_rows(partition, pin)
    read_rows([(partition.rows, asked)])
    with partition.lock:  # what changed before or during the read is in a diff by now
        diffs = pinned.diffs()
    fewer = merged(diffs)
    for each in asked:
        put_back(fewer, each.table, each.ids, each.out)
    with partition.lock:
        pinned.replace(diffs, fewer)


def read_pinned_table(partition: Partition, table: int, pin: VersionPin) -> Iterator[tuple[Ids, Floats]]:
    """Yields all rows of a table as a pinned version has them, in pieces, in no order. Rows that have changed since may
    come twice, with the same values. Ids that got a row since come with their initial values. Raises what
    `look_up_pinned` and `read_table` raise."""
    pinned = _pinned_rows(partition, pin)
    for chunk in read_table(partition, table):
        values = np.ascontiguousarray(chunk.values)
        ids = chunk.ids[: values.shape[0]]
        with partition.lock:  # what has changed by now is in a diff
            diffs = pinned.diffs()
        put_back(diffs, table, ids, values)
        yield ids, values
    with partition.lock:
        diffs = pinned.diffs()
    if any(table in diff.rows for diff in diffs):  # rows that have expired since are nowhere else
        yield union(diffs, table)


def _pinned_rows(partition: Partition, pin: VersionPin) -> PinnedRows:
    with partition.lock:
        pinned = partition.overlay.find(pin)
        if pinned is None:
            raise InvalidRequest(
                f"rows of a pin of partition {partition.id} that has none", todo="pin it with its rows"
            )
        if pin.version is None:
            raise NotReady(f"version {pin.number} of partition {partition.id}, which is not there yet")
    return pinned
