"""Which job a request is about.

Invariant: a worker's request concerns the job that the worker is in. Must not know: what is requested, the clock.
"""

from __future__ import annotations

from shardyard.domain import errors
from shardyard.domain.ids import Caller, MemberRole
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.machine.job_directory import JobDirectory
from shardyard_coordinator.members.membership import Member, Membership


def require_job(members: Membership, jobs: JobDirectory, caller: Caller) -> JobState:
    """The unfinished job of a living worker that asks about it."""
    worker = members.require(caller.incarnation, MemberRole.WORKER)
    if worker.job is None or caller.job != worker.job:
        raise errors.NotFound(
            f"worker {worker.incarnation} asks about job {caller.job} and is in "
            + ("none" if worker.job is None else f"job {worker.job}"),
            todo="join the job first",
        )
    job = jobs.get(worker.job)
    if job is None:
        raise errors.NotFound(f"job {worker.job} ended long ago", todo="start the script again for a new run")
    job.require_unfinished()
    return job


def asked_about(members: Membership, jobs: JobDirectory, caller: Caller | None, job_name: str) -> JobState:
    """The job that a worker, or a person, asks about."""
    return jobs.find(job_name) if caller is None else require_job(members, jobs, caller)


def joined_before(jobs: JobDirectory, worker: Member, name: str) -> JobState:
    """The job of a worker that asks again to join."""
    job = jobs.get(worker.job)
    if job is None or job.settings.name != name:
        there = "one that has ended" if job is None else repr(job.settings.name)
        raise errors.InvalidRequest(
            f"worker {worker.incarnation} joins job {name!r} and is in another one, {there}",
            todo="register again for another job",
        )
    job.require_unfinished()
    return job
