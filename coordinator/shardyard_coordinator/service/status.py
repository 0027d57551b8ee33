"""The state of a yard as people see it, read off a machine.

Owns: nothing. Invariant: reading changes nothing. Must not know: messages, how they are shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shardyard.domain.consistency import Consistency, Stop, UpdateMode
from shardyard.domain.errors import NotFound, ShardyardError
from shardyard.domain.ids import Incarnation, JobId, MemberRole, Rank, Term
from shardyard.domain.layout.layouts import PartitionMap
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.domain.variables import VariableKind
from shardyard_coordinator.core.effects import JobState
from shardyard_coordinator.machine.job import Job
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.members.evaluations import Best, Evaluation
from shardyard_coordinator.members.membership import Member
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.storage.checkpoint_book import Committed
from shardyard_coordinator.storage.recovery import Restored
from shardyard_coordinator.work.feeds import FeedCounts, FeedSpec, QuarantinedBatch

FEEDS_SHOWN_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class MemberStatus:
    incarnation: Incarnation
    role: MemberRole
    address: str
    host: str
    pid: int
    release: str
    last_seen_ms_ago: int
    job: JobId | None
    report: Report
    waiting_for: str
    ranks: tuple[Rank, ...]
    not_finite: int
    dropped: int


@dataclass(frozen=True, slots=True)
class SwitchStatus:
    """What a job was switched to last. `servers`: all of them go by it; `behind`: workers that do not yet; `step`: of
    one that goes over to updates of another kind, the step before which it does, 0: workers say how far they have come;
    `draining`: what is to be done before it goes over to steps."""

    consistency: Consistency
    servers: bool
    behind: tuple[Incarnation, ...]
    step: int | None = None
    draining: str = ""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """`parameters`: elements that the optimizer changes; `waits`: what it waits for, see Waits; `checkpoint`: the
    newest; `restored`: what the latest recovery brought back; `recovering`: whether one is needed; `staleness`:
    its bound, if it has one; `not_finite`: gradients that were not, and do not count; `local_steps`: of a round, where
    steps are local; `rows_at_once`: in hybrid mode; `evaluation`, `best`: what
    evaluators have reported last, and kept; `switch`: of a job that was switched."""

    job: JobId
    name: str
    state: JobState
    failure: ShardyardError | None
    mode: UpdateMode
    logical_ranks: int
    workers: int
    step: int
    samples: int
    samples_per_s: float
    metrics: tuple[tuple[str, float], ...]
    map: PartitionMap | None
    feeds: tuple[FeedCounts, ...]
    parameters: int
    payload_bytes: int
    lost_pushes: int
    residuals_lost: int
    residual_lost_norm: float
    waits: tuple[str, ...]
    checkpoint: Committed | None
    restored: Restored | None
    recovering: bool
    staleness: int | None
    local_steps: int | None
    rows_at_once: bool
    stop: Stop | None
    not_finite: int
    workers_quarantined: int
    evaluation: Evaluation | None
    best: Best | None
    readers: int
    dropped: int
    switch: SwitchStatus | None
    tables: tuple[tuple[TableSettings, int], ...] = ()
    """Each with the rows that servers have said last that they have."""


@dataclass(frozen=True, slots=True)
class YardStatus:
    term: Term
    uptime_ms: int
    members: tuple[MemberStatus, ...]
    jobs: tuple[JobStatus, ...]


@dataclass(frozen=True, slots=True)
class QuarantineStatus:
    """The batches of a job that do not count, and what the order of their feeds' samples is made from."""

    seed: int
    batches: tuple[QuarantinedBatch, ...]
    feeds: tuple[tuple[int, FeedSpec], ...]


def list_quarantined(machine: Machine, number: JobId) -> QuarantineStatus:
    """Raises NotFound."""
    job = next((job for job in machine.jobs if job.id == number), None)
    if job is None:
        raise NotFound(f"job {number} is unknown to this coordinator", todo="see `shardyard status` for its jobs")
    batches = tuple(job.feeds.quarantined())
    feeds = sorted({each.feed for each in batches})
    return QuarantineStatus(job.settings.seed, batches, tuple((feed, job.feeds.spec(feed)) for feed in feeds))


def describe(machine: Machine, now_ms: int) -> YardStatus:
    jobs = {job.id: job for job in machine.jobs}
    return YardStatus(
        term=machine.term,
        uptime_ms=machine.uptime_ms(now_ms),
        members=tuple(
            _member(member, jobs.get(member.job) if member.job is not None else None, now_ms)
            for member in machine.members
        ),
        jobs=tuple(_job(job, machine.waits.of(job.id, now_ms), now_ms) for job in jobs.values()),
    )


def _member(member: Member, job: Job | None, now_ms: int) -> MemberStatus:
    registration = member.registration
    return MemberStatus(
        incarnation=member.incarnation,
        role=member.role,
        address=member.address,
        host=registration.host,
        pid=registration.pid,
        release=registration.release,
        last_seen_ms_ago=max(0, now_ms - member.last_seen_ms),
        job=member.job,
        report=Report() if job is None else job.progress.of(member.incarnation),
        waiting_for=member.waiting_for,
        ranks=() if job is None else tuple(lease.rank for lease in job.ranks_of(member.incarnation)),
        not_finite=0 if job is None else job.not_finite.of(member.incarnation),
        dropped=0 if job is None else job.counting.dropped_by(member.incarnation),
    )


def _job(job: Job, waits: tuple[str, ...], now_ms: int) -> JobStatus:
    layout = job.deployment.layout
    variables = () if layout is None else layout.variables
    return JobStatus(
        job=job.id,
        name=job.settings.name,
        state=job.state,
        failure=job.failure,
        mode=job.settings.consistency.mode.updates,
        logical_ranks=0 if job.ranks is None else len(job.ranks.all),
        workers=len(job.workers),
        step=job.progress.step,
        samples=job.samples,
        samples_per_s=0.0 if job.state.ended else job.progress.samples_per_s(now_ms),
        metrics=job.progress.metrics,
        map=job.deployment.map,
        feeds=job.feed_counts(FEEDS_SHOWN_MAX),
        parameters=sum(spec.elements for spec in variables if spec.kind is VariableKind.PARAMETER),
        payload_bytes=0 if layout is None else sum(part.payload_bytes for part in layout.partitions),
        lost_pushes=job.lost.count,
        residuals_lost=job.residuals.count,
        residual_lost_norm=job.residuals.norm,
        waits=waits,
        checkpoint=job.keeping.book.committed,
        restored=job.keeping.restored,
        recovering=job.keeping.recovery.needed,
        staleness=job.settings.consistency.bound,
        local_steps=job.settings.consistency.local_steps,
        rows_at_once=job.settings.consistency.rows_at_once,
        stop=job.stopping.stop,
        not_finite=job.not_finite.count,
        workers_quarantined=job.not_finite.quarantined,
        evaluation=job.evaluations.latest,
        best=job.evaluations.best,
        readers=len(job.readers),
        dropped=job.counting.dropped,
        tables=() if layout is None else tuple(zip(layout.tables, job.rows, strict=True)),
        switch=_switch(job),
    )


def _switch(job: Job) -> SwitchStatus | None:
    switching, halting = job.switching, job.halting
    if halting.wanted is not None and not job.state.ended:
        behind, step = halting.missing(job.workers), halting.step or 0
        return SwitchStatus(halting.wanted, False, behind, step, job.going_over.draining)
    if not switching.latest.number:
        return None
    behind = () if job.state.ended else switching.behind(job.workers)
    return SwitchStatus(switching.latest, not switching.is_under_way, behind)
