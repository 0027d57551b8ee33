"""Work without leased data, after partitions have gone back: what they lack of it is found, and told (rule A11).

Owns: nothing but the order of things; what is lost stands in the job's `lost`, who is gone in its `departed`.
Invariants: what is lost is written down before it is passed over; what was read under an earlier map says nothing; of
workers that are gone the partitions are asked before another checkpoint is begun. Must not know: leased work, servers'
calls, the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from shardyard.domain import errors
from shardyard.domain.ids import Generation, Incarnation
from shardyard_coordinator.core.effects import (
    Effect,
    JobState,
    LogMessage,
    ReadDeparted,
    ReadWatermarks,
    Rebased,
    Reply,
    SkipLostPushes,
)
from shardyard_coordinator.core.events import RebaseRequested, WatermarksRead
from shardyard_coordinator.work import losses
from shardyard_coordinator.work.departed import Nexts
from shardyard_coordinator.work.losses import LostRange

if TYPE_CHECKING:
    from shardyard_coordinator.machine.job import Job


class LostPushFlow:
    """Of one job, which it is asked of anew each time."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def rebase(self, asked: RebaseRequested) -> list[Effect]:
        """Reads what each partition has of a worker's own source."""
        job = self._job
        if job.ranks is not None:
            raise errors.InvalidRequest(f"{job.title} is synchronous: its workers have no sources of their own")
        if job.state is not JobState.RUNNING or job.keeping.recovery.needed:
            raise errors.NotReady(f"{job.title} has partitions that are not there yet")
        assert job.deployment.map is not None
        return [ReadWatermarks(job.id, job.deployment.map, asked.caller.incarnation)]

    def declare_lost(self, read: WatermarksRead) -> list[Effect]:
        """What partitions lack before the sequence that the worker goes on with is lost: written down first, then
        passed over, so that it is never passed over in silence (rule A11)."""
        job = self._job
        worker, next_sequence = read.asked.caller.incarnation, read.asked.next
        if job.keeping.recovery.needed or read.generation != job.deployment.generation:
            raise errors.NotReady(f"{job.title} has restored partitions while they were asked")
        lost = tuple(LostRange(partition, found, next_sequence - 1) for partition, found in read.nexts)
        lost = tuple(each for each in lost if each.first <= each.last)
        if not lost:
            return [Reply(Rebased(()))]
        job.lost.add(worker, lost)
        assert job.deployment.map is not None
        return [
            *job.records([losses.pushes_lost(worker, lost)]),
            LogMessage(f"{job.title}: pushes of worker {worker} are lost: {losses.described(lost)}", warning=True),
            SkipLostPushes(job.id, job.deployment.map, worker, next_sequence, lost),
        ]

    # ---- of workers that are gone

    def leave(self, worker: Incarnation, pushed: int, *, died: bool) -> None:
        """The worker is gone. `pushed`: its acknowledged pushes without leased data, as far as it has said."""
        job = self._job
        if job.departed is None or (not pushed and not died):
            job.lost.forget(worker)
            return
        for given_up in job.departed.add(worker, pushed):
            job.lost.forget(given_up)

    @property
    def is_due(self) -> bool:
        """Whether partitions are to be asked what they have of workers that are gone."""
        job = self._job
        return job.departed is not None and job.departed.is_due and job.is_whole

    def ask(self, now_ms: int) -> list[Effect]:
        """Asks them, if it is time."""
        job = self._job
        if not self.is_due or job.departed is None or job.deployment.map is None:
            return []
        workers = job.departed.ask(now_ms)
        return [ReadDeparted(job.id, job.deployment.map, workers)] if workers else []

    def declare_lost_of_departed(
        self, generation: Generation, found: Mapping[Incarnation, Nexts], now_ms: int
    ) -> list[Effect]:
        """What partitions that were restored lack of workers that are gone: there is nobody to pass it over for."""
        job = self._job
        if job.state.ended or job.departed is None:
            return []
        if not job.is_whole or generation != job.deployment.generation:
            return self.fail_departed(now_ms)
        effects: list[Effect] = []
        for worker, lost in job.departed.answer(found).items():
            before = job.lost.count
            job.lost.add(worker, lost)
            effects += job.records([losses.pushes_lost(worker, lost)])
            if job.lost.count > before:
                said = f"pushes of worker {worker}, which is gone, are lost: {losses.described(lost)}"
                effects.append(LogMessage(f"{job.title}: {said}", warning=True))
        return effects

    def fail_departed(self, now_ms: int) -> list[Effect]:
        """They could not be asked, or have changed meanwhile: asked again."""
        job = self._job
        if job.departed is not None:
            job.departed.fail(now_ms)
        return []

    def settle(self, gone: Iterable[Incarnation]) -> None:
        """A checkpoint has all that came of these workers."""
        job = self._job
        if job.departed is not None:
            for worker in job.departed.settle(gone):
                job.lost.forget(worker)
