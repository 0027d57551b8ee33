"""How the partitions of a job apply updates. The rules are the same on all servers while the job is in one mode.

Owns: which rules can be combined. Must not know: partitions.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardyard.domain import limits
from shardyard.domain.consistency import NO_CLIPPING, Clipping, Durability, StaleRule, UpdateMode
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import JobId
from shardyard.domain.layout.checks import check_stale_rows
from shardyard.domain.layout.layouts import JobLayout


@dataclass(frozen=True, slots=True)
class UpdateRules:
    """`stale`: how an asynchronous job corrects gradients of older versions. The others are for synchronous jobs.
    `logical_ranks`: of a step. `clipping`: of mean gradients; in an asynchronous job workers clip before they push.
    `backup_workers`: how many ranks need not count in a step. `rows_at_once`: rows are updated when they come, before
    the step, in a lane of their own (hybrid). `mirrored`: the variables live in the workers, which push rows of tables
    only, and publish the variables now and then."""

    mode: UpdateMode
    logical_ranks: int
    durability: Durability = Durability.CHECKPOINT
    stale: StaleRule | None = None
    clipping: Clipping = NO_CLIPPING
    backup_workers: int = 0
    rows_at_once: bool = False
    mirrored: bool = False

    @property
    def logged(self) -> bool:
        return self.durability is Durability.WAL

    @property
    def rows_have_versions(self) -> bool:
        """Whether rows of tables are updated with a step, as values are."""
        return self.mode is UpdateMode.SYNC and not self.rows_at_once

    def check(self, job: JobId, layout: JobLayout) -> None:
        """Raises InvalidRequest for rules that no job can have, or none of this layout."""
        is_sync = self.mode is UpdateMode.SYNC
        if is_sync and not 1 <= self.logical_ranks <= limits.LOGICAL_RANKS_MAX:
            raise InvalidRequest(f"{self.logical_ranks} logical ranks; expected 1 to {limits.LOGICAL_RANKS_MAX}")
        if self.stale is not None and is_sync:
            raise InvalidRequest(f"a rule for stale gradients in job {job}, which is {self.mode.value}")
        if self.stale is not None and self.stale.compensation and self.logged:
            raise InvalidRequest(
                f"stale gradients of job {job}, which has a log, to be compensated",
                why="the log does not have the values on which they were computed, so replay would differ",
                todo="set job.consistency.delay_compensation to 0, or job.durability to checkpoint",
            )
        if self.clipping != NO_CLIPPING and not is_sync:
            raise InvalidRequest(
                f"clipping by servers in job {job}, which is {self.mode.value}",
                todo="clip each gradient before it is pushed",
            )
        if self.backup_workers and (not is_sync or self.backup_workers >= self.logical_ranks):
            raise InvalidRequest(
                f"{self.backup_workers} backup workers in job {job}, which is {self.mode.value} with"
                f" {self.logical_ranks} ranks",
                why="some rank must count",
            )
        if self.rows_at_once and (not is_sync or self.backup_workers):
            raise InvalidRequest(
                f"rows of job {job}, which is {self.mode.value} with {self.backup_workers} backup workers, to be"
                " updated before their step",
                why="rows of a late contribution may have counted on some servers, and would count again",
            )
        if layout.tables:
            self._check_tables(job, layout)

    def _check_tables(self, job: JobId, layout: JobLayout) -> None:
        by_time = next((each for each in layout.tables if each.expiry.by_time), None)
        if self.rows_have_versions and by_time is not None:
            raise InvalidRequest(
                f"table {by_time.name!r} of job {job}, which is synchronous, with rows that expire by seconds",
                why="the bits of a step depend only on its work, not on the time",
                todo="give ages of synchronous jobs in steps",
            )
        if self.rows_at_once and self.clipping.norm:
            raise InvalidRequest(
                f"gradients of job {job}, whose rows are updated before their step, to be clipped by norm",
                why="a row is updated before the norm is known",
                todo="set job.clip.norm to 0, or job.consistency.mode to sync",
            )
        if self.stale is not None:
            check_stale_rows(layout.tables, self.stale)
