"""Mutations of rules that rows of tables need."""

from __future__ import annotations

import contextlib
from typing import Any

from shardyard.domain.errors import NotFound
from shardyard.domain.push_names import ROW_LANE, PushName
from shardyard.domain.pushes import Outcome
from shardyard_ps_server.hosting import lookups, pushes
from shardyard_ps_server.partition import sync_step
from shardyard_ps_server.partition.ledger import Ledger
from shardyard_ps_server.partition.next_version import RowUpdate, update_rows
from shardyard_ps_server.rows import row_sums
from shardyard_ps_server.rows.partition_tables import PartitionTables
from shardyard_ps_server.tables.table import Table as TableOfPartition
from shardyard_ps_server.wal import replay
from shardyard_worker.consistency.step_versions import StepVersions

from .mutation import Patch, change_cuts, mutation, nobody_is_fenced


@mutation("A2", "async-rows", 17)
def rows_of_a_duplicate_count(patch: Patch) -> None:
    """the rows of a duplicate push count"""

    def apply_to_all(work: Any, name: PushName, check_current: Any) -> Any:
        results = real(work, name, check_current)
        for (partition, contribution), found in zip(work, results, strict=True):
            if found.outcome is Outcome.DUPLICATE and contribution.rows:
                with partition.turn:
                    update_rows([(partition, RowUpdate(contribution.rows, contribution.table_groups))])
        return results

    real = pushes.apply_to_all
    patch.setattr(pushes, "apply_to_all", apply_to_all)


@mutation("A8", "sync-checkpoint-rows", 17)
def rows_do_not_go_back(patch: Patch) -> None:
    """a restored partition keeps its current rows"""
    real = PartitionTables.become

    def become(self: Any, tables: Any) -> None:
        has_some = bool(getattr(self, "_tables", {})) and any(table.rows for table in self._tables.values())
        real(self, self._tables if tables and has_some else tables)

    patch.setattr(PartitionTables, "become", become)


@mutation("A8", "async-checkpoint-rows-lives", 10)
def how_often_ids_without_a_row_were_pushed_is_not_in_a_checkpoint(patch: Patch) -> None:
    """ids that have no row yet are restored with a frequency of 1"""
    real = TableOfPartition.load

    def load(self: Any, ids: Any, values: Any, state: Any, frequencies: Any, steps: Any) -> None:
        counts = frequencies.copy()
        counts[values.shape[0] :] = 1
        real(self, ids, values, state, counts, steps)

    patch.setattr(TableOfPartition, "load", load)


@mutation("A8", "async-checkpoint-rows-lives", 70)
def filters_do_not_come_back(patch: Patch) -> None:
    """a filter's cells are not restored from a checkpoint"""
    patch.setattr(TableOfPartition, "load_cells", lambda self, cells, begin=None: None)


@mutation("A1", "hybrid-checkpoint", 205)
def rows_have_no_lane(patch: Patch) -> None:
    """rows of a contribution count again if they counted before the checkpoint and its variables did not"""
    patch.setattr(Ledger, "counts_rows", lambda self, name: True)


@mutation("A1", "hybrid-checkpoint", 205)
def the_lane_of_rows_is_not_saved(patch: Patch) -> None:
    """a checkpoint does not record which rows of the next step it has"""
    real = Ledger.marks
    patch.setattr(Ledger, "marks", lambda self: tuple(m for m in real(self) if m.key.lane != ROW_LANE))


@mutation("A1", "hybrid-checkpoint", 205)
def the_lane_of_rows_ends_with_the_step(patch: Patch) -> None:
    """a checkpoint records that no rows of the next step have counted"""

    def end_with_step(partition: Any, marks: Any) -> Any:
        return tuple(mark._replace(next=min(mark.next, partition.steps.gate.step)) for mark in marks)

    change_cuts(patch, end_with_step)


