"""How workers take up the residuals of a checkpoint when the whole job goes back to it.

Which worker takes up which residual is decided in the job's `restored_residuals`; what is lost is counted in its
`residuals`. Invariant: while no worker is ready to take residuals up, no checkpoint is begun that would lack them. Must
not know: what the files contain, storage, the clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardyard.domain.ids import Generation, Incarnation
from shardyard_coordinator.core.effects import Effect, FeedbackVerdict, LogMessage, Reply
from shardyard_coordinator.core.events import FeedbackRead
from shardyard_coordinator.storage.checkpoint_book import Committed
from shardyard_coordinator.storage.restored_residuals import RestoredResidual

if TYPE_CHECKING:
    from shardyard_coordinator.machine.job import Job


class ResidualFlow:
    """Of one job, which it is asked of anew each time."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def go_back_with(self, committed: Committed, generation: Generation, *, is_same_run: bool) -> list[Effect]:
        """All partitions are as in the checkpoint; the workers' residuals shall be as well."""
        job = self._job
        if not committed.feedback and not job.keeping.keeps_feedback:
            return []
        record = job.restored_residuals.go_back(committed, committed.url, generation, is_same_run=is_same_run)
        said = f"{job.title}: workers take up the {len(committed.feedback)} residuals of checkpoint {committed.number}"
        return [*job.records([record]), *([LogMessage(said)] if committed.feedback else [])]

    def for_worker(self, worker: Incarnation) -> tuple[RestoredResidual, ...]:
        """The residuals that the worker shall take up."""
        job = self._job
        return job.restored_residuals.for_worker(worker, job.workers, job.deployment.workers)

    def take(self, read: FeedbackRead) -> list[Effect]:
        """A worker has read a residual that it was told to take up, or could not."""
        job = self._job
        worker, lost = read.caller.incarnation, bool(read.failure)
        claim = job.restored_residuals.take(worker, job.workers, read.generation, read.worker, lost=lost)
        effects: list[Effect] = []
        if claim.record is not None:
            effects += job.records([claim.record])
            if lost:
                job.residuals.add_unknown()
                what = f"the residual of worker {read.worker} is lost: worker {worker} could not take it up"
                effects.append(LogMessage(f"{job.title}: {what}: {read.failure}", warning=True))
        return [*effects, Reply(FeedbackVerdict(claim.taken))]

    @property
    def holds_checkpoints(self) -> bool:
        """Whether residuals are due and no worker is ready to take them up: a checkpoint would lack them. Nobody trains
        meanwhile either. The first checkpoint, for which workers wait, is not held."""
        job = self._job
        return bool(job.restored_residuals.due) and not job.deployment.workers and job.keeping.can_begin
