"""How a job ends: with a last checkpoint if it has done its work or has no workers left, at once if it has failed.

Invariants: a finished job has all its work in a checkpoint, if it has checkpoints at all. However the job ends, its
servers are told; if it is finished, not before its readers have read it. The job's failure is the same after a restart.
Must not know: whether it is time to end, how checkpoints are taken, the clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation
from shardyard.domain.limits import SEQUENCE_MAX
from shardyard_coordinator.core.effects import DropJob, Effect, JobPhase, LogMessage
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import checkpointing
from shardyard_coordinator.flows.fencing import free
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.records import SUM_MAX, Body, Entry, checked_float, checked_items, checked_text, require
from shardyard_coordinator.storage.checkpoint_book import Committed


def finish(job: JobState, now_ms: int, failure: errors.ShardyardError | None = None) -> list[Effect]:
    """Ends the job after all workers have said goodbye, or after none has come for long (then `failure` says so). A
    last checkpoint is taken, unless the newest one has everything. A job that no worker gave variables has failed,
    unless it was stopped."""
    if failure is None and job.deployment.layout is None and job.stopping.stop is None:
        return fail(job, _untrained())
    job.last_checkpoint.failure = failure
    if checkpointing.is_current(job):
        return _conclude(job)
    job.phase = JobPhase.FINISHING
    job.roster.rest(now_ms)
    job.last_checkpoint.ticket = checkpointing.ask_for_the_last(job)
    done = "is done" if failure is None else "has no workers any more"
    message = LogMessage(f"{job.title} {done}; its last checkpoint is being written")
    return [*free(job, tuple(job.roster.fencing), now_ms), *job.records([finishing(job)]), message]


def _untrained() -> errors.JobFailed:
    return errors.JobFailed(
        "no worker has given the job variables, so nothing was trained",
        why="all workers have left, and none has called job.prepare or job.register",
        todo="call model, optimizer = job.prepare(model, optimizer) in the script before the first batch",
    )


def tick(job: JobState, now_ms: int) -> list[Effect]:
    """While the job is finishing: if the last checkpoint takes too long, the job fails without it. A failure that it
    has already stays its failure."""
    last = job.last_checkpoint
    if job.roster.idle_ms(now_ms) < job.settings.idle_ms:
        last.ticket = last.ticket or checkpointing.ask_for_the_last(job)
        return []
    unwritten = _unwritten(job)
    if last.failure is None:
        return fail(job, unwritten)
    return [LogMessage(unwritten.what, warning=True), *_conclude(job)]


def _unwritten(job: JobState) -> errors.StorageUnavailable:
    """The failure of a job whose last checkpoint was not written."""
    newest = job.book.committed
    lost, facts = "it has no other, so its work is lost", {}
    go_on = "start the script again for a new run"
    if newest is not None:
        lost = f"what came after checkpoint {newest.number} of step {newest.step:,} is lost"
        facts = {"checkpoint": str(newest.number), "step": str(newest.step)}
        at = f" --url {newest.url}" if newest.url else ""
        go_on = f"order `shardyard checkpoint restore {job.settings.name}{at}` and start the script again: it goes on "
        go_on += "from that checkpoint (docs/guides/checkpoints.md)"
    return errors.StorageUnavailable(
        f"{job.title} ends without its last checkpoint{job.last_checkpoint.failed_attempt}; {lost}",
        why=f"the last checkpoint was not written within {job.settings.idle_ms / 1000:g} s (job.idle_ms)",
        todo=f"repair the storage, or start the servers that are missing; then {go_on}",
        facts=facts,
    )


def end_checkpoint(job: JobState) -> list[Effect]:
    """A checkpoint is committed. Ends the job if that was its last one."""
    if job.last_checkpoint.ticket and isinstance(job.book.outcome(job.last_checkpoint.ticket), Committed):
        return _conclude(job)
    return []


def fail_checkpoint(job: JobState, draft: int, failure: errors.ShardyardError) -> None:
    """A checkpoint was not taken. If it was the last one, the job's end will say why."""
    last = job.last_checkpoint
    if last.ticket and draft >= last.ticket:
        last.failed_attempt = f", which failed at last by: {failure.what}"


