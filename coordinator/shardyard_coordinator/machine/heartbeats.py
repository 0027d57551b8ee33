"""What the machine does with a heartbeat: it takes the report, decides what follows from it, and replies.

Invariants: only `decide` makes records. A reply shows what was decided, and changes nothing. Must not know: how
heartbeats come here, the clock.
"""

from __future__ import annotations

from shardyard.domain.ids import Incarnation, MemberRole
from shardyard_coordinator.core.effects import Draining, Effect, HeartbeatReply, Reply
from shardyard_coordinator.core.events import HeartbeatReceived
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import last_step
from shardyard_coordinator.machine import job_views
from shardyard_coordinator.machine.job_directory import JobDirectory
from shardyard_coordinator.members.membership import Member, Membership
from shardyard_coordinator.members.progress import Report


def take(
    members: Membership, jobs: JobDirectory, event: HeartbeatReceived, now_ms: int
) -> tuple[Member, JobState | None]:
    """Renews the member's lease and keeps its report. Returns the member and the job that it works on. Raises
    StaleIncarnation, WorkerQuarantined."""
    member, report = members.require(event.incarnation), event.report
    members.renew(member.incarnation, now_ms)
    member.waiting_for = report.waiting_for
    if member.role is MemberRole.SERVER:
        jobs.note_server(event)
        return member, None
    job = jobs.get(member.job)
    if job is not None and not job.phase.ended:
        job.progress.take(member.incarnation, report, now_ms)
    return member, job


def decide(job: JobState, worker: Incarnation, report: Report) -> list[Effect]:
    """What follows from a worker's report: the step at which the job stops or changes its mode may be settled."""
    if job.phase.ended:
        return []
    effects = last_step.on_reached(job, worker, report)
    return [*effects, *job.records(job.mode.acknowledge(worker, report.switches))]


def reply(jobs: JobDirectory, member: Member, job: JobState | None, drain: Draining | None) -> Reply:
    """The coordinator's answer, as its state is now. `drain`: whether the member leaves in order."""
    if member.role is MemberRole.SERVER:
        return Reply(HeartbeatReply(fenced=jobs.fenced_on(member.incarnation), drain=drain))
    if job is None:
        return Reply(HeartbeatReply(drain=drain))
    return Reply(job_views.heartbeat_reply(job, member.incarnation, drain))
