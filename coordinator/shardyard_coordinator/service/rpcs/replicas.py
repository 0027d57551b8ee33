"""RPCs of mirrored jobs: replica groups, the keys by which their members find each other, and published states."""

from __future__ import annotations

from typing import Final

from shardyard.domain.errors import TooLarge
from shardyard.domain.ids import JobId
from shardyard.wire import common_messages, lease_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import events
from shardyard_coordinator.core.effects import PublishedAnswer, ReplicaGroupAnswer
from shardyard_coordinator.flows.replication import book_of, check_member
from shardyard_coordinator.service.group_keys import KEYS_MAX
from shardyard_coordinator.service.rpcs import parts
from shardyard_coordinator.service.rpcs.rpc import Backend, decided, served

GROUP_RETRY_MS: Final = 20
"""After how long a worker asks again for its replica group."""
CUT_RETRY_MS: Final = 10
"""After how long a worker looks again whether partitions are cut."""
KEY_RETRY_MS: Final = 5
KEY_CHARACTERS_MAX: Final = 256
VALUE_BYTES_MAX: Final = 16_384


def join_replica_group_event(request: wire.JoinReplicaGroupRequest) -> events.ReplicaGroupAsked:
    step = parts.sequence(request.step, "a replica of step") if request.HasField("step") else None
    return events.ReplicaGroupAsked(common_messages.caller_from_wire(request.caller), request.left, step)


def join_replica_group_reply(answer: ReplicaGroupAnswer) -> wire.JoinReplicaGroupReply:
    if answer.group is None:
        return wire.JoinReplicaGroupReply(retry_ms=GROUP_RETRY_MS, waiting_for=answer.waiting_for)
    return wire.JoinReplicaGroupReply(group=lease_messages.replica_group_to_wire(answer.group))


def report_published_event(request: wire.ReportPublishedRequest) -> events.ReplicasPublished:
    step = parts.sequence(request.step, "a published step")
    return events.ReplicasPublished(common_messages.caller_from_wire(request.caller), request.generation, step)


def report_published_reply(answer: PublishedAnswer) -> wire.ReportPublishedReply:
    return wire.ReportPublishedReply(retry_ms=CUT_RETRY_MS if answer.waits else 0)


def put(backend: Backend, request: wire.PutGroupKeyRequest) -> wire.PutGroupKeyReply:
    """Raises InvalidRequest, TooLarge, StaleGeneration."""
    job = _checked(backend, request)
    if len(request.value) > VALUE_BYTES_MAX:
        raise TooLarge(f"a key's value of {len(request.value)} bytes; at most {VALUE_BYTES_MAX} are taken")
    with backend.mailbox.machine() as machine:
        backend.group_keys.keep_only(frozenset(each.id for each in machine.jobs if not each.phase.ended))
    backend.group_keys.put(job, request.generation, _key(request.key), request.value)
    return wire.PutGroupKeyReply()


def get(backend: Backend, request: wire.GetGroupKeysRequest) -> wire.GetGroupKeysReply:
    """Raises InvalidRequest, TooLarge, StaleGeneration."""
    job = _checked(backend, request)
    keys = [_key(each) for each in common_messages.bounded(request.keys, KEYS_MAX, "keys")]
    found = backend.group_keys.get(job, request.generation, keys)
    return wire.GetGroupKeysReply(retry_ms=KEY_RETRY_MS) if found is None else wire.GetGroupKeysReply(values=found)


def _checked(backend: Backend, request: wire.PutGroupKeyRequest | wire.GetGroupKeysRequest) -> JobId:
    caller = common_messages.caller_from_wire(request.caller)
    with backend.mailbox.machine() as machine:
        job = machine.require_job(caller)
        check_member(book_of(job), caller.incarnation, request.generation)
        return job.id


def _key(key: str) -> str:
    return common_messages.text(key, "a key", KEY_CHARACTERS_MAX)


RPCS = (
    decided(methods.JOIN_REPLICA_GROUP, join_replica_group_event, ReplicaGroupAnswer, join_replica_group_reply),
    decided(methods.REPORT_PUBLISHED, report_published_event, PublishedAnswer, report_published_reply),
    served(methods.PUT_GROUP_KEY, put),
    served(methods.GET_GROUP_KEYS, get),
)
