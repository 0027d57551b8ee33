"""Converts identifiers, names and modes between messages and domain types."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from shardyard.domain import limits
from shardyard.domain.consistency import Clipping, ConsistencyMode, Durability, StaleRule, UpdateMode
from shardyard.domain.errors import InvalidRequest, MalformedPayload, TooLarge
from shardyard.domain.ids import Caller, Incarnation, JobId, MemberRole, Rank, Term, Token, Version
from shardyard.domain.push_names import DataShardSource, PushName, RankSource, Source, SourceKey, WorkerSource
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server

K = TypeVar("K", bound=enum.Enum)
V = TypeVar("V")
Generated = TypeVar("Generated", bound=Message)


class EnumNumbers(Generic[K]):
    """The members of one of our enums, and the numbers that stand for them in messages.

    A number's name in the .proto file is `prefix` and the member's name. `unspecified`: what 0 means; None: nothing."""

    def __init__(self, kind: type[K], numbers: Any, prefix: str, what: str, unspecified: K | None = None) -> None:
        named = dict(numbers.items())
        self._numbers = {each: named[prefix + each.name] for each in kind if each is not unspecified}
        if unspecified is not None:  # 0, unless it has a number too, which is then what is sent
            self._numbers[unspecified] = named.get(prefix + unspecified.name, 0)
        self._members = {number: each for each, number in self._numbers.items()}
        if unspecified is not None:
            self._members[0] = unspecified
        self._what = what

    def to_wire(self, member: K) -> Any:
        return self._numbers[member]

    def from_wire(self, number: int, of: str = "") -> K:
        """`of`: whose it is, for the message. Raises MalformedPayload."""
        if number not in self._members:
            raise MalformedPayload(f"{self._what}{of} is {number}, which this release does not know")
        return self._members[number]


UPDATE_MODES = EnumNumbers(UpdateMode, common.UpdateMode, "UPDATE_MODE_", "the update mode")
CONSISTENCY_MODES = EnumNumbers(
    ConsistencyMode, coordinator.ConsistencyMode, "CONSISTENCY_MODE_", "the consistency mode"
)
DURABILITIES = EnumNumbers(Durability, common.Durability, "DURABILITY_", "the durability", Durability.CHECKPOINT)
ROLES = EnumNumbers(MemberRole, coordinator.Role, "ROLE_", "the role")


def bounded(items: Sequence[V], count_max: int, what: str) -> Sequence[V]:
    if len(items) > count_max:
        raise TooLarge(f"{len(items)} {what}; at most {count_max} are taken")
    return items


def text(value: str, what: str, characters_max: int = limits.TEXT_CHARACTERS_MAX) -> str:
    """A name. Raises TooLarge for a text beyond the limit, MalformedPayload for characters that cannot be shown: an
    escape sequence would do its work in the terminal of whoever reads a log."""
    _check_length(value, what, characters_max)
    if not value.isprintable():
        raise MalformedPayload(f"{what} has characters that cannot be shown: {value[:200]!a}")
    return value


def sentences(value: str, what: str) -> str:
    """What a program or a person says, in lines. Characters that cannot be shown are replaced. Raises TooLarge."""
    _check_length(value, what, limits.TEXT_CHARACTERS_MAX)
    if value.isprintable():
        return value
    return "".join([each if each.isprintable() or each == "\n" else "\ufffd" for each in value])


def _check_length(value: str, what: str, characters_max: int) -> None:
    if len(value) > characters_max:
        raise TooLarge(f"{what} has {len(value)} characters; at most {characters_max} are taken")


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
            raise MalformedPayload("the name of a push has no source")


def name_to_wire(name: PushName) -> common.PushName:
    return common.PushName(
        source=source_to_wire(name.key.source), lane=name.key.lane, token=name.token, first=name.first, last=name.last
    )


def name_from_wire(message: common.PushName) -> PushName:
    key = SourceKey(source_from_wire(message.source), message.lane)
    return checked_name(key, Token(message.token), message.first, message.last)


def checked_name(key: SourceKey, token: Token, first: int, last: int) -> PushName:
    """Raises MalformedPayload, TooLarge."""
    if last < first:
        raise MalformedPayload(f"a push has the sequences {first} to {last}; the last must not be before the first")
    if last >= limits.SEQUENCE_MAX:
        raise TooLarge(f"a push has the sequence {last}; it must be below {limits.SEQUENCE_MAX}")
    return PushName(key, token, first, last)


def version_to_wire(version: Version) -> common.Version:
    return common.Version(life=version.life, number=version.number)


def version_from_wire(message: common.Version) -> Version:
    return Version(message.life, message.number)


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


def clipping_to_wire(clipping: Clipping) -> server.Clipping:
    return server.Clipping(norm=clipping.norm, value=clipping.value)


def clipping_from_wire(message: server.Clipping) -> Clipping:
    for name, limit in ("norm", message.norm), ("value", message.value):
        if not (math.isfinite(limit) and limit >= 0):
            raise InvalidRequest(f"clipping by {name} to {limit}; expected a number from 0")
    return Clipping(message.norm, message.value)


def parsed(kind: type[Generated], data: bytes, what: str) -> Generated:
    """The message in these bytes. Raises MalformedPayload."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedPayload(f"{what} cannot be read: {error}") from error


def random_name(value: bytes) -> bytes:
    """The name of a reader, or of its pin. Raises MalformedPayload."""
    if len(value) != limits.RANDOM_NAME_BYTES:
        raise MalformedPayload(f"a random name of {len(value)} bytes; expected {limits.RANDOM_NAME_BYTES}")
    return value


def check_unique(numbers: Sequence[int], what: str, each: str = "partition") -> None:
    if len(set(numbers)) != len(numbers):
        raise MalformedPayload(f"{what} names a {each} twice")
