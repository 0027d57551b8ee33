"""How what a worker's error feedback remembers comes to whoever goes on: when the job goes back, or the worker leaves.

Owns: nothing but the order of things; whose it is stands in the job's `handovers`, what is lost in its `residuals`.
Invariants: nothing that was left changes hands while a checkpoint is taken; no file is deleted while a manifest may be
written that names it; a worker whose steps nobody goes on with writes nothing. Must not know: what the files hold,
storage, the clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardyard.checkpoints.manifest import left_name
from shardyard.domain import errors
from shardyard.domain.ids import Generation, Incarnation
from shardyard_coordinator.core.effects import (
    DropFeedback,
    Effect,
    FeedbackVerdict,
    HandoverVerdict,
    JobState,
    LogMessage,
    Reply,
)
from shardyard_coordinator.core.events import FeedbackRead, HandoverRequested
from shardyard_coordinator.storage.checkpoint_book import Committed
from shardyard_coordinator.storage.residual_handover import Fate, Handover, Left
from shardyard_coordinator.work.step_ledger import StepLedger

if TYPE_CHECKING:
    from shardyard_coordinator.machine.job import Job


class ResidualFlow:
    """Of one job, which it is asked of anew each time."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def go_back_with(self, committed: Committed, generation: Generation, *, is_same_run: bool) -> list[Effect]:
        """All partitions are as the checkpoint has them, and so shall be what workers have not sent."""
        job = self._job
        if not committed.feedback and not job.keeping.keeps_feedback:
            return []
        record = job.handovers.go_back(committed, committed.url, generation, is_same_run=is_same_run)
        told = f"{job.title}: what {len(committed.feedback)} workers had not sent at checkpoint {committed.number}"
        tell = [LogMessage(f"{told} is handed over")] if committed.feedback else []
        return [*job.records([record]), *tell]

    def told_to(self, worker: Incarnation) -> tuple[Handover, ...]:
        """What the worker's error feedback shall take up."""
        job = self._job
        return job.handovers.told_to(worker, job.workers, job.deployment.workers, frozen=self._is_frozen)

    def take(self, read: FeedbackRead) -> list[Effect]:
        """A worker has read what it was told to take up, or could not."""
        job = self._job
        worker, lost = read.caller.incarnation, bool(read.failure)
        claim = job.handovers.take(worker, job.workers, read.generation, read.worker, lost=lost, frozen=self._is_frozen)
        effects: list[Effect] = [] if claim.record is None else job.records([claim.record])
        if claim.lost is not None:
            job.residuals.add_lost(claim.lost)
            what = f"what worker {read.worker} had not sent is lost: worker {worker} could not take it up"
            effects.append(LogMessage(f"{job.title}: {what}: {read.failure}", warning=True))
        return [
            *effects,
            *self.drop([claim.left] if claim.left is not None else []),
            Reply(FeedbackVerdict(claim.taken)),
        ]

    def hand_over(self, asked: HandoverRequested, now_ms: int) -> list[Effect]:
        """A worker leaves whose steps have no room for what it has not sent. Raises InvalidRequest where nobody could
        read it, TooLarge."""
        job = self._job
        worker, url = asked.caller.incarnation, job.keeping.book.url
        if job.ranks is None:
            raise errors.InvalidRequest(
                f"{job.title} is asynchronous: what a worker has not sent when it leaves is its last push"
            )
        fate = self._fate_of(asked)
        if fate not in (Fate.WAIT, Fate.WRITE):
            return [Reply(HandoverVerdict(fate))]
        if url is None:
            raise errors.InvalidRequest(
                f"{job.title} has no storage", why="job.checkpoint.url is never, or there is no state folder"
            )
        # what is older than the newest checkpoint, and not in it, was pruned
        if fate is Fate.WAIT or asked.file is None or asked.file.file.number <= job.keeping.book.base:
            if fate is Fate.WRITE:
                job.handovers.begin_leaving(worker, now_ms)
            return [Reply(HandoverVerdict(fate, url))]
        record = job.handovers.hand_over(Left(worker, url, asked.file, asked.norm), now_ms)
        told = f"{job.title}: worker {worker} leaves; what it has not sent (2-norm {asked.norm:.3g}) is handed over"
        return [*job.records([record]), LogMessage(told), Reply(HandoverVerdict(Fate.HANDED_OVER))]

    def drop(self, unneeded: Iterable[Left]) -> list[Effect]:
        """Files that nobody reads any more; while a manifest may be written that names them, they are left alone."""
        job = self._job
        if job.keeping.book.is_writing:
            return []
        return [DropFeedback(each.url, job.settings.name, each.file) for each in unneeded]

    def holds(self, now_ms: int) -> bool:
        """Whether a checkpoint should wait until something has changed hands."""
        job = self._job
        return self._waits_to_hand_over or job.handovers.holds(now_ms, job.deployment.workers)

    # ---- within

    @property
    def _waits_to_hand_over(self) -> bool:
        """Whether there is something to be taken up, and nobody to do so yet: nobody trains either, and a checkpoint
        would lack it. But for one for which workers wait."""
        job = self._job
        return bool(job.handovers.due) and not job.deployment.workers and job.keeping.can_begin

    @property
    def _is_frozen(self) -> bool:
        """Whether a checkpoint is being taken: nothing that was left may change hands between its files."""
        return self._job.keeping.book.draft is not None

    def _fate_of(self, asked: HandoverRequested) -> Fate:
        job = self._job
        worker, keeping = asked.caller.incarnation, job.keeping
        if job.handovers.has_from(worker):
            return Fate.HANDED_OVER
        goes_back = keeping.recovery.needed and keeping.trails is None
        if asked.gone_back != job.handovers.generation or goes_back:
            return Fate.VOID
        if not self._goes_on_without(worker):
            return Fate.UNWANTED
        if self._is_frozen or left_name(worker) in job.handovers.due:
            return Fate.WAIT
        return Fate.WRITE

    def _goes_on_without(self, worker: Incarnation) -> bool:
        """Whether there is, or may come, a worker that takes further steps when this one has left."""
        job = self._job
        if job.state is not JobState.RUNNING or self._is_through or job.stopping.is_over(job.step):
            return False
        if any(each != worker and not job.handovers.is_leaving(each) for each in job.workers):
            return True
        return job.heard_from + len(job.workers) < job.settings.workers_expected

    @property
    def _is_through(self) -> bool:
        """Whether all data of a synchronous job is done, and nobody has taken steps without any since."""
        job = self._job
        feeds = job.feeds
        return isinstance(feeds, StepLedger) and feeds.finished and job.step <= feeds.end(len(feeds) - 1)
