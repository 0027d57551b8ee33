"""How much of the yard the jobs of one owner may take.

Owns: the comparison of jobs with the settings `quotas`. Jobs of nobody in particular count as of one owner. Must not
know: the clock, what happens to a job that is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from shardyard.config.settings import QuotaSettings
from shardyard.domain.errors import NotReady, QuotaExceeded
from shardyard_coordinator.core.events import VariablesRegistered
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.machine.job_views import table_rows
from shardyard_coordinator.placement import deployment


def check_start(quotas: QuotaSettings, jobs: Iterable[JobState], owner: str) -> None:
    """An owner starts another job. Raises QuotaExceeded."""
    running = len(_of(jobs, owner))
    if 0 < quotas.jobs_max <= running:
        raise _exceeded(owner, f"{running} unfinished ones", "jobs_max", quotas.jobs_max)


def check_join(quotas: QuotaSettings, jobs: Iterable[JobState], owner: str) -> None:
    """A worker joins a job of that owner. Raises NotReady, since one that has died may still count."""
    workers = sum(len(job.workers) for job in _of(jobs, owner))
    if 0 < quotas.workers_max <= workers:
        full = _exceeded(owner, f"{workers} workers", "workers_max", quotas.workers_max)
        raise NotReady(full.what, why=full.why_text, todo=full.todo_text)


def check_variables(
    quotas: QuotaSettings, jobs: Iterable[JobState], job: JobState, registered: VariablesRegistered
) -> None:
    """A job gets its variables. Raises QuotaExceeded, and what placement raises."""
    if job.deployment.layout is not None or not (quotas.bytes_max or quotas.partitions_max):
        return
    layouts = [each.deployment.layout for each in _of(jobs, job.owner) if each.deployment.layout is not None]
    layouts.append(
        deployment.plan(job.settings, registered.variables, registered.optimizer, registered.tables, registered.places)
    )
    nbytes = sum(variable.payload_bytes for each in layouts for variable in each.variables)
    if 0 < quotas.bytes_max < nbytes:
        raise _exceeded(job.owner, f"{nbytes:,} bytes of variables with {job.title}", "bytes_max", quotas.bytes_max)
    partitions = sum(len(each.partitions) for each in layouts)
    if 0 < quotas.partitions_max < partitions:
        raise _exceeded(
            job.owner, f"{partitions:,} partitions with {job.title}", "partitions_max", quotas.partitions_max
        )


def beyond_rows(quotas: QuotaSettings, jobs: Collection[JobState]) -> list[tuple[JobState, str]]:
    """For each owner with too many rows, the job that is to stop: the one with tables that began last, unless it stops
    already. And why."""
    found = []
    if quotas.rows_max:
        for owner in sorted({job.owner for job in jobs}):
            having = [job for job in _of(jobs, owner) if job.rows_seen]
            rows = sum(sum(table_rows(job)) for job in having)
            if rows > quotas.rows_max and having[-1].stopping.stop is None:
                why = _exceeded(owner, f"{rows:,} rows in tables", "rows_max", quotas.rows_max)
                found.append((having[-1], why.what))
    return found


def _of(jobs: Iterable[JobState], owner: str) -> list[JobState]:
    return [job for job in jobs if job.owner == owner and not job.phase.ended]


def _exceeded(owner: str, what: str, setting: str, most: int) -> QuotaExceeded:
    whose = owner or "nobody in particular"
    return QuotaExceeded(f"the jobs of {whose} have {what}; quotas.{setting} is {most:,}")
