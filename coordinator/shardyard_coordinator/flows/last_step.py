"""Fixes the step before which all workers of a job stop or change the mode.

Workers report how far they are, and wait. Once all living workers have reported, the servers' ledgers are read, which
have the contributions of departed workers. The step is fixed after all of these. The decisions are in the job's
`stopping` and `pending_switch`. Invariant: the step is fixed while no fence is under way and all partitions have
servers, under the map whose ledgers were read. Must not know: what steps contain, how servers are called, the clock.
"""

from __future__ import annotations

from shardyard.domain.ids import Generation, Incarnation, Rank
from shardyard.domain.push_names import RankSource, SourceKey
from shardyard_coordinator.core.effects import Effect, LogMessage, ReadSteps, Reply, StopTaken
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import mode_switch
from shardyard_coordinator.members.progress import Report


def stop(job: JobState, worker: Incarnation | None, reason: str) -> list[Effect]:
    """A worker, or a person (None), asks the job to end before its data ends. Raises the failure of a failed job."""
    job.require_unfinished()
    begun = begin_stop(job, worker, f"{'a person' if worker is None else f'worker {worker}'} asked", reason)
    found = job.stopping.stop
    assert found is not None
    return [*begun, Reply(StopTaken(job.id, job.settings.name, found, first=bool(begun)))]


def begin_stop(job: JobState, worker: Incarnation | None, decided: str, reason: str) -> list[Effect]:
    """The job is to end before its data ends. `decided`: who or what has done so, in words. Empty if it ends so
    already."""
    asked = job.stopping.ask(reason, worker)
    if mode_switch.may_cancel(job):
        asked += job.pending_switch.cancel()  # the job ends in its present mode
    message = [LogMessage(f"{job.title} stops, as {decided}{f': {reason}' if reason else ''}")] if asked else []
    return [*job.records(asked), *message]


def on_reached(job: JobState, worker: Incarnation, report: Report) -> list[Effect]:
    """A worker that was told of a stop or a switch reports with its heartbeat how far it is."""
    effects: list[Effect] = []
    if job.phase.ended:
        return effects
    if report.stop_reached is not None:
        job.stopping.on_reached(worker, report.stop_reached)
        effects += read_steps(job)
    if report.switch_reached is not None:
        effects += mode_switch.on_reached(job, worker, *report.switch_reached) or read_steps(job)
    return effects


def read_steps(job: JobState) -> list[Effect]:
    """Reads how far each partition is, if all living workers wait."""
    if job.reads_steps or not _may_fix_step(job):
        return []
    assert job.deployment.map is not None
    job.reads_steps = True
    sources = tuple(SourceKey(RankSource(Rank(rank))) for rank in range(job.settings.logical_rank_count))
    return [ReadSteps(job.id, job.deployment.map, sources, versions=job.pending_switch.to_steps)]


def fix_step(job: JobState, generation: Generation, step: int) -> list[Effect]:
    """The partitions were read. `step`: the first to which no partition has any contribution; if the job changes to
    steps, the highest version of any partition."""
    job.reads_steps = False
    if job.phase.ended or not _may_fix_step(job) or generation != job.deployment.generation:
        return []
    if job.pending_switch.is_due(job.workers):
        return mode_switch.fix_step(job, step)
    fixed = job.stopping.fix_step(step)
    assert job.stopping.stop is not None
    return [*job.records(fixed), LogMessage(f"{job.title} stops before step {job.stopping.stop.step:,}")]


def _may_fix_step(job: JobState) -> bool:
    switches = job.pending_switch.is_due(job.workers) and mode_switch.may_fix_step(job)
    return (switches or job.stopping.is_due(job.workers)) and not job.roster.fencing and job.is_whole
