"""How workers take over the residuals of a checkpoint when the whole job goes back to it.

The job's `checkpoint_residuals` decides which worker takes over which residual; `lost_residuals` counts what is lost.
Invariant: while no worker is ready to take the residuals over, no checkpoint is begun, because it would lack them. Must
not know: what the files contain, storage, the clock.
"""

from __future__ import annotations

from shardyard.domain.ids import Generation, Incarnation
from shardyard_coordinator.core.effects import Effect, FeedbackVerdict, LogMessage, Reply
from shardyard_coordinator.core.events import FeedbackRead
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.storage.checkpoint_book import Committed
from shardyard_coordinator.storage.checkpoint_residuals import CheckpointResidual


def go_back(job: JobState, committed: Committed, generation: Generation, *, is_same_run: bool) -> list[Effect]:
    """All partitions are as in the checkpoint. The workers' residuals must follow."""
    if not committed.feedback and not job.has_error_feedback:
        return []
    record = job.checkpoint_residuals.go_back(committed, committed.url, generation, is_same_run=is_same_run)
    said = f"{job.title}: workers take over the {len(committed.feedback)} residuals of checkpoint {committed.number}"
    return [*job.records([record]), *([LogMessage(said)] if committed.feedback else [])]


def for_worker(job: JobState, worker: Incarnation) -> tuple[CheckpointResidual, ...]:
    """The residuals that the worker should take over."""
    return job.checkpoint_residuals.for_worker(worker, job.workers, job.deployment.workers)


def take(job: JobState, read: FeedbackRead) -> list[Effect]:
    """A worker has read a residual that it was told to take over, or could not read it."""
    worker, lost = read.caller.incarnation, bool(read.failure)
    claim = job.checkpoint_residuals.take(worker, job.workers, read.generation, read.worker, lost=lost)
    effects: list[Effect] = []
    if claim.record is not None:
        effects += job.records([claim.record])
        if lost:
            job.lost_residuals.add_unknown()
            what = f"the residual of worker {read.worker} is lost: worker {worker} could not take it over"
            effects.append(LogMessage(f"{job.title}: {what}: {read.failure}", warning=True))
    return [*effects, Reply(FeedbackVerdict(claim.taken))]


def hold_checkpoints(job: JobState) -> bool:
    """Whether residuals are due and no worker is ready to take them over, so that a checkpoint would lack them. No
    worker trains meanwhile. The first checkpoint is not held back, because workers wait for it."""
    return bool(job.checkpoint_residuals.due) and not job.deployment.workers and job.may_acknowledge
