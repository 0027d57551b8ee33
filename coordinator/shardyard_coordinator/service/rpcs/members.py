"""RPCs by which processes join the yard, renew their leases and leave."""

from __future__ import annotations

import time
from functools import partial

from shardyard.config.settings import MembershipSettings
from shardyard.domain import limits
from shardyard.domain.errors import NotPermitted, TooLarge
from shardyard.domain.ids import Incarnation, JobId, Term
from shardyard.security.identity import Identity, Role
from shardyard.security.passes import LIFETIME_S, holder_of
from shardyard.transport.error_codes import to_detail
from shardyard.wire import common_messages, lease_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.members.membership import Registration
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.service.residual_collection import ResidualRequest
from shardyard_coordinator.service.rpcs import parts
from shardyard_coordinator.service.rpcs.rpc import Backend, acknowledged, decided, identified


def register_event(request: wire.RegisterRequest, caller: Identity | None = None) -> events.MemberRegistered:
    """Raises NotPermitted if the caller's certificate is for another role."""
    if caller is not None and caller.role.value != common_messages.ROLES.from_wire(request.role).value:
        raise NotPermitted(f"{caller} registers as {common_messages.ROLES.from_wire(request.role).value}")
    return events.MemberRegistered(
        Registration(
            role=common_messages.ROLES.from_wire(request.role),
            address=common_messages.text(request.address, "an address", parts.NAME_CHARACTERS_MAX),
            protocol=request.protocol,
            release=common_messages.text(request.release, "a release", parts.NAME_CHARACTERS_MAX),
            host=common_messages.text(request.host, "a host name", parts.NAME_CHARACTERS_MAX),
            pid=request.pid,
            agent=Incarnation(request.agent) if request.agent else None,
            local_index=request.local_index,
            logs=common_messages.text(request.logs, "a folder of logs", parts.NAME_CHARACTERS_MAX),
            principal="" if caller is None else holder_of(caller),
        )
    )


def register_reply(
    incarnation: Incarnation,
    term: Term,
    membership: MembershipSettings,
    pass_key: bytes = b"",
    authorities: bytes = b"",
) -> wire.RegisterReply:
    return wire.RegisterReply(
        incarnation=incarnation,
        term=term,
        heartbeat_ms=membership.heartbeat_every_ms,
        lease_ms=membership.lease_ms,
        drain_ms=membership.drain_ms,
        pass_key=pass_key,
        authorities=authorities,
    )


def _register(backend: Backend, request: wire.RegisterRequest, caller: Identity | None) -> wire.RegisterReply:
    answer = backend.ask(register_event(request, caller), effects.Registered)
    is_server = request.role == wire.ROLE_SERVER and backend.signer is not None
    key = backend.signer.public_key if is_server and backend.signer is not None else b""
    return register_reply(answer.incarnation, backend.mailbox.term, backend.membership, key, backend.authorities)


def heartbeat_event(request: wire.HeartbeatRequest) -> events.HeartbeatReceived:
    if len(request.metrics) > limits.METRICS_MAX:
        raise TooLarge(f"a heartbeat with {len(request.metrics)} metrics; at most {limits.METRICS_MAX} are taken")
    reached, point = partial(parts.sequence, what="a worker that is at step"), request.switch_reached
    report = Report(
        step=request.step,
        samples=request.samples,
        metrics=tuple((parts.metric_name(metric.name), metric.value) for metric in request.metrics),
        waiting_for=common_messages.sentences(request.waiting_for, "what a member waits for"),
        residual_norm=parts.residual_norm(request.residual_norm),
        pushed=parts.sequence(request.pushed, "pushes"),
        stop_reached=reached(request.stop_reached.reached) if request.HasField("stop_reached") else None,
        switch_reached=(point.number, reached(point.reached)) if request.HasField("switch_reached") else None,
        switches=request.switches,
        needs_servers=common_messages.sentences(request.needs_servers, "what needs servers"),
        sums=common_messages.sentences(request.sums, "how gradients are summed"),
    )
    if len(request.logs) > limits.JOBS_MAX:
        raise TooLarge(f"a heartbeat with {len(request.logs)} logs; at most {limits.JOBS_MAX} are taken")
    logs = tuple((JobId(each.job), each.length) for each in request.logs)
    return events.HeartbeatReceived(Incarnation(request.caller.incarnation), report, logs, _rows(request))


