"""What a server's reply to ReadLedger says of the sources that were asked about.

Invariant: a reply that leaves out a partition or a source raises MalformedPayload where its absence could be taken for
a low number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardyard.domain import limits
from shardyard.domain.errors import MalformedPayload
from shardyard.domain.ids import PartitionId
from shardyard.domain.push_names import SourceKey, Watermark
from shardyard.wire import lease_messages
from shardyard.wire.v1.parameter_server_pb2 import ReadLedgerReply


def nexts(reply: ReadLedgerReply, partitions: Iterable[PartitionId]) -> list[tuple[PartitionId, int]]:
    """The next sequence in each partition, of the one source that was asked about. Raises MalformedPayload if a
    partition is missing."""
    found = {
        mark.partition: mark.next for _, marks in lease_messages.watermarks_from_wire(reply.sources) for mark in marks
    }
    wanted = sorted(partitions)
    if not found.keys() >= set(wanted):
        raise MalformedPayload(f"watermarks of partitions {sorted(found)}; expected those of {wanted}")
    return [(partition, found[partition]) for partition in wanted]


def lowest_next(reply: ReadLedgerReply, sources: Sequence[SourceKey], partitions: Iterable[int]) -> int:
    """The lowest next sequence of the sources over the server's partitions; 0 if one is missing."""
    found: dict[tuple[SourceKey, int], int] = {}
    marks: tuple[Watermark, ...]
    for key, marks in lease_messages.watermarks_from_wire(reply.sources):
        for mark in marks:
            found[key, mark.partition] = mark.next
    return min((found.get((key, partition), 0) for key in sources for partition in partitions), default=0)


def highest_next(reply: ReadLedgerReply, sources: Sequence[SourceKey], partitions: Iterable[int]) -> int:
    """The highest next sequence of the sources over the server's partitions. Raises MalformedPayload if a source is
    missing, since its next sequence could be any."""
    marks = dict(lease_messages.watermarks_from_wire(reply.sources))
    wanted = set(partitions)
    for key in sources:
        named = {mark.partition for mark in marks.get(key, ())}
        if not named >= wanted:
            raise MalformedPayload(f"watermarks of {key} in partitions {sorted(named)}; expected {sorted(wanted)}")
    return max(mark.next for key in sources for mark in marks[key])


def highest_version(reply: ReadLedgerReply, sources: Sequence[SourceKey], partitions: Iterable[int]) -> int:
    """The highest version number of the server's partitions. Raises as `highest_next`."""
    highest_next(reply, sources, partitions)
    wanted = set(sources)
    found = lease_messages.watermarks_from_wire(reply.sources)
    highest = max(mark.version.number for key, marks in found if key in wanted for mark in marks)
    if highest > limits.SEQUENCE_MAX:
        raise MalformedPayload(f"a partition at version {highest}; at most {limits.SEQUENCE_MAX} are taken")
    return highest
