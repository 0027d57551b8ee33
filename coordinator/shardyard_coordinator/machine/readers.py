"""Requests of the readers of a job's values, and reports of evaluators."""

from __future__ import annotations

from shardyard_coordinator.core.effects import Acknowledged, DropJob, Effect, JobView, Reply
from shardyard_coordinator.core.events import EvaluationReported, ReaderHeard
from shardyard_coordinator.core.job_state import JobState


def on_reader(job: JobState, heard: ReaderHeard, now_ms: int) -> list[Effect]:
    """A reader follows the job, or leaves it. Raises TooLarge."""
    effects: list[Effect] = []
    if heard.leaves:
        job.readers.leave(heard.reader)
        effects = drop_if_read(job, now_ms)
    elif not job.phase.ended or job.readers.keep_values:
        job.readers.report(heard.reader, now_ms)
    has_values = job.is_whole and (not job.phase.ended or job.readers.keep_values)
    view = JobView(
        job=job.id,
        job_name=job.settings.name,
        state=job.phase,
        failure=job.failure,
        mode=job.updates,
        map=job.deployment.map if has_values else None,
        layout=job.deployment.layout,
        url=job.book.url,
    )
    return [*effects, Reply(view)]


def on_evaluation(job: JobState, reported: EvaluationReported) -> list[Effect]:
    return [*job.records(job.evaluations.report(reported.evaluation, reported.best)), Reply(Acknowledged())]


def drop_if_read(job: JobState, now_ms: int) -> list[Effect]:
    """Lets servers drop a finished job once no reader needs its last values."""
    return [DropJob(job.id, server) for server in job.readers.release_if_read(now_ms)]
