"""The events of a job's life: workers and servers come and go, time passes, checkpoints and recoveries end.

Each function takes the job's state, and calls the flows in their order. Invariants: no work of a lost worker is given
away before WorkersFenced. The failure that ended a job is the answer to all its requests. Must not know: members that
are not the job's workers, how servers are called, the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from shardyard.domain import errors, limits
from shardyard.domain.ids import Generation, Incarnation, RunName
from shardyard_coordinator.core.effects import Effect, JobPhase, LogMessage
from shardyard_coordinator.core.events import CheckpointTaken, MemberLeft
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import (
    checkpointing,
    departure,
    deployment,
    job_end,
    last_step,
    lost_pushes,
    mode_switch,
    recovery,
    residuals,
)
from shardyard_coordinator.flows.fencing import fence, free
from shardyard_coordinator.machine import readers
from shardyard_coordinator.members.roster import LATE_MS
from shardyard_coordinator.placement.deployment import Stage
from shardyard_coordinator.placement.placement import Server, staying
from shardyard_coordinator.records import Body, Entry, require
from shardyard_coordinator.work.step_ledger import StepLedger

LEFT: Final = "left"
DRAINED: Final = "left in order"

# ---- workers


def join(job: JobState, worker: Incarnation, run: RunName | None, now_ms: int) -> list[Effect]:
    job.roster.enter(worker)
    given = [] if job.ranks is None else job.ranks.join(worker, now_ms)
    return job.records([*job.runs.join(run), job.roster.joined(worker), *(each.entry for each in given)])


def leave(job: JobState, left: MemberLeft, now_ms: int) -> list[Effect]:
    """A worker sends nothing more: it says goodbye, its script ended with an error, or it drains. The last goodbye
    ends the job, at once if the expected number of workers have said goodbye."""
    worker, error = left.incarnation, left.error
    residual = job.progress.of(worker).residual_norm
    if not error:
        residual = 0.0 if _has_no_more_steps(job) else left.residual_lost
    how, goodbye = how_it_left(left), not error and not left.drained
    record = _remove(job, worker, how, now_ms, goodbye=goodbye, residual=residual, pushed=left.pushed)
    effects = job.records([record])
    if job.phase.ended:
        return effects
    if error and not job.workers:
        failure = errors.WorkerFailed(
            f"its last worker, {worker}, left with an error: {error}", facts={"worker": str(worker)}
        )
        return [*effects, *job_end.fail(job, failure)]
    if goodbye and not job.workers and job.workers_done >= job.settings.workers_expected:
        return [*effects, *job_end.finish(job, now_ms)]
    freed = free(job, (worker,), now_ms, is_awaited=not left.drained)
    return [*effects, *_tell_residual(job, worker, residual), *freed, *fence(job, worker)]


def how_it_left(left: MemberLeft) -> str:
    if left.drained:
        return DRAINED
    return f"{LEFT} ({left.error})" if left.error else LEFT


def lose(job: JobState, worker: Incarnation, how: str, now_ms: int, *, died: bool = True) -> list[Effect]:
    """A worker died or was excluded. Its work waits until the servers refuse what it may still send."""
    last = job.progress.of(worker)
    record = _remove(job, worker, how, now_ms, died=died, residual=last.residual_norm, pushed=last.pushed)
    effects = job.records([record])
    if job.phase.ended:
        return effects
    residual = _tell_residual(job, worker, last.residual_norm)
    return [*effects, *residual, *(fence(job, worker) or free(job, (worker,), now_ms))]


def _has_no_more_steps(job: JobState) -> bool:
    """Whether the job is synchronous and takes no more steps. What compression has not sent by then belongs to no step,
    so it is not lost with a worker that leaves."""
    return job.ranks is not None and (job.feeds.finished or job.stopping.is_over(job.progress.step))


def _tell_residual(job: JobState, worker: Incarnation, norm: float) -> list[Effect]:
    if not norm:
        return []
    said = f"the residual of worker {worker} is lost, of 2-norm {norm:.3g} when it was last reported"
    return [LogMessage(f"{job.title}: {said}", warning=True)]


def _remove(
    job: JobState,
    worker: Incarnation,
    how: str,
    now_ms: int,
    *,
    goodbye: bool = False,
    died: bool = False,
    residual: float = 0.0,
    pushed: int = 0,
) -> Entry:
    """The worker departed. No other worker gets its work before `free`. `residual`: the 2-norm of what its compression
    had not sent. `pushed`: its acknowledged pushes without leased data."""
    job.lost_residuals.add(residual)
    if died:
        job.suspects.lose(worker, job.held(worker))
    job.suspects.leave(worker)
    if isinstance(job.feeds, StepLedger):
        job.feeds.verdicts.leave(worker)
    job.roster.leave(worker, how, now_ms, goodbye=goodbye)
    job.progress.forget(worker)
    job.not_finite.forget(worker)
    job.mode.forget(worker)
    lost_pushes.add_departed(job, worker, pushed, died=died)
    if not job.workers:
        # all work may have been done before this worker went, and then it may not be started again
        is_done = goodbye or (job.roster.goodbyes > 0 and job.feeds.finished)
        late_ms = 0 if job.workers_done >= job.settings.workers_expected else LATE_MS
        job.roster.close_at(now_ms + late_ms if is_done else None)
    if job.ranks is not None:
        job.ranks.suspend(worker)
    if job.replicas is not None:
        # beside rows of another step servers take no replica
        job.replicas.lose(worker, job.workers, is_done=goodbye and not job.has_tables)
    job.deployment.suspend(worker)
    return "worker_gone", {
        "worker": worker,
        "how": how,
        "goodbye": goodbye,
        "died": died,
        "residual": residual,
        "pushed": pushed,
    }


def restore_joined(job: JobState, body: Body) -> None:
    """Applies the record `worker_joined`. Raises DamagedRecord."""
    worker = Incarnation(body.number("worker", least=1))
    require(worker not in job.workers, f"worker {worker} joins twice")
    number = body.number("number", most=limits.MEMBERS_MAX)
    require(not job.roster.has(number), f"worker {worker} joins with the number of another")
    job.roster.enter_as(worker, number)
    if job.ranks is not None:
        job.ranks.enter(worker)


def restore_gone(job: JobState, body: Body, now_ms: int) -> None:
    """Applies the record `worker_gone`. Raises DamagedRecord."""
    worker = Incarnation(body.number("worker", least=1))
    require(worker in job.workers, f"worker {worker} goes and was not there")
    _remove(
        job,
        worker,
        body.text("how"),
        now_ms,
        goodbye=body.flag("goodbye"),
        died=body.flag("died"),
        residual=body.real("residual"),
        pushed=body.number("pushed", most=limits.SEQUENCE_MAX),
    )


# ---- servers


def lose_server(job: JobState, server: Server, how: str, now_ms: int) -> list[Effect]:
    """A server left or died, with any partitions that it had or was about to get."""
    lost = recovery.owned_by(job, server.incarnation)
    job.readers.lose_server(server)
    if job.phase.ended or not lost:
        return []
    if recovery.can_go_back(job):
        return recovery.lose(job, lost, server, how, now_ms)
    if recovery.can_begin_again(job) and job.phase is not JobPhase.FINISHING:
        job.phase = JobPhase.STARTING
        return recovery.lose_values(job, lost, server, how, now_ms)
    numbers = ", ".join(str(owner.partition) for owner in lost)
    failure = errors.ServerLost(
        f"server {server.incarnation} at {server.address} {how}; {job.title} had "
        f"{'partition' if len(lost) == 1 else 'partitions'} {numbers} there",
        facts={"server": str(server.incarnation), "address": server.address},
    )
    return job_end.fail(job, failure, gone=server.incarnation)


def end_recovery(job: JobState, generation: Generation, now_ms: int) -> list[Effect]:
    """All partitions of that map have servers again."""
    if job.phase.ended:
        return []
    attempt, is_same_run = job.recovery.attempt, job.origin is None
    whole = recovery.whole_of(job, generation)
    effects = recovery.end(job, generation, now_ms)
    mode_switch.note_map(job, restored=bool(effects))
    if effects and attempt is not None and job.departed is not None and is_same_run:
        job.departed.restored(attempt.partitions)
    if whole is not None:
        effects += residuals.go_back(job, whole, generation, is_same_run=is_same_run)
    return [*effects, *deployment.begin_running(job)]


def fail_recovery(job: JobState, generation: Generation, failure: errors.ShardyardError, now_ms: int) -> list[Effect]:
    if job.phase.ended:
        return []
    try:
        return recovery.fail(job, generation, failure, now_ms)
    except errors.ShardyardError as error:
        return job_end.fail(job, error)


def end_checkpoint(job: JobState, taken: CheckpointTaken, now_ms: int) -> list[Effect]:
    if job.phase.ended:
        return []
    sealed = job.book.sealed_by(taken.draft)
    effects = checkpointing.end(job, taken)
    if sealed:
        effects += departure.move(job, sealed, now_ms)
    return [*effects, *job_end.end_checkpoint(job)]


def fail_checkpoint(job: JobState, draft: int, failure: errors.ShardyardError, now_ms: int) -> list[Effect]:
    if job.phase.ended:
        return []
    effects = checkpointing.fail(job, draft, failure, now_ms)
    job_end.fail_checkpoint(job, draft, failure)
    return effects


def resume(job: JobState, servers: Iterable[Incarnation]) -> list[Effect]:
    """After a restart: tells the servers again what may not have reached them. `servers`: the living ones."""
    if job.phase.ended:
        living = frozenset(servers)
        return job_end.drop_on(job, [server for server in job.deployment.servers if server.incarnation in living])
    return fence(job, *job.roster.fencing) if job.roster.fencing else []


# ---- time


def tick(job: JobState, now_ms: int, servers: Sequence[Server], missing: str = "") -> list[Effect]:
    """`servers`: the living ones. `missing`: those for which partitions wait."""
    job.readers.expire(now_ms)
    if job.phase.ended:
        return readers.drop_if_read(job, now_ms)
    if job.phase is JobPhase.FINISHING:
        return job_end.tick(job, now_ms) or _tick_storage(job, now_ms, servers, missing)
    if job.roster.is_over(now_ms):
        return job_end.finish(job, now_ms)
    idle_ms = job.roster.idle_ms(now_ms)
    if not job.workers and job.stopping.stop is not None and idle_ms >= LATE_MS:
        return job_end.finish(job, now_ms)
    if not job.workers and idle_ms >= job.settings.idle_ms:
        failure = errors.WorkerFailed(
            f"{job.title} has had no worker for {job.settings.idle_ms / 1000:g} s; the last one, "
            f"{job.roster.last_lost}",
            why="a job without workers is ended after job.idle_ms",
            todo="start the script again for a new run",
        )
        return job_end.finish(job, now_ms, failure) if job.is_whole else job_end.fail(job, failure)
    given = [] if job.ranks is None else job.ranks.assign_vacant(now_ms)
    return [
        *job.records(each.entry for each in given),
        *last_step.read_steps(job),
        *mode_switch.tick(job, now_ms),
        *deployment.reopen(job, now_ms),
        *_tick_storage(job, now_ms, servers, missing),
    ]


def _is_unplaced(job: JobState) -> bool:
    """Whether partitions may wait for servers that are expected. Those of a server that leaves do not, while other
    partitions of the job have servers."""
    map_, recovery_ = job.deployment.map, job.recovery
    if map_ is None:
        return True
    return recovery_.attempt is None and (recovery_.goes_back or len(recovery_.lost) == len(map_.owners))


def _tick_storage(job: JobState, now_ms: int, servers: Sequence[Server], missing: str) -> list[Effect]:
    """Continues checkpoints and recovery. Partitions are first asked about departed workers."""
    leaving, holds = departure.due(job, servers), lost_pushes.is_due(job)
    job.missing = missing if _is_unplaced(job) else ""
    reading = lost_pushes.ask(job, now_ms)
    if job.missing:
        return reading
    if job.origin is not None and job.deployment.stage is Stage.EMPTY and staying(servers):
        return [*reading, *recovery.restore_origin(job, servers, now_ms)]
    begun_again = departure.give_up_first_values(job, servers, now_ms)
    if begun_again:
        job.phase = JobPhase.STARTING
        return [*reading, *begun_again]
    if job.recovery.needed:
        return [*reading, *recovery.begin(job, servers, now_ms)]
    if holds or (job.phase is not JobPhase.FINISHING and residuals.hold_checkpoints(job)):
        return reading
    return [*reading, *checkpointing.begin_if_due(job, now_ms, leaving)]
