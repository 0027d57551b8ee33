"""The messages that a log records, and how partitions are rebuilt from them.

A record holds one of these: a push as it was received, with its settings and the ids that expire with it; the verdict
on a step; tokens of sources that were opened; sequences that are lost; or which partitions began anew. Given to the
same partitions in the same order, the records have the same outcomes, refusals included, so replay gives the same bits
(ledger.md, rule C1). Work that the checkpoint already contains is a duplicate by its name, and changes nothing.

Owns: the meaning of records. Invariant: a record that does not fit the records before it is damage. Must not know:
files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from google.protobuf.message import DecodeError

from shardyard.domain.errors import InvalidRequest, NotReady, Refused, SequenceGap, ShardyardError, TooLarge
from shardyard.domain.ids import Generation, Incarnation, PartitionId, Token
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.push_names import SourceKey, WorkerSource
from shardyard.domain.pushes import PushHeader, PushKind, StepVerdict
from shardyard.wire import lease_messages, push_messages
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_ps_server.partition.contribution import parts_of
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.push import apply_push, check_nothing
from shardyard_ps_server.partition.sync_step import take_verdict
from shardyard_ps_server.values.versions import aligned_copy
from shardyard_ps_server.wal.records import Mark, Record, RecordKind, damaged
from shardyard_ps_server.wal.row_records import read_rows
from shardyard_ps_server.wal.segments import LogFiles

log = logging.getLogger("shardyard.server")

_RECORDED: Final = (PushKind.GRADIENT, PushKind.EMPTY)


def push_head(header: PushHeader) -> bytes:
    """Encodes a push without its payload and without fields that only matter to its exchange."""
    recorded = replace(
        header,
        pull=None,
        requested=(),
        attach=None,
        shared_at=None,
        rest=None,
        detach=False,
        ssp_report=None,
        verdict=None,
        attach_rows=None,
        rows_at=None,
        requested_at=None,
    )
    return push_messages.push_to_wire(recorded).SerializeToString()


def open_head(sources: Sequence[tuple[SourceKey, Token]]) -> bytes:
    return wire.OpenSourcesRequest(sources=lease_messages.sources_to_wire(sources)).SerializeToString()


def begin_head(generation: Generation, partitions: Sequence[PartitionId]) -> bytes:
    return wire.CreatePartitionsRequest(generation=generation, partitions=partitions).SerializeToString()


def verdict_head(verdict: StepVerdict, partitions: Iterable[PartitionId]) -> bytes:
    """`partitions`: those that take the verdict."""
    return push_messages.given_to_wire(verdict, partitions).SerializeToString()


def pass_over_head(worker: Incarnation, next_sequence: int) -> bytes:
    return wire.PassOverRequest(worker=worker, next=next_sequence).SerializeToString()


def replay(
    files: LogFiles, generation: Generation, base: int, layout: JobLayout, partitions: Mapping[PartitionId, Partition]
) -> None:
    """Applies the log of a dead server to partitions in the state of checkpoint `base`. `generation`: the one under
    which this server gets the partitions. Raises StorageUnavailable, LogDamaged, TooLarge."""
    end = files.take_over(generation)
    begins = _begins(files, files.records(base, end, payloads=False))
    counted = 0
    for record in files.records(base, end):
        path = files.segment(record.at.segment)
        present = {number: each for number, each in partitions.items() if begins.get(number, record.at) <= record.at}
        try:
            if record.kind is RecordKind.PUSH:
                counted += _push(record, layout, present)
            elif record.kind is RecordKind.OPEN:
                _open(record, present)
            elif record.kind is RecordKind.PASS_OVER:
                _pass_over(record, present)
            elif record.kind is RecordKind.VERDICT:
                _give_verdict(record, present)
        except TooLarge:
            raise
        except (DecodeError, ShardyardError) as error:
            what = error.what if isinstance(error, ShardyardError) else str(error)
            raise damaged(path, record.at.offset, f"the record does not fit what came before it: {what}") from error
    log.info(
        "partitions %s: %d pushes are done again, from the log of server %s",
        ", ".join(str(number) for number in sorted(partitions)),
        counted,
        files.server,
    )


def _begins(files: LogFiles, records: Iterable[Record]) -> dict[PartitionId, Mark]:
    """Returns where each partition last began anew. Partitions that did not are left out."""
    found: dict[PartitionId, Mark] = {}
    for record in records:
        if record.kind is RecordKind.BEGIN:
            try:
                numbers = wire.CreatePartitionsRequest.FromString(record.head).partitions
            except DecodeError as error:
                path = files.segment(record.at.segment)
                raise damaged(path, record.at.offset, f"the record cannot be read: {error}") from error
            found.update((PartitionId(number), record.at) for number in numbers)
    return found


def _push(record: Record, layout: JobLayout, partitions: Mapping[PartitionId, Partition]) -> bool:
    header = push_messages.push_from_header(record.head, recorded=True)
    if header.kind not in _RECORDED:
        raise InvalidRequest(f"{header.name}, {header.kind.value}, with {len(record.payload)} bytes of payload")
    try:
        brought, gone = read_rows(layout, header, record.payload, partitions)
    except TooLarge as error:  # an admitted push is within the limits
        raise InvalidRequest(error.what) from error
    touched = False
    for part, piece, base in parts_of(header, record.payload):
        partition = partitions.get(part.partition)
        if partition is None:
            continue
        groups = header.groups if header.kind is PushKind.GRADIENT else None
        partition.payload.check_recorded(part, len(piece), groups)
        rows, expired = brought.get(part.partition, ()), gone.get(part.partition, ())
        piece = aligned_copy(piece)
        contribution = partition.payload.contribution(header, part, piece, base, rows, expired)
        try:
            apply_push(partition, header.name, contribution, check_nothing)
        except MemoryError as error:
            raise TooLarge(f"{header.name}, for which there is no memory now") from error
        except (SequenceGap, TooLarge):
            raise
        except (Refused, InvalidRequest, NotReady) as error:
            if partition.torn is not None:
                raise TooLarge(f"{header.name}, whose rows were applied in part: {error.what}") from error
            # it was refused when received, or its token has ended and the checkpoint contains it
            log.debug("%s is passed over: %s", header.name, error.what)
            continue
        touched = True
    return touched


def _open(record: Record, partitions: Mapping[PartitionId, Partition]) -> None:
    for key, token in lease_messages.sources_from_wire(wire.OpenSourcesRequest.FromString(record.head).sources):
        for number in sorted(partitions):
            try:
                partitions[number].open_source(key, token)
            except Refused as error:
                log.debug("%s is not opened again: %s", key.source, error.what)


def _pass_over(record: Record, partitions: Mapping[PartitionId, Partition]) -> None:
    request = wire.PassOverRequest.FromString(record.head)
    for number in sorted(partitions):
        partitions[number].pass_over(SourceKey(WorkerSource(Incarnation(request.worker))), request.next, check_nothing)


def _give_verdict(record: Record, partitions: Mapping[PartitionId, Partition]) -> None:
    verdict, numbers = push_messages.given_from_wire(wire.VerdictGiven.FromString(record.head))
    try:
        take_verdict([partitions[number] for number in numbers if number in partitions], verdict, check_nothing)
    except MemoryError as error:
        raise TooLarge(f"{verdict}, for which there is no memory now") from error
