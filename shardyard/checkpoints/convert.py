"""Converts entries of manifests between messages and dataclasses, and checks those that come in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardyard.checkpoints.manifest import (
    FILES_PER_PARTITION_MAX,
    FileRef,
    PartitionEntry,
    PartitionFile,
    ResidualFile,
    TableEntry,
)
from shardyard.domain import limits
from shardyard.domain.errors import MalformedPayload, TooLarge
from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.storage.storage import Written, check_path
from shardyard.wire import common_messages
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server

DIGEST_BYTES = 32


def file_to_wire(file: PartitionFile) -> server.CheckpointFile:
    message = _ref_to_wire(file.file)
    message.blocks.extend(file.blocks)
    return message


def _ref_to_wire(file: FileRef) -> server.CheckpointFile:
    written = file.written
    return server.CheckpointFile(path=file.path, length=written.nbytes, sha256=bytes.fromhex(written.sha256))


def file_from_wire(message: server.CheckpointFile) -> PartitionFile:
    file = _ref(message.path, message.length, message.sha256)
    if len(message.blocks) > limits.BLOCKS_MAX:
        raise TooLarge(f"a file has {len(message.blocks)} blocks; at most {limits.BLOCKS_MAX} are allowed")
    return PartitionFile(file, tuple(message.blocks))


def tables_to_wire(tables: Iterable[TableEntry]) -> list[server.TableFiles]:
    return [
        server.TableFiles(
            updates=table.updates,
            now_ms=table.now_ms,
            rows=table.rows,
            ids=table.ids,
            base=[_ref_to_wire(file) for file in table.base],
            increments=[_ref_to_wire(file) for file in table.increments],
        )
        for table in tables
    ]


def tables_from_wire(messages: Sequence[server.TableFiles]) -> tuple[TableEntry, ...]:
    if len(messages) > limits.TABLES_MAX:
        raise TooLarge(f"a message has the files of {len(messages)} tables; at most {limits.TABLES_MAX} are allowed")
    return tuple(
        TableEntry(
            message.updates,
            message.rows,
            message.ids,
            _rows_refs(message.base),
            _rows_refs(message.increments),
            message.now_ms,
        )
        for message in messages
    )


def _rows_refs(messages: Sequence[server.CheckpointFile]) -> tuple[FileRef, ...]:
    if len(messages) > limits.ROWS_FILES_MAX:
        raise TooLarge(f"a table has {len(messages)} files with rows; at most {limits.ROWS_FILES_MAX} are allowed")
    found = tuple(_ref(each.path, each.length, each.sha256) for each in messages)
    for each in found:
        if each.written.nbytes > limits.ROWS_FILE_BYTES_MAX:
            raise TooLarge(
                f"{each.path} has {each.written.nbytes} bytes; at most {limits.ROWS_FILE_BYTES_MAX} are allowed"
            )
    return found


def residual_from_wire(message: coordinator.CheckpointResidual) -> ResidualFile:
    name = common_messages.text(message.worker, "a worker's name", limits.JOB_NAME_CHARACTERS_MAX)
    return ResidualFile(name, _ref(message.path, message.length, message.sha256))


def written_from_wire(length: int, sha256: bytes, what: str) -> Written:
    if len(sha256) != DIGEST_BYTES:
        raise MalformedPayload(f"{what} has a digest of {len(sha256)} bytes; expected {DIGEST_BYTES}")
    if length > limits.JOB_BYTES_MAX:
        raise TooLarge(f"{what} has {length} bytes; at most {limits.JOB_BYTES_MAX} are allowed")
    return Written(length, sha256.hex())


def _ref(path: str, length: int, sha256: bytes) -> FileRef:
    path = check_path(common_messages.text(path, "the path of a checkpoint's file"))
    return FileRef(path, written_from_wire(length, sha256, path))


def entry_to_wire(entry: PartitionEntry, logs: Iterable[Incarnation] = ()) -> server.RestoredPartition:
    """`logs`: the servers whose logs have what came after the checkpoint."""
    return server.RestoredPartition(
        partition=entry.partition,
        version=common_messages.version_to_wire(entry.version),
        files=[file_to_wire(file) for file in entry.files],
        logs=logs,
        tables=tables_to_wire(entry.tables),
    )


def entry_from_wire(message: server.RestoredPartition) -> PartitionEntry:
    if not 1 <= len(message.files) <= FILES_PER_PARTITION_MAX:
        raise MalformedPayload(f"partition {message.partition} is to be restored from {len(message.files)} files")
    return PartitionEntry(
        PartitionId(message.partition),
        common_messages.version_from_wire(message.version),
        tuple(file_from_wire(file) for file in message.files),
        tables_from_wire(message.tables),
    )
