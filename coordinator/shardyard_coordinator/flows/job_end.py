"""How a job ends: by its last checkpoint, if it has done its work or nobody comes any more; at once, if it has failed.

Owns: `LastCheckpoint`, what is known of the checkpoint that a job ends with; the records of an end. Invariants: a job
that is finished has all that was done in a checkpoint, or says that it has not; whatever ends it, its servers are told,
unless somebody reads its last values; the failure that it ended with is the same after a restart. Must not know:
whether it is time to end, how checkpoints are taken, the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation
from shardyard_coordinator.core.effects import DropJob, Effect, JobState, LogMessage
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.records import SUM_MAX, Body, Entry, checked_float, checked_items, checked_text, require
from shardyard_coordinator.storage.checkpoint_book import Committed

if TYPE_CHECKING:
    from shardyard_coordinator.machine.job import Job


@dataclass(slots=True)
class LastCheckpoint:
    """`failure`: what the job ends with when its last checkpoint is there, if it does not end well; `ticket`: of that
    checkpoint, 0 before it is asked for; `told`: of its last try, for behind what is said of it."""

    failure: errors.ShardyardError | None = None
    ticket: int = 0
    told: str = ""


class JobEnd:
    """Of one job, which it is asked of anew each time."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def finish(self, now_ms: int, failure: errors.ShardyardError | None = None) -> list[Effect]:
        """All workers have said goodbye, or, which is the failure that the job ends with, none has come for long: what
        the newest checkpoint lacks is written down before the job ends."""
        job = self._job
        job.last.failure = failure
        if job.keeping.is_whole_at(job.step):
            return self._conclude()
        job.state = JobState.FINISHING
        job.attendance.rest(now_ms)
        job.last.ticket = job.keeping.ask_for_the_last(job.step)
        done = "is done" if failure is None else "has no workers any more"
        told = LogMessage(f"{job.title} {done}; its last checkpoint is written")
        return [*job.free(tuple(job.attendance.fencing), now_ms), *job.records([self.finishing]), told]

    def tick(self, now_ms: int) -> list[Effect]:
        """While it is finishing: its end, if that takes too long."""
        job = self._job
        if job.attendance.idle_ms(now_ms) < job.settings.idle_ms:
            job.last.ticket = job.last.ticket or job.keeping.ask_for_the_last(job.step)
            return []
        why = f"it was not written within {job.settings.idle_ms / 1000:g} s{job.last.told}"
        told = f"{job.title} ends without its last checkpoint: {why}; what came after the newest one is lost"
        return [LogMessage(told, warning=True), *self._conclude()]

    def end_checkpoint(self) -> list[Effect]:
        """One is committed: its end, if that was the last."""
        job = self._job
        if job.last.ticket and isinstance(job.keeping.book.outcome(job.last.ticket), Committed):
            return self._conclude()
        return []

    def fail_checkpoint(self, draft: int, failure: errors.ShardyardError) -> None:
        last = self._job.last
        if last.ticket and draft >= last.ticket:
            last.told = f", which failed at last by: {failure.what}"

    def fail(self, failure: errors.ShardyardError, gone: Incarnation | None = None) -> list[Effect]:
        """`gone`: a server that is told nothing any more."""
        self._job.failure = failure
        return self._end(JobState.FAILED, gone)

    def give_up(self, servers: Sequence[Server]) -> list[Effect]:
        """These have nothing to do for the job any more, unless somebody reads its last values."""
        job = self._job
        drops = [DropJob(job.id, server) for server in servers]
        if job.state is not JobState.FINISHED or not job.readers.may_be_there:
            return [*drops]
        job.readers.keep(drops)
        return []

    def _conclude(self) -> list[Effect]:
        last = self._job.last
        failure, last.failure = last.failure, None
        return self._end(JobState.FINISHED) if failure is None else self.fail(failure)

    def _end(self, state: JobState, gone: Incarnation | None = None) -> list[Effect]:
        job = self._job
        job.state = state
        job.keeping.origin = None
        said = f"{job.title} has ended: {job.failure.what}" if job.failure else f"{job.title} is finished"
        due = job.restored_residuals.due
        if due:
            said += f"; no worker has taken up the residuals of workers {', '.join(due[:8])}"
        drops = self.give_up([server for server in job.deployment.servers if server.incarnation != gone])
        return [*job.records([self.ended]), LogMessage(said, warning=job.failure is not None), *drops]

    # ---- records

    @property
    def finishing(self) -> Entry:
        return "job_finishing", {"failure": _failure_body(self._job.last.failure)}

    @property
    def ended(self) -> Entry:
        job = self._job
        progress = job.progress
        return "job_ended", {
            "state": job.state.value,
            "failure": _failure_body(job.failure),
            "step": progress.step,
            "samples": progress.samples,
            "metrics": [[name, value] for name, value in progress.metrics],
        }

    def restore(self, kind: str, body: Body, now_ms: int) -> None:
        """Takes one of these records. Raises DamagedRecord."""
        job = self._job
        if kind == "job_finishing":
            require(not job.state.ended, "the job has ended before")
            job.state = JobState.FINISHING
            job.attendance.rest(now_ms)
            job.last.failure = _failure_of(body)
            return
        ends = {state.value: state for state in JobState if state.ended}
        state = body.text("state")
        require(state in ends, f"state: expected one of {', '.join(ends)}, got {state!r}")
        job.state = ends[state]
        job.keeping.origin = None
        job.failure, job.last.failure = _failure_of(body), None
        require((job.failure is None) == (job.state is JobState.FINISHED), "a failure where the job is finished")
        metrics = [checked_items(each, "a metric", count=2) for each in body.items("metrics")]
        job.progress.restore(
            step=body.number("step"),
            samples=body.number("samples", most=SUM_MAX),
            metrics=tuple(
                (checked_text(name, "a metric"), checked_float(value, "a metric")) for name, value in metrics
            ),
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
