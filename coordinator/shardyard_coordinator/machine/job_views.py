"""The state of a job for workers and people. Nothing here changes the job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardyard.domain.ids import Incarnation
from shardyard.domain.push_names import RankLease, RankSource
from shardyard_coordinator.core.effects import Draining, HeartbeatReply, Joined
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import residuals
from shardyard_coordinator.flows.work_verdicts import announce_until
from shardyard_coordinator.placement.deployment import Stage
from shardyard_coordinator.work.feeds import FeedCounts
from shardyard_coordinator.work.step_ledger import StepLedger


def heartbeat_reply(job: JobState, worker: Incarnation, drain: Draining | None = None) -> HeartbeatReply:
    """`drain`: whether the worker leaves in order."""
    return HeartbeatReply(
        job_state=job.phase,
        failure=job.failure,
        generation=job.deployment.generation,
        ranks=ranks_of(job, worker),
        chief=job.roster.chief == worker,
        workers=len(job.workers),
        world_size=_world_size(job),
        initializer=job.deployment.initializer == worker and job.deployment.stage is Stage.CREATED,
        recovering=job.recovery.needed,
        feedback=residuals.for_worker(job, worker),
        restored_generation=job.checkpoint_residuals.generation,
        stop=job.stopping.stop,
        checkpoint=job.book.committed,
        consistency=job.consistency,
        switch_point=job.pending_switch.switch_point,
        drain=drain,
        **_of_replicas(job),
    )


def _of_replicas(job: JobState) -> dict[str, Any]:
    book = job.replicas
    if book is None:
        return {}
    generation, lacks = book.group.generation, book.lacks_a_member(job.workers)
    return {
        "replica_generation": generation + (lacks or book.has_room(job.workers)),
        "lost_replica_generation": generation if lacks else 0,
        "publish": book.is_to_publish,
    }


def joined(job: JobState, worker: Incarnation, *, started: bool) -> Joined:
    return Joined(
        job=job.id,
        settings=job.settings,
        started=started,
        ranks=ranks_of(job, worker),
        logical_ranks=0 if job.ranks is None else len(job.ranks.all),
        chief=job.roster.chief == worker,
        number=job.roster.numbers[worker],
        world_size=_world_size(job),
        stop=job.stopping.stop,
        checkpoint=job.book.committed,
        consistency=job.consistency,
        switch_point=job.pending_switch.switch_point,
    )


def _world_size(job: JobState) -> int:
    return max(job.settings.workers_expected, job.roster.numbers_end)


def ranks_of(job: JobState, worker: Incarnation) -> tuple[RankLease, ...]:
    leases = () if job.ranks is None else job.ranks.of(worker)
    return tuple(replace(lease, announce_until=announce_until(job, RankSource(lease.rank))) for lease in leases)


def samples(job: JobState) -> int:
    """All samples pushed. Workers report theirs with heartbeats. The ledgers have those of workers that died."""
    step = job.progress.step
    counted = job.feeds.samples_done(step=step) if isinstance(job.feeds, StepLedger) else job.feeds.samples_done()
    return max(job.progress.samples, counted)


def feed_counts(job: JobState, last: int) -> tuple[FeedCounts, ...]:
    """The counts of the `last` feeds opened."""
    if isinstance(job.feeds, StepLedger):
        return job.feeds.counts(last, step=job.progress.step)
    return job.feeds.counts(last)


def table_rows(job: JobState) -> tuple[int, ...]:
    """How many rows each table has, from the latest reports of the servers with its partitions."""
    layout = job.deployment.layout
    owners = job.deployment.owners
    said = [rows for server, rows in sorted(job.rows_seen.items()) if server in owners]
    return tuple([sum([rows[at] for rows in said]) for at in range(0 if layout is None else len(layout.tables))])
