"""What a server's reply to ReadLedger says of the sources that were asked about.

Invariant: where a missing watermark could be taken for a low number, a reply without it raises MalformedPayload.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardyard.domain import limits
from shardyard.domain.errors import MalformedPayload
from shardyard.domain.ids import PartitionId
from shardyard.domain.push_names import SourceKey, Watermark
from shardyard.wire import lease_messages
from shardyard.wire.v1.parameter_server_pb2 import ReadLedgerReply

Sources = Sequence[SourceKey]
Partitions = Sequence[PartitionId]


def nexts(reply: ReadLedgerReply, sources: Sources, partitions: Partitions) -> list[tuple[PartitionId, int]]:
    """The next sequence of the sources in each partition. Raises MalformedPayload."""
    return [(mark.partition, mark.next) for mark in _all(reply, sources, partitions)]


def lowest_next(reply: ReadLedgerReply, sources: Sources, partitions: Partitions) -> int:
    """The lowest next sequence of the sources over the server's partitions; 0 if one is missing."""
    found = _found(reply)
    marks = [found.get((key, partition)) for key in sources for partition in partitions]
    return min((0 if mark is None else mark.next for mark in marks), default=0)


def highest_next(reply: ReadLedgerReply, sources: Sources, partitions: Partitions) -> int:
    """The highest next sequence of the sources over the server's partitions. Raises MalformedPayload."""
    return max(mark.next for mark in _all(reply, sources, partitions))


def highest_version(reply: ReadLedgerReply, sources: Sources, partitions: Partitions) -> int:
    """The highest version number of the server's partitions. Raises MalformedPayload."""
    highest = max(mark.version.number for mark in _all(reply, sources, partitions))
    if highest > limits.SEQUENCE_MAX:
        raise MalformedPayload(f"a partition at version {highest}; at most {limits.SEQUENCE_MAX} is taken")
    return highest


def _all(reply: ReadLedgerReply, sources: Sources, partitions: Partitions) -> list[Watermark]:
    found = _found(reply)
    for key in sources:
        for partition in partitions:
            if (key, partition) not in found:
                raise MalformedPayload(f"a reply without the watermark of {key} in partition {partition}")
    return [found[key, partition] for key in sources for partition in partitions]


def _found(reply: ReadLedgerReply) -> dict[tuple[SourceKey, int], Watermark]:
    return {(key, m.partition): m for key, marks in lease_messages.watermarks_from_wire(reply.sources) for m in marks}
