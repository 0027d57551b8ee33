"""The ends of a job's effects: what the job does when servers or the storage have answered, or have not."""

from __future__ import annotations

from typing import Any

from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import Effect
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import deployment, fencing, last_step, lost_pushes, mode_switch
from shardyard_coordinator.machine import job as life


def handle(job: JobState, event: Any, now_ms: int) -> list[Effect]:
    """`event`: an event of this job that ends an effect."""
    match event:
        case events.PartitionsCreated(_, generation):
            return deployment.end_creation(job, generation, created=True)
        case events.PartitionsOpened(_, generation):
            return deployment.end_opening(job, generation, opened=True, now_ms=now_ms)
        case events.CheckpointTaken():
            return life.end_checkpoint(job, event, now_ms)
        case events.CheckpointFailed(_, draft, failure):
            return life.fail_checkpoint(job, draft, failure, now_ms)
        case events.PartitionsRestored(_, generation):
            return life.end_recovery(job, generation, now_ms)
        case events.RestoreFailed(_, generation, failure):
            return life.fail_recovery(job, generation, failure, now_ms)
        case events.WorkersFenced(_, workers, reached):
            return fencing.free(job, workers, now_ms, dict(reached))
        case events.DepartedRead(_, generation, found):
            return lost_pushes.declare_lost_of_departed(job, generation, dict(found), now_ms)
        case events.StepsRead(_, generation, step):
            return last_step.fix_step(job, generation, step)
        case events.ServersPaced(_, generation, number):
            return mode_switch.end_pacing(job, generation, number)
        case events.NotAnswered(_, effect):
            return _not_answered(job, effect, now_ms)
    raise AssertionError(event)


def _not_answered(job: JobState, effect: Effect, now_ms: int) -> list[Effect]:
    match effect:
        case effects.CreatePartitions(generation=generation):
            return deployment.end_creation(job, generation, created=False)
        case effects.OpenPartitions(generation=generation):
            return deployment.end_opening(job, generation, opened=False, now_ms=now_ms)
        case effects.ReadSteps():
            job.reads_steps = False
        case effects.ReadDeparted() if job.departed is not None:
            job.departed.fail(now_ms)
        case effects.PaceServers():
            job.mode.fail(now_ms)
    return []