def _rows(request: wire.HeartbeatRequest) -> tuple[tuple[JobId, tuple[int, ...]], ...]:
    if len(request.tables) > limits.JOBS_MAX or any(len(each.rows) > limits.TABLES_MAX for each in request.tables):
        raise TooLarge(f"a heartbeat with the rows of {len(request.tables)} jobs, or of a job with too many tables")
    return tuple((JobId(each.job), tuple(each.rows)) for each in request.tables)


def heartbeat_reply(
    answer: effects.HeartbeatReply, term: Term, residual: ResidualRequest | None = None
) -> wire.HeartbeatReply:
    """`residual`: the residual file that the worker must write for a checkpoint, if it must."""
    return wire.HeartbeatReply(
        term=term,
        job_state=wire.JOB_STATE_UNSPECIFIED if answer.job_state is None else parts.STATES[answer.job_state],
        failure=None if answer.failure is None else to_detail(answer.failure),
        generation=answer.generation or 0,
        ranks=lease_messages.rank_leases_to_wire(answer.ranks),
        chief=answer.chief,
        workers=answer.workers,
        world_size=0 if answer.job_state is None else answer.world_size,
        fenced=answer.fenced,
        recovering=answer.recovering,
        initializer=answer.initializer,
        save_residual=None if residual is None else wire.SaveResidual(number=residual.number, url=residual.url),
        feedback=map(parts.residual, answer.feedback),
        restored_generation=answer.restored_generation,
        stop=parts.stop(answer.stop),
        consistency=parts.consistency(answer.consistency),
        switch_point=parts.switch_point(answer.switch_point),
        checkpoint=parts.checkpoint(answer.checkpoint),
        drain=parts.drain(answer.drain),
        replica_generation=answer.replica_generation,
        publish=answer.publish,
        lost_replica_generation=answer.lost_replica_generation,
    )


def _heartbeat(backend: Backend, request: wire.HeartbeatRequest, caller: Identity | None) -> wire.HeartbeatReply:
    event = heartbeat_event(request)
    answer = backend.ask(event, effects.HeartbeatReply)
    residual = backend.residuals.wanted(JobId(request.caller.job), event.incarnation)
    reply = heartbeat_reply(answer, backend.mailbox.term, residual)
    reply.undecided = backend.mailbox.waiting_for
    reply.authorities = backend.authorities
    identities = backend.identities
    if identities is not None:
        identities.note_trusted(event.incarnation, request.authorities)
    if identities is not None and caller is not None and caller.role in (Role.SERVER, Role.AGENT):
        revocations = identities.revocations
        if request.revoked_version != revocations.version:
            reply.revoked.version = revocations.version
            reply.revoked.holders.extend(sorted(revocations.holders))
    if request.pass_until_s and request.pass_until_s - time.time() < LIFETIME_S / 2:
        reply.job_pass = backend.sign_pass(JobId(request.caller.job), event.incarnation, caller)
    return reply


def leave_event(request: wire.LeaveRequest) -> events.MemberLeft:
    error = common_messages.sentences(request.error, "an error")
    lost = parts.residual_norm(request.residual_lost)
    return events.MemberLeft(
        Incarnation(request.caller.incarnation),
        error,
        parts.sequence(request.pushed, "pushes"),
        lost,
        drained=request.drained,
    )


def drain_event(request: wire.DrainRequest) -> events.DrainRequested:
    name = common_messages.text(request.member, "a member", parts.NAME_CHARACTERS_MAX)
    return events.DrainRequested(Incarnation(request.caller.incarnation) or None, name)


def drain_reply(taken: effects.DrainTaken) -> wire.DrainReply:
    return wire.DrainReply(
        incarnation=taken.member,
        title=taken.title,
        left_ms=min(taken.left_ms, parts.UINT32_MAX),
        first=taken.first,
        empty=taken.empty,
    )


def report_exit_event(request: wire.ReportExitRequest) -> events.ExitReported:
    return events.ExitReported(Incarnation(request.caller.incarnation), request.pid, request.exit_code)


RPCS = (
    identified(methods.REGISTER, _register),
    identified(methods.HEARTBEAT, _heartbeat),
    decided(methods.LEAVE, leave_event, effects.Left, lambda left: wire.LeaveReply(residual_lost=left.residual_lost)),
    decided(methods.DRAIN, drain_event, effects.DrainTaken, drain_reply),
    acknowledged(methods.REPORT_EXIT, report_exit_event, wire.ReportExitReply),
)
