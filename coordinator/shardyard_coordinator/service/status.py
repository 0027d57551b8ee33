"""The state of the machine as messages for people. Reading changes nothing. Must not know: how it is shown."""

from __future__ import annotations

import dataclasses
from typing import Final

from shardyard.domain.errors import NotFound
from shardyard.domain.ids import JobId
from shardyard.domain.variables import VariableKind
from shardyard.transport.error_codes import to_detail
from shardyard.wire import common_messages, layout_messages, lease_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core.effects import Draining
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import mode_switch, work_verdicts
from shardyard_coordinator.machine import job_views
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.members.evaluations import Best, Evaluation
from shardyard_coordinator.members.membership import Member
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.service.rpcs import parts
from shardyard_coordinator.storage.recovery import Restored

FEEDS_SHOWN_MAX: Final = 16
_UINT64_MAX: Final = (1 << 64) - 1


def describe(machine: Machine, now_ms: int) -> wire.StatusReply:
    """Members and jobs; the caller adds the rest. Sums over workers stop at the largest number of the message's
    field."""
    jobs = {job.id: job for job in machine.jobs}
    return wire.StatusReply(
        term=machine.term,
        members=[
            _member(
                member,
                jobs.get(member.job) if member.job is not None else None,
                machine.draining(member, now_ms),
                now_ms,
            )
            for member in machine.members
        ],
        jobs=[_job(job, machine.waits.of(job.id, now_ms), now_ms) for job in jobs.values()],
    )


def list_quarantined(machine: Machine, number: JobId) -> wire.ListQuarantinedReply:
    """The batches of a job that do not count, and what the order of their feeds' samples is made from. Raises
    NotFound."""
    job = next((job for job in machine.jobs if job.id == number), None)
    if job is None:
        raise NotFound(f"job {number} is unknown to this coordinator", todo="see `shardyard status` for its jobs")
    reply = wire.ListQuarantinedReply(seed=job.settings.seed)
    for each in job.feeds.quarantined():
        reply.batches.add(
            feed=each.feed,
            epoch=each.epoch,
            source=common_messages.source_to_wire(each.condemned.source),
            sequence=each.condemned.sequence,
            begin=each.begin,
            end=each.end,
            deaths=each.condemned.deaths,
            parameter=each.condemned.parameter,
            worker=each.condemned.worker,
        )
    for feed in sorted({batch.feed for batch in reply.batches}):
        spec = job.feeds.feed(feed).spec
        reply.feeds.add(feed=feed, samples=spec.samples, shuffle=spec.shuffle)
    return reply


def _member(member: Member, job: JobState | None, drain: Draining | None, now_ms: int) -> wire.MemberStatus:
    registration = member.registration
    report = Report() if job is None else job.progress.of(member.incarnation)
    return wire.MemberStatus(
        incarnation=member.incarnation,
        role=common_messages.ROLES.to_wire(member.role),
        address=member.address,
        host=registration.host,
        pid=registration.pid,
        release=registration.release,
        last_seen_ms_ago=max(0, now_ms - member.last_seen_ms),
        job=member.job or 0,
        step=report.step,
        samples=report.samples,
        waiting_for=member.waiting_for,
        ranks=() if job is None else tuple(lease.rank for lease in job_views.ranks_of(job, member.incarnation)),
        not_finite=0 if job is None else job.not_finite.of(member.incarnation),
        dropped=0 if job is None else min(work_verdicts.dropped_by(job, member.incarnation), _UINT64_MAX),
        drain=parts.drain(drain),
        sums=report.sums,
    )