def fail(job: JobState, failure: errors.ShardyardError, gone: Incarnation | None = None) -> list[Effect]:
    """Ends the job with a failure. `gone`: a lost server, which is not told."""
    job.failure = failure
    return _end(job, JobPhase.FAILED, gone)


def drop_on(job: JobState, servers: Sequence[Server]) -> list[Effect]:
    """Tells these servers to drop the job, at once or when no reader of its last values is active."""
    if job.phase is not JobPhase.FINISHED or not job.readers.may_be_active:
        return [DropJob(job.id, server) for server in servers]
    job.readers.keep(servers)
    return []


def _conclude(job: JobState) -> list[Effect]:
    last = job.last_checkpoint
    failure, last.failure = last.failure, None
    return _end(job, JobPhase.FINISHED) if failure is None else fail(job, failure)


def _end(job: JobState, phase: JobPhase, gone: Incarnation | None = None) -> list[Effect]:
    job.phase = phase
    job.origin = None
    said = f"{job.title} has ended: {job.failure.what}" if job.failure else f"{job.title} is finished"
    due = job.checkpoint_residuals.due
    if due:
        said += f"; no worker has taken over the residuals of workers {', '.join(due[:8])}"
    drops = drop_on(job, [server for server in job.deployment.servers if server.incarnation != gone])
    return [*job.records([ended(job)]), LogMessage(said, warning=job.failure is not None), *drops]


# ---- records


def finishing(job: JobState) -> Entry:
    return "job_finishing", {"failure": _failure_body(job.last_checkpoint.failure), "step": job.progress.step}


def ended(job: JobState) -> Entry:
    progress = job.progress
    return "job_ended", {
        "state": job.phase.value,
        "failure": _failure_body(job.failure),
        "step": progress.step,
        "samples": progress.samples,
        "metrics": [[name, value] for name, value in progress.metrics],
    }


def restore(job: JobState, kind: str, body: Body, now_ms: int) -> None:
    """Applies one of these records. Raises DamagedRecord."""
    if kind == "job_finishing":
        require(not job.phase.ended, "the job has ended before")
        job.phase = JobPhase.FINISHING
        job.roster.rest(now_ms)
        job.last_checkpoint.failure = _failure_of(body)
        if body.has("step"):  # records of earlier releases have none
            job.progress.reach(body.number("step", most=SEQUENCE_MAX))
        return
    ends = {state.value: state for state in JobPhase if state.ended}
    state = body.text("state")
    require(state in ends, f"state: expected one of {', '.join(ends)}, got {state!r}")
    job.phase = ends[state]
    job.origin = None
    job.failure, job.last_checkpoint.failure = _failure_of(body), None
    require((job.failure is None) == (job.phase is JobPhase.FINISHED), "a failure where the job is finished")
    metrics = [checked_items(each, "a metric", count=2) for each in body.items("metrics")]
    job.progress.restore(
        step=body.number("step"),
        samples=body.number("samples", most=SUM_MAX),
        metrics=tuple((checked_text(name, "a metric"), checked_float(value, "a metric")) for name, value in metrics),
    )


def _failure_body(failure: errors.ShardyardError | None) -> dict[str, object] | None:
    if failure is None:
        return None
    return {
        "code": failure.code,
        "what": failure.what,
        "why": failure.why_text,
        "todo": failure.todo_text,
        "facts": failure.facts,
    }


def _failure_of(body: Body) -> errors.ShardyardError | None:
    """Raises DamagedRecord."""
    if body.is_null("failure"):
        return None
    said = body.part("failure")
    code, what, why, todo = (said.text(name) for name in ("code", "what", "why", "todo"))
    return errors.rebuild(code, what, why, todo, said.texts("facts"))
