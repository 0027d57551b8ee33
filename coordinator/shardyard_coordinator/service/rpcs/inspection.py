"""RPCs that show: the state of the yard, a job's quarantine, its audit. They change nothing."""

from __future__ import annotations

import json
import time

from shardyard.domain import limits
from shardyard.domain.ids import JobId
from shardyard.wire import common_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.service import status
from shardyard_coordinator.service.rpcs import parts
from shardyard_coordinator.service.rpcs.rpc import Backend, served


def _status(backend: Backend, _: wire.StatusRequest) -> wire.StatusReply:
    with backend.mailbox.machine() as machine:
        now_ms = backend.mailbox.now_ms()
        reply = status.describe(machine, now_ms)
    reply.uptime_ms = now_ms - backend.mailbox.begun_ms
    full = backend.mailbox.full_disk
    if full is not None:
        reply.full_disk.CopyFrom(
            wire.FullDisk(
                file=full.file,
                free_bytes=full.free_bytes,
                room_bytes=0 if backend.mailbox.waiting_for else full.room_bytes,
                full_ms=max(0, now_ms - full.since_ms),
            )
        )
    reply.waiting_for = backend.wait_registry.waiting_for
    reply.open_to, reply.authorities = backend.open_to, backend.authorities
    reply.time_ms, reply.protocol, reply.release = time.time_ns() // 1_000_000, limits.PROTOCOL, backend.release
    return reply


def _list_quarantined(backend: Backend, request: wire.ListQuarantinedRequest) -> wire.ListQuarantinedReply:
    with backend.mailbox.machine() as machine:
        return status.list_quarantined(machine, JobId(request.job))


def _read_audit(backend: Backend, request: wire.ReadAuditRequest) -> wire.ReadAuditReply:
    name = common_messages.text(request.job, "a job's name or id", limits.JOB_NAME_CHARACTERS_MAX)
    job, page = backend.mailbox.read_audit(name, parts.sequence(request.after, "audit entries after"))
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