def _job(job: JobState, waits: tuple[str, ...], now_ms: int) -> wire.JobStatus:
    layout, map_ = job.deployment.layout, job.deployment.map
    variables = () if layout is None else layout.variables
    consistency = job.settings.consistency
    return wire.JobStatus(
        job=job.id,
        name=job.settings.name,
        state=parts.STATES[job.phase],
        failure=None if job.failure is None else to_detail(job.failure),
        mode=common_messages.UPDATE_MODES.to_wire(consistency.mode.updates),
        logical_ranks=0 if job.ranks is None else len(job.ranks.all),
        staleness=consistency.bound,
        local_steps=consistency.local_steps,
        rows_at_once=consistency.rows_at_once,
        workers=len(job.workers),
        step=job.progress.step,
        samples=min(job_views.samples(job), _UINT64_MAX),
        samples_per_s=None if job.phase.ended else job.progress.samples_per_s(now_ms),
        metrics=parts.metrics(job.progress.metrics),
        map=None if map_ is None else layout_messages.map_to_wire(map_),
        feeds=[
            wire.FeedStatus(
                feed=feed.feed,
                samples=feed.samples,
                epochs=feed.epochs,
                free=min(feed.free, parts.UINT32_MAX),
                leased=feed.leased,
                done=min(feed.done, parts.UINT32_MAX),
                finished=feed.finished,
                quarantined=feed.quarantined,
            )
            for feed in job_views.feed_counts(job, FEEDS_SHOWN_MAX)
        ],
        parameters=sum(spec.elements for spec in variables if spec.kind is VariableKind.PARAMETER),
        payload_bytes=0 if layout is None else sum(part.payload_bytes for part in layout.partitions),
        residuals_lost=job.lost_residuals.count,
        residual_lost_norm=job.lost_residuals.norm,
        lost_pushes=min(job.lost_pushes.count, _UINT64_MAX),
        waits=waits,
        checkpoint=parts.checkpoint(job.book.committed),
        restored=_restored(job.restored),
        recovering=job.recovery.needed,
        not_finite=job.not_finite.count,
        workers_quarantined=job.not_finite.quarantined,
        stop=parts.stop(job.stopping.stop),
        consistency=_switch(job),
        evaluation=_evaluation(job.evaluations.latest),
        best=_best(job.evaluations.best),
        readers=len(job.readers),
        runs=job.runs.ids,
        dropped=min(work_verdicts.dropped(job), _UINT64_MAX),
        tables=[
            wire.TableStatus(name=table.name, dim=table.dim, optimizer=table.optimizer, rows=min(rows, _UINT64_MAX))
            for table, rows in (() if layout is None else zip(layout.tables, job_views.table_rows(job), strict=True))
        ],
    )


def _switch(job: JobState) -> wire.SwitchStatus | None:
    """The job's last switch; None if there was none."""
    mode, pending = job.mode, job.pending_switch
    if pending.wanted is not None and not job.phase.ended:
        return wire.SwitchStatus(
            consistency=lease_messages.consistency_to_wire(pending.wanted),
            behind=pending.missing(job.workers),
            step=pending.step or 0,
            unfinished=mode_switch.unfinished_shards(job),
        )
    if not mode.latest.number:
        return None
    return wire.SwitchStatus(
        consistency=lease_messages.consistency_to_wire(mode.latest),
        servers=not mode.is_under_way,
        behind=() if job.phase.ended else mode.behind(job.workers),
    )


def _evaluation(latest: Evaluation | None) -> wire.EvaluationStatus | None:
    if latest is None:
        return None
    return wire.EvaluationStatus(step=latest.step, metrics=parts.metrics(latest.metrics), reported_s=latest.reported_s)


def _best(best: Best | None) -> wire.BestModel | None:
    """The fields have the same names."""
    return None if best is None else wire.BestModel(**dataclasses.asdict(best))


def _restored(restored: Restored | None) -> wire.RestoredStatus | None:
    if restored is None:
        return None
    return wire.RestoredStatus(
        checkpoint=wire.CheckpointStatus(number=restored.checkpoint, step=restored.step, created_s=restored.created_s),
        partitions=restored.partitions,
        leased_again=restored.leased_again,
        logs=restored.logs,
    )