@mutation("A1", "hybrid-checkpoint", 10)
def rows_of_the_next_step_are_passed_over(patch: Patch) -> None:
    """a checkpoint records that all rows of the next step have counted"""

    def with_all_rows(partition: Any, marks: Any) -> Any:
        ends = {ROW_LANE: partition.steps.gate.step + 1}
        return tuple(mark._replace(next=ends.get(mark.key.lane, mark.next)) for mark in marks)

    change_cuts(patch, with_all_rows)


@mutation("C3", "hybrid", 1, 2)
def rows_of_a_step_are_used_for_the_next(patch: Patch) -> None:
    """rows that were loaded ahead for a step are used for later steps"""
    real = StepVersions._hold

    def hold(self: Any, version: int, rows: Any) -> None:
        before = self._rows
        real(self, version, rows)
        if before is not None:
            self._rows = before
            self.load_again()

    patch.setattr(StepVersions, "_hold", hold)


@mutation("B1", "sync-rows", 4)
def ranks_are_alike_in_rows(patch: Patch) -> None:
    """the mean of a step's rows is not weighted by samples"""
    real = row_sums.mean_of

    def mean_of(given: Any, shares: Any, limit: float) -> Any:
        return real(given, [1.0 / len(shares) for _ in shares], limit)

    patch.setattr(row_sums, "mean_of", mean_of)


@mutation("B3", "sync-rows", 31)
def rows_are_looked_up_as_they_are(patch: Patch) -> None:
    """a look-up of rows at a version returns the newest rows"""
    real = lookups.look_up_rows

    def look_up_rows(asked: Any, number: int | None = None, until: float = 0.0) -> None:
        with contextlib.suppress(NotFound):
            real(asked, number, until)
        real(asked)

    patch.setattr(lookups, "look_up_rows", look_up_rows)


@mutation("B7", "sync-checkpoint-rows", 6)
def when_a_row_was_pushed_last_is_not_in_a_checkpoint(patch: Patch) -> None:
    """rows are restored with a later step of their last push"""
    real = TableOfPartition.load

    def load(self: Any, ids: Any, values: Any, state: Any, frequencies: Any, steps: Any) -> None:
        real(self, ids, values, state, frequencies, steps + 1)

    patch.setattr(TableOfPartition, "load", load)


@mutation("B6", "sync-overflow-rows", 0, 2)
def rows_of_a_step_that_is_skipped_count(patch: Patch) -> None:
    """an overflow of one rank does not skip the rows of the other ranks"""
    real = sync_step._mean_rows
    patch.setattr(sync_step, "_mean_rows", lambda partition, taken: real(partition, taken._replace(skips=False)))


@mutation("B6", "sync-backup-rows", 9)
def rows_of_who_came_late_count(patch: Patch) -> None:
    """rows of a rank that a verdict leaves out count in partitions that have them"""
    real = sync_step._complete

    def complete(partition: Any, steps: Any, contributions: Any, *more: Any) -> Any:
        left_out = [each for each in steps.gate.recorded if not any(each is other for other in contributions)]
        first = contributions[0]
        rows = tuple(row for each in left_out for row in each.rows)
        if rows and first.rows:
            rows_of_all = [first.rows, *[each.rows for each in left_out]]
            joined = row_sums.mean_of(rows_of_all, [1.0] * (1 + len(left_out)), 0.0)
            contributions = (first._replace(rows=joined), *contributions[1:])
        return real(partition, steps, contributions, *more)

    patch.setattr(sync_step, "_complete", complete)


@mutation("C1", "async-wal-rows", 6)
def rows_are_not_in_the_log(patch: Patch) -> None:
    """a replayed log restores no rows"""
    patch.setattr(replay, "read_rows", lambda *given: ({}, {}))


@mutation("promise 4", "async", 15)
def the_dead_are_not_refused(patch: Patch) -> None:
    """a server accepts calls of fenced workers"""
    nobody_is_fenced(patch)
