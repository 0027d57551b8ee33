"""RPCs that show: the state of the yard, a job's quarantine, its audit. They change nothing."""

from __future__ import annotations

import json
import time

from shardyard.domain import limits
from shardyard.domain.errors import TooLarge
from shardyard.domain.ids import JobId
from shardyard.domain.limits import PROTOCOL
from shardyard.transport.error_codes import to_detail
from shardyard.wire import common_messages, layout_messages, lease_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.members.evaluations import Best, Evaluation
from shardyard_coordinator.service import status
from shardyard_coordinator.service.rpcs import parts
from shardyard_coordinator.service.rpcs.rpc import Backend, served
from shardyard_coordinator.service.status import JobStatus, MemberStatus, SwitchStatus, YardStatus
from shardyard_coordinator.storage.recovery import Restored


def _status(backend: Backend, _: wire.StatusRequest) -> wire.StatusReply:
    with backend.mailbox.machine() as machine:
        yard = status.describe(machine, backend.mailbox.now_ms())
    reply = status_reply(yard, waiting_for=backend.wait_registry.waiting_for)
    reply.time_ms, reply.protocol, reply.release = time.time_ns() // 1_000_000, PROTOCOL, backend.release
    return reply


def status_reply(yard: YardStatus, *, waiting_for: str) -> wire.StatusReply:
    """`waiting_for`: what the coordinator's own threads wait for."""
    return wire.StatusReply(
        term=yard.term,
        uptime_ms=yard.uptime_ms,
        members=[_member_status(member) for member in yard.members],
        jobs=[_job_status(job) for job in yard.jobs],
        waiting_for=waiting_for,
    )


def _member_status(member: MemberStatus) -> wire.MemberStatus:
    return wire.MemberStatus(
        incarnation=member.incarnation,
        role=common_messages.role_to_wire(member.role),
        address=member.address,
        host=member.host,
        pid=member.pid,
        release=member.release,
        last_seen_ms_ago=member.last_seen_ms_ago,
        job=member.job or 0,
        step=member.report.step,
        samples=member.report.samples,
        waiting_for=member.waiting_for,
        ranks=member.ranks,
        not_finite=member.not_finite,
        dropped=min(member.dropped, (1 << 64) - 1),
    )


def _job_status(job: JobStatus) -> wire.JobStatus:
    return wire.JobStatus(
        job=job.job,
        name=job.name,
        state=parts.STATES[job.state],
        failure=None if job.failure is None else to_detail(job.failure),
        mode=common_messages.mode_to_wire(job.mode),
        logical_ranks=job.logical_ranks,
        staleness=job.staleness,
        local_steps=job.local_steps,
        rows_at_once=job.rows_at_once,
        workers=job.workers,
        step=job.step,
        samples=job.samples,
        samples_per_s=job.samples_per_s,
        metrics=parts.metrics(job.metrics),
        map=None if job.map is None else layout_messages.map_to_wire(job.map),
        feeds=[
            wire.FeedStatus(
                feed=feed.feed,
                samples=feed.samples,
                epochs=feed.epochs,
                free=_uint32(feed.free),
                leased=feed.leased,
                done=_uint32(feed.done),
                finished=feed.finished,
                quarantined=feed.quarantined,
            )
            for feed in job.feeds
        ],
        parameters=job.parameters,
        payload_bytes=job.payload_bytes,
        residuals_lost=job.residuals_lost,
        residual_lost_norm=job.residual_lost_norm,
        lost_pushes=min(job.lost_pushes, (1 << 64) - 1),
        waits=job.waits,
        checkpoint=parts.checkpoint(job.checkpoint),
        restored=None if job.restored is None else _restored_status(job.restored),
        recovering=job.recovering,
        not_finite=job.not_finite,
        workers_quarantined=job.workers_quarantined,
        stop=parts.stop(job.stop),
        consistency=None if job.switch is None else _switch_status(job.switch),
        evaluation=None if job.evaluation is None else _evaluation_status(job.evaluation),
        best=None if job.best is None else _kept_best(job.best),
        readers=job.readers,
        dropped=min(job.dropped, (1 << 64) - 1),
        tables=[
            wire.TableStatus(name=table.name, dim=table.dim, optimizer=table.optimizer, rows=min(rows, (1 << 64) - 1))
            for table, rows in job.tables
        ],
    )


def _switch_status(switch: SwitchStatus) -> wire.SwitchStatus:
    consistency = lease_messages.consistency_to_wire(switch.consistency)
    return wire.SwitchStatus(
        consistency=consistency,
        servers=switch.servers,
        behind=switch.behind,
        step=switch.step,
        draining=switch.draining,
    )


def _evaluation_status(evaluation: Evaluation) -> wire.EvaluationStatus:
    metrics = [wire.Metric(name=name, value=value) for name, value in evaluation.metrics]
    return wire.EvaluationStatus(step=evaluation.step, metrics=metrics, reported_s=evaluation.reported_s)


def _kept_best(best: Best) -> wire.KeptBest:
    return wire.KeptBest(
        metric=best.metric,
        lowest=best.lowest,
        value=best.value,
        step=best.step,
        url=best.url,
        reported_s=best.reported_s,
    )


def _restored_status(restored: Restored) -> wire.RestoredStatus:
    return wire.RestoredStatus(
        checkpoint=wire.CheckpointStatus(number=restored.checkpoint, step=restored.step, created_s=restored.created_s),
        partitions=restored.partitions,
        leased_again=restored.leased_again,
        logs=restored.logs,
    )


def _uint32(count: int) -> int:
    return min(count, (1 << 32) - 1)


def _list_quarantined(backend: Backend, request: wire.ListQuarantinedRequest) -> wire.ListQuarantinedReply:
    with backend.mailbox.machine() as machine:
        found = status.list_quarantined(machine, JobId(request.job))
    return wire.ListQuarantinedReply(
        batches=[
            wire.QuarantinedBatch(
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
            for each in found.batches
        ],
        seed=found.seed,
        feeds=[wire.FeedOrder(feed=feed, samples=spec.samples, shuffle=spec.shuffle) for feed, spec in found.feeds],
    )


def _read_audit(backend: Backend, request: wire.ReadAuditRequest) -> wire.ReadAuditReply:
    name = common_messages.text(request.job, "a job's name or id", limits.JOB_NAME_CHARACTERS_MAX)
    if request.after > limits.SEQUENCE_MAX:
        raise TooLarge(f"audit entries after {request.after}; at most {limits.SEQUENCE_MAX} are taken")
    job, page = backend.mailbox.read_audit(name, request.after)
    return wire.ReadAuditReply(
        entries=[
            wire.AuditEntry(
                number=each.number,
                term=each.term,
                time=each.time,
                job=each.job,
                event=each.kind,
                body_json=json.dumps(each.body, separators=(",", ":")),
            )
            for each in page.entries
        ],
        job=job,
        reached=page.reached,
        more=page.more,
        lost=page.lost,
    )


RPCS = (
    served(methods.STATUS, _status),
    served(methods.LIST_QUARANTINED, _list_quarantined),
    served(methods.READ_AUDIT, _read_audit),
)
