"""Converts sources, watermarks, leases and a job's mode between messages and domain types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardyard.domain import limits
from shardyard.domain.consistency import Consistency, ConsistencyMode, Stop, SwitchPoint
from shardyard.domain.errors import InvalidRequest, MalformedPayload, TooLarge
from shardyard.domain.ids import Incarnation, PartitionId, Rank, Token
from shardyard.domain.push_names import DataLease, DoneDataShards, RankLease, SourceKey, Watermark
from shardyard.domain.replica_groups import ReplicaGroup, Strategy
from shardyard.wire.common_messages import (
    CONSISTENCY_MODES,
    bounded,
    data_shard_from_wire,
    sentences,
    source_from_wire,
    source_to_wire,
    version_from_wire,
    version_to_wire,
)
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server

# ---- ledgers and leases


def sources_to_wire(keys: Iterable[tuple[SourceKey, Token]]) -> list[server.SourceToken]:
    return [server.SourceToken(source=source_to_wire(k.source), lane=k.lane, token=t) for k, t in keys]


def sources_from_wire(messages: Sequence[server.SourceToken]) -> tuple[tuple[SourceKey, Token], ...]:
    """Raises MalformedPayload, TooLarge: a checkpoint has no room for a token above SEQUENCE_MAX."""
    found = bounded(messages, limits.SOURCES_PER_REQUEST_MAX, "sources")
    for m in found:
        if m.token > limits.SEQUENCE_MAX:
            raise TooLarge(f"a source has the token {m.token}; the largest is {limits.SEQUENCE_MAX}")
    return tuple((SourceKey(source_from_wire(m.source), m.lane), Token(m.token)) for m in found)


def done_to_wire(done: Iterable[DoneDataShards]) -> list[server.DoneDataShards]:
    return [
        server.DoneDataShards(feed=each.feed, per_epoch=each.per_epoch, begun=each.begun, open=sorted(each.open))
        for each in done
    ]


def done_from_wire(messages: Sequence[server.DoneDataShards]) -> tuple[DoneDataShards, ...]:
    bounded(messages, limits.FEEDS_MAX, "feeds")
    if sum(len(message.open) for message in messages) > limits.SOURCES_PER_REQUEST_MAX:
        raise TooLarge(f"a request names more than {limits.SOURCES_PER_REQUEST_MAX} open data shards")
    return tuple(DoneDataShards(m.feed, m.per_epoch, m.begun, frozenset(m.open)) for m in messages)


def watermarks_to_wire(found: Iterable[tuple[SourceKey, Sequence[Watermark]]]) -> list[server.SourceWatermarks]:
    return [
        server.SourceWatermarks(
            source=source_to_wire(key.source),
            lane=key.lane,
            watermarks=[
                server.Watermark(partition=w.partition, next=w.next, version=version_to_wire(w.version)) for w in marks
            ],
        )
        for key, marks in found
    ]


def watermarks_from_wire(
    messages: Sequence[server.SourceWatermarks],
) -> tuple[tuple[SourceKey, tuple[Watermark, ...]], ...]:
    return tuple(
        (
            SourceKey(source_from_wire(m.source), m.lane),
            tuple(Watermark(PartitionId(w.partition), w.next, version_from_wire(w.version)) for w in m.watermarks),
        )
        for m in messages
    )


def rank_leases_to_wire(leases: Iterable[RankLease]) -> list[coordinator.RankLease]:
    return [
        coordinator.RankLease(rank=lease.rank, token=lease.token, announce_until=lease.announce_until)
        for lease in leases
    ]


def rank_leases_from_wire(messages: Iterable[coordinator.RankLease]) -> tuple[RankLease, ...]:
    return tuple(RankLease(Rank(m.rank), Token(m.token), m.announce_until) for m in messages)


def consistency_to_wire(consistency: Consistency) -> coordinator.Consistency:
    mode = CONSISTENCY_MODES.to_wire(consistency.mode)
    return coordinator.Consistency(
        number=consistency.number,
        mode=mode,
        staleness=consistency.bound,
        strategy="" if consistency.strategy is None else consistency.strategy.value,
    )


def consistency_from_wire(message: coordinator.Consistency) -> Consistency:
    """Raises MalformedPayload, InvalidRequest, TooLarge."""
    mode = CONSISTENCY_MODES.from_wire(message.mode)
    bound = message.staleness if message.HasField("staleness") else None
    if (bound is None) is (mode is ConsistencyMode.BOUNDED):
        raise InvalidRequest(
            f"mode {mode.value} has {'no' if bound is None else 'a'} bound on staleness; only mode bounded has one"
        )
    if bound is not None and bound > limits.STALENESS_MAX:
        raise TooLarge(f"a staleness of {bound} is too large; at most {limits.STALENESS_MAX} is allowed")
    return Consistency(message.number, mode, bound, strategy_from_wire(message.strategy))


def strategy_from_wire(name: str) -> Strategy | None:
    """None if there is none. Raises MalformedPayload."""
    if not name:
        return None
    found = next((each for each in Strategy if each.value == name), None)
    if found is None:
        raise MalformedPayload(f"strategy {name[:40]!a}, which this release does not know")
    return found


def stop_to_wire(stop: Stop) -> coordinator.Stop:
    return coordinator.Stop(reason=stop.reason, worker=stop.worker or 0, settled=stop.settled, step=stop.step)


def stop_from_wire(message: coordinator.Stop) -> Stop:
    """Raises TooLarge."""
    if message.step > limits.SEQUENCE_MAX:
        raise TooLarge(f"a stop at step {message.step} is too late; the last step is {limits.SEQUENCE_MAX}")
    reason = sentences(message.reason, "the reason of a stop")
    return Stop(reason, Incarnation(message.worker) or None, message.settled, message.step)


def switch_point_to_wire(point: SwitchPoint) -> coordinator.SwitchPoint:
    return coordinator.SwitchPoint(number=point.number, settled=point.settled, step=point.step, to_steps=point.to_steps)


def switch_point_from_wire(message: coordinator.SwitchPoint) -> SwitchPoint:
    """Raises TooLarge."""
    if message.step > limits.SEQUENCE_MAX:
        raise TooLarge(f"a switch at step {message.step} is too late; the last step is {limits.SEQUENCE_MAX}")
    return SwitchPoint(message.number, message.settled, message.step, message.to_steps)


def data_lease_to_wire(lease: DataLease) -> coordinator.DataLease:
    name = common.DataShardName(feed=lease.source.feed, epoch=lease.source.epoch, index=lease.source.index)
    return coordinator.DataLease(
        data_shard=name, token=lease.token, begin=lease.begin, end=lease.end, announce_until=lease.announce_until
    )


def data_lease_from_wire(message: coordinator.DataLease) -> DataLease:
    source, token = data_shard_from_wire(message.data_shard), Token(message.token)
    return DataLease(source, token, message.begin, message.end, message.announce_until)


def replica_group_to_wire(group: ReplicaGroup) -> coordinator.ReplicaGroup:
    return coordinator.ReplicaGroup(
        generation=group.generation,
        members=group.members,
        step=group.step,
        donor=group.donor,
        void_until=group.void_until,
    )


def replica_group_from_wire(message: coordinator.ReplicaGroup) -> ReplicaGroup:
    """Raises TooLarge, InvalidRequest."""
    members = tuple(
        Incarnation(each) for each in bounded(message.members, limits.LOGICAL_RANKS_MAX, "members of a replica group")
    )
    step = message.step if message.HasField("step") else None
    donor = message.donor if message.HasField("donor") else None
    if donor is not None and (step is None or donor >= len(members)):
        raise InvalidRequest(f"a replica group of {len(members)} members at step {step}, with donor {donor}")
    return ReplicaGroup(message.generation, members, step, donor, message.void_until)
