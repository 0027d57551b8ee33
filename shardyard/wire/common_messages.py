"""Converts identifiers, names and modes between messages and domain types.

A value that leaves this module is well-formed: enums are known, counts and sizes are bounded, ids are in range,
and numbers are finite. `check` functions raise MalformedPayload, TooLarge or InvalidRequest; nothing is allocated
before its size has been checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from shardyard.domain import limits
from shardyard.domain.consistency import (
    Clipping,
    ConsistencyMode,
    Durability,
    StaleRule,
    UpdateMode,
)
from shardyard.domain.errors import InvalidRequest, MalformedPayload, TooLarge
from shardyard.domain.ids import (
    Caller,
    Incarnation,
    JobId,
    MemberRole,
    Rank,
    Term,
    Token,
    Version,
)
from shardyard.domain.push_names import (
    DataShardSource,
    PushName,
    RankSource,
    Source,
    SourceKey,
    WorkerSource,
)
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server

_MODES: dict[UpdateMode, common.UpdateMode] = {
    UpdateMode.SYNC: common.UPDATE_MODE_SYNC,
    UpdateMode.ASYNC: common.UPDATE_MODE_ASYNC,
}


_CONSISTENCY_MODES: dict[ConsistencyMode, coordinator.ConsistencyMode] = {
    ConsistencyMode.SYNC: coordinator.CONSISTENCY_MODE_SYNC,
    ConsistencyMode.LOCAL: coordinator.CONSISTENCY_MODE_LOCAL,
    ConsistencyMode.BOUNDED: coordinator.CONSISTENCY_MODE_BOUNDED,
    ConsistencyMode.ASYNC: coordinator.CONSISTENCY_MODE_ASYNC,
    ConsistencyMode.HYBRID: coordinator.CONSISTENCY_MODE_HYBRID,
}


_DURABILITIES: dict[Durability, common.Durability] = {
    Durability.CHECKPOINT: common.DURABILITY_CHECKPOINT,
    Durability.WAL: common.DURABILITY_WAL,
}


_ROLES: dict[MemberRole, coordinator.Role] = {
    MemberRole.SERVER: coordinator.ROLE_SERVER,
    MemberRole.WORKER: coordinator.ROLE_WORKER,
    MemberRole.AGENT: coordinator.ROLE_AGENT,
}


K = TypeVar("K")


V = TypeVar("V")


def known(table: dict[K, V], value: object, what: str) -> K:
    for key, number in table.items():
        if number == value:
            return key
    raise MalformedPayload(f"{what} is {value}, which this release does not know")


def bounded(items: Sequence[V], count_max: int, what: str) -> Sequence[V]:
    if len(items) > count_max:
        raise TooLarge(f"{len(items)} {what}; at most {count_max} are taken")
    return items


def text(value: str, what: str, characters_max: int = limits.TEXT_CHARACTERS_MAX) -> str:
    """Raises TooLarge for a text beyond the limit."""
    if len(value) > characters_max:
        raise TooLarge(f"{what} has {len(value)} characters; at most {characters_max} are taken")
    return value


# ---- callers, names


def caller_to_wire(caller: Caller) -> common.Caller:
    return common.Caller(job=caller.job, incarnation=caller.incarnation, term=caller.term)


def caller_from_wire(message: common.Caller) -> Caller:
    return Caller(JobId(message.job), Incarnation(message.incarnation), Term(message.term))


def source_to_wire(source: Source) -> common.Source:
    match source:
        case DataShardSource(feed, epoch, index):
            return common.Source(data_shard=common.DataShardName(feed=feed, epoch=epoch, index=index))
        case RankSource(rank):
            return common.Source(logical_rank=rank)
        case WorkerSource(incarnation):
            return common.Source(worker=incarnation)


def data_shard_from_wire(message: common.DataShardName) -> DataShardSource:
    return DataShardSource(message.feed, message.epoch, message.index)


def source_from_wire(message: common.Source) -> Source:
    match message.WhichOneof("kind"):
        case "data_shard":
            return data_shard_from_wire(message.data_shard)
        case "logical_rank":
            return RankSource(Rank(message.logical_rank))
        case "worker":
            return WorkerSource(Incarnation(message.worker))
        case _:
            raise MalformedPayload("a push's name without a source")


def name_to_wire(name: PushName) -> common.PushName:
    return common.PushName(
        source=source_to_wire(name.key.source), lane=name.key.lane, token=name.token, first=name.first, last=name.last
    )


def name_from_wire(message: common.PushName) -> PushName:
    if message.last < message.first:
        raise MalformedPayload(f"a push of the sequences {message.first} to {message.last}")
    if message.last > limits.SEQUENCE_MAX:
        raise TooLarge(f"a push of sequence {message.last}; the last one is {limits.SEQUENCE_MAX}")
    key = SourceKey(source_from_wire(message.source), message.lane)
    return PushName(key, Token(message.token), message.first, message.last)


def version_to_wire(version: Version) -> common.Version:
    return common.Version(life=version.life, number=version.number)


def version_from_wire(message: common.Version) -> Version:
    return Version(message.life, message.number)


def mode_to_wire(mode: UpdateMode) -> common.UpdateMode:
    return _MODES[mode]


def mode_from_wire(value: common.UpdateMode) -> UpdateMode:
    return known(_MODES, value, "the update mode")


def consistency_mode_to_wire(mode: ConsistencyMode) -> coordinator.ConsistencyMode:
    return _CONSISTENCY_MODES[mode]


def consistency_mode_from_wire(value: coordinator.ConsistencyMode) -> ConsistencyMode:
    return known(_CONSISTENCY_MODES, value, "the consistency mode")


def stale_to_wire(rule: StaleRule | None) -> server.StaleRule | None:
    if rule is None:
        return None
    return server.StaleRule(divides_rate=rule.divides_rate, compensation=rule.compensation, decay=rule.decay)


def stale_from_wire(message: server.StaleRule) -> StaleRule:
    if not (math.isfinite(message.compensation) and message.compensation >= 0 and 0 <= message.decay < 1):
        raise InvalidRequest(
            f"stale gradients compensated with {message.compensation} and a decay of {message.decay}; expected a number"
            " from 0, and one from 0 to below 1"
        )
    return StaleRule(message.divides_rate, message.compensation, message.decay)


def durability_to_wire(durability: Durability) -> common.Durability:
    return _DURABILITIES[durability]


def durability_from_wire(value: common.Durability) -> Durability:
    if value == common.DURABILITY_UNSPECIFIED:
        return Durability.CHECKPOINT
    return known(_DURABILITIES, value, "the durability")


def clipping_to_wire(clipping: Clipping) -> server.Clipping:
    return server.Clipping(norm=clipping.norm, value=clipping.value)


def clipping_from_wire(message: server.Clipping) -> Clipping:
    for name, limit in ("norm", message.norm), ("value", message.value):
        if not (math.isfinite(limit) and limit >= 0):
            raise InvalidRequest(f"clipping by {name} to {limit}; expected a number from 0")
    return Clipping(message.norm, message.value)


def role_to_wire(role: MemberRole) -> coordinator.Role:
    return _ROLES[role]


def role_from_wire(value: coordinator.Role) -> MemberRole:
    return known(_ROLES, value, "the role")


def check_unique(partitions: Sequence[int], what: str) -> None:
    if len(set(partitions)) != len(partitions):
        raise MalformedPayload(f"{what} that names a partition twice")
