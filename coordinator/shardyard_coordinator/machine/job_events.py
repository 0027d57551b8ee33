"""Maps each event of a job to its function: one row for each request of a worker, and for each end of an effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import Effect
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import (
    deployment,
    fencing,
    last_step,
    leasing,
    lost_pushes,
    mode_switch,
    residuals,
    work_verdicts,
)
from shardyard_coordinator.machine import job as life

Handle = Callable[[JobState, Any, int], list[Effect]]
"""Takes the job, the event and the time."""
E = TypeVar("E")


def _on(event: type[E], handle: Callable[[JobState, E, int], list[Effect]]) -> tuple[type, Handle]:
    return event, handle


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


REQUESTS: Final[Mapping[type, Handle]] = dict(
    [
        _on(
            events.VariablesCommitted,
            lambda job, event, _: deployment.commit_variables(job, event.caller.incarnation, event.generation),
        ),
        _on(events.FeedOpened, lambda job, event, _: leasing.open_feed(job, event.feed, event.spec)),
        _on(events.LeaseRequested, lambda job, event, _: leasing.lease(job, event.caller.incarnation, event.feed)),
        _on(events.LeaseReturned, lambda job, event, _: leasing.return_lease(job, event)),
        _on(events.BatchBegun, lambda job, event, _: work_verdicts.begin_batch(job, event)),
        _on(
            events.StepReported,
            lambda job, event, now_ms: work_verdicts.decide_step(job, event.step, event.ranks, now_ms),
        ),
        _on(events.MakeupRequested, lambda job, event, _: work_verdicts.read_make_up(job, event.feed, event.step)),
        _on(events.RebaseRequested, lambda job, event, _: lost_pushes.rebase(job, event)),
        _on(events.FeedbackRead, lambda job, event, _: residuals.take(job, event)),
    ]
)
"""Requests of a living worker about its unfinished job. `event.caller` is the worker."""

ENDS: Final[Mapping[type, Handle]] = dict(
    [
        _on(
            events.PartitionsCreated,
            lambda job, event, _: deployment.end_creation(job, event.generation, created=True),
        ),
        _on(
            events.PartitionsOpened,
            lambda job, event, now_ms: deployment.end_opening(job, event.generation, opened=True, now_ms=now_ms),
        ),
        _on(events.NotAnswered, lambda job, event, now_ms: _not_answered(job, event.effect, now_ms)),
        _on(events.CheckpointTaken, lambda job, event, _: life.end_checkpoint(job, event)),
        _on(
            events.CheckpointFailed,
            lambda job, event, now_ms: life.fail_checkpoint(job, event.draft, event.failure, now_ms),
        ),
        _on(events.PartitionsRestored, lambda job, event, now_ms: life.end_recovery(job, event.generation, now_ms)),
        _on(
            events.RestoreFailed,
            lambda job, event, now_ms: life.fail_recovery(job, event.generation, event.failure, now_ms),
        ),
        _on(
            events.DepartedRead,
            lambda job, event, now_ms: lost_pushes.declare_lost_of_departed(
                job, event.generation, dict(event.found), now_ms
            ),
        ),
        _on(events.StepsRead, lambda job, event, _: last_step.fix_step(job, event.generation, event.step)),
        _on(events.ServersPaced, lambda job, event, _: mode_switch.end_pacing(job, event.generation, event.number)),
        _on(
            events.WorkersFenced,
            lambda job, event, now_ms: fencing.free(job, event.workers, now_ms, dict(event.reached)),
        ),
    ]
)
"""Ends of a job's effects. `event.job` is the job; nothing happens if it was forgotten."""
