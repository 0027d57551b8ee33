"""Frees the work of a departed worker: servers refuse the worker first, then others may have its work.

Invariant: no work of a lost worker is given away before WorkersFenced. Must not know: who gets the work, why the worker
is gone, the clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from shardyard.domain import limits
from shardyard.domain.ids import Incarnation
from shardyard.domain.push_names import DataShardSource, LeasedSource
from shardyard_coordinator.core.effects import Effect, FenceOnServers, LogMessage
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.placement.deployment import Stage
from shardyard_coordinator.records import Body, require
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.quarantine import source_body, source_of


def fence(job: JobState, *workers: Incarnation) -> list[Effect]:
    """Tells the job's servers, if it has any, to refuse the workers."""
    servers = job.deployment.servers
    held = tuple(source for worker in workers for source in job.held(worker))
    map_ = job.deployment.map if job.deployment.stage is Stage.OPEN else None
    return [FenceOnServers(job.id, servers, workers, held, map_)] if servers else []


def free(
    job: JobState,
    workers: Sequence[Incarnation],
    now_ms: int,
    reached: Mapping[LeasedSource, int] = MappingProxyType({}),
    *,
    is_awaited: bool = True,
) -> list[Effect]:
    """The workers are fenced, so others may have their work. Skips workers whose work is free already. `reached`: the
    next sequence of that work, as far as it is known. `is_awaited`: logical ranks first wait for a worker to join
    (job.rank_grace_ms), since one that died is started again."""
    if job.phase.ended:
        return []
    effects: list[Effect] = []
    for worker in workers:
        if worker not in job.roster.fencing:
            continue
        held = [
            {**source_body(source), "first": job.first_of(source), "next": reached.get(source)}
            for source in job.held(worker)
        ]
        freed = _release(job, worker, reached)
        effects += job.records([("worker_freed", {"worker": worker, "held": held})])
        effects += [LogMessage(f"{job.title}: {source} of worker {worker} is free again") for source in freed]
        effects += job.records(job.deployment.remove(worker))
        if job.ranks is not None:
            given = job.ranks.release(worker, now_ms, is_awaited=is_awaited)
            effects += job.records(each.entry for each in given)
    return effects


def restore_freed(job: JobState, body: Body, now_ms: int) -> None:
    """Applies the record `worker_freed`. Raises DamagedRecord."""
    worker = Incarnation(body.number("worker", least=1))
    require(worker in job.roster.fencing, f"worker {worker} is free of its work twice")
    _release(job, worker, dict(_reached(body)))
    job.deployment.forget(worker)
    if job.ranks is not None:
        job.ranks.vacate(worker, now_ms)


def _release(job: JobState, worker: Incarnation, reached: Mapping[LeasedSource, int]) -> list[DataShardSource]:
    """Releases the worker's data. Returns what it held."""
    job.roster.refuse(worker)
    return job.feeds.release(worker, reached) if isinstance(job.feeds, DataLedger) else []


def _reached(body: Body) -> Iterator[tuple[LeasedSource, int]]:
    """The next sequence of each lease, as far as it was known. Raises DamagedRecord."""
    for each in body.items("held"):
        require(isinstance(each, dict), "held: a lease that is no object")
        assert isinstance(each, dict)
        lease = Body(each)
        if not lease.is_null("next"):
            yield source_of(lease), lease.number("next", most=limits.SEQUENCE_MAX)
