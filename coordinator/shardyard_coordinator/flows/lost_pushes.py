"""Which pushes without leased data are lost after partitions have gone back to a checkpoint (rule A11).

The job's `lost_pushes` counts what is lost; its `departed` has the departed workers. Invariants: a lost range is
recorded before it is skipped. What was read under an earlier map is not used. Partitions are asked about departed
workers before another checkpoint is begun. Must not know: leased work, how servers are called, the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardyard.domain import errors
from shardyard.domain.ids import Generation, Incarnation
from shardyard_coordinator.core.effects import (
    Effect,
    JobPhase,
    LogMessage,
    ReadDeparted,
    ReadWatermarks,
    Rebased,
    Reply,
    SkipLostPushes,
)
from shardyard_coordinator.core.events import RebaseRequested, WatermarksRead
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.work import losses
from shardyard_coordinator.work.losses import LostRange, Nexts


def rebase(job: JobState, asked: RebaseRequested) -> list[Effect]:
    """Reads what each partition has from a worker's own source."""
    if job.ranks is not None:
        raise errors.InvalidRequest(f"{job.title} is synchronous: its workers have no sources of their own")
    if job.phase is not JobPhase.RUNNING or job.recovery.needed:
        raise errors.NotReady(f"{job.title} has partitions that are not there yet")
    assert job.deployment.map is not None
    return [ReadWatermarks(job.id, job.deployment.map, asked.caller.incarnation)]


def declare_lost(job: JobState, read: WatermarksRead) -> list[Effect]:
    """Declares lost what partitions lack before the sequence at which the worker continues. The loss is recorded first
    and skipped then, so it never goes unreported (rule A11)."""
    worker, next_sequence = read.asked.caller.incarnation, read.asked.next
    if job.recovery.needed or read.generation != job.deployment.generation:
        raise errors.NotReady(f"{job.title} has restored partitions while they were asked")
    lost = tuple(LostRange(partition, found, next_sequence - 1) for partition, found in read.nexts)
    lost = tuple(each for each in lost if each.first <= each.last)
    if not lost:
        return [Reply(Rebased(()))]
    job.lost_pushes.add(worker, lost)
    assert job.deployment.map is not None
    return [
        *job.records([losses.pushes_lost(worker, lost)]),
        LogMessage(f"{job.title}: pushes of worker {worker} are lost: {losses.described(lost)}", warning=True),
        SkipLostPushes(job.id, job.deployment.map, worker, next_sequence, lost),
    ]


# ---- departed workers


def add_departed(job: JobState, worker: Incarnation, pushed: int, *, died: bool) -> None:
    """The worker departed. `pushed`: its acknowledged pushes without leased data, as far as it has reported them."""
    if job.departed is None or (not pushed and not died):
        job.lost_pushes.forget(worker)
        return
    for given_up in job.departed.add(worker, pushed):
        job.lost_pushes.forget(given_up)


def is_due(job: JobState) -> bool:
    """Whether partitions must be asked what they have from departed workers."""
    return job.departed is not None and job.departed.is_due and job.is_whole


def ask(job: JobState, now_ms: int) -> list[Effect]:
    if not is_due(job) or job.departed is None or job.deployment.map is None:
        return []
    workers = job.departed.ask(now_ms)
    return [ReadDeparted(job.id, job.deployment.map, workers)] if workers else []


def declare_lost_of_departed(
    job: JobState, generation: Generation, found: Mapping[Incarnation, Nexts], now_ms: int
) -> list[Effect]:
    """Declares lost what restored partitions lack from departed workers. No worker skips it, because these push no
    more."""
    if job.phase.ended or job.departed is None:
        return []
    if not job.is_whole or generation != job.deployment.generation:
        job.departed.fail(now_ms)
        return []
    effects: list[Effect] = []
    for worker, lost in job.departed.answer(found).items():
        before = job.lost_pushes.count
        job.lost_pushes.add(worker, lost)
        effects += job.records([losses.pushes_lost(worker, lost)])
        if job.lost_pushes.count > before:
            said = f"pushes of worker {worker}, which is gone, are lost: {losses.described(lost)}"
            effects.append(LogMessage(f"{job.title}: {said}", warning=True))
    return effects


def forget_departed(job: JobState, gone: Iterable[Incarnation]) -> None:
    """A checkpoint has everything that came from these workers."""
    if job.departed is not None:
        for worker in job.departed.forget(gone):
            job.lost_pushes.forget(worker)
