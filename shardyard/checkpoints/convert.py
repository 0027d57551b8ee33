"""Entries of manifests and the messages that carry them, both ways. What comes in is checked."""

from __future__ import annotations

from collections.abc import Iterable

from shardyard.checkpoints.manifest import (
    FILES_PER_PARTITION_MAX,
    FeedbackFile,
    FileRef,
    PartitionEntry,
    PartitionFile,
)
from shardyard.checkpoints.storage import Written, check_path
from shardyard.ground import limits
from shardyard.ground.errors import MalformedPayload, TooLarge
from shardyard.ground.types import Incarnation, PartitionId
from shardyard.wire import convert
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server

DIGEST_BYTES = 32


def file_to_wire(file: PartitionFile) -> server.CheckpointFile:
    written = file.file.written
    return server.CheckpointFile(
        path=file.file.path, length=written.nbytes, sha256=bytes.fromhex(written.sha256), blocks=file.blocks
    )


def file_from_wire(message: server.CheckpointFile) -> PartitionFile:
    file = _ref(message.path, message.length, message.sha256)
    if len(message.blocks) > limits.BLOCKS_MAX:
        raise TooLarge(f"{len(message.blocks)} blocks of a file; at most {limits.BLOCKS_MAX} are taken")
    return PartitionFile(file, tuple(message.blocks))


def handed_from_wire(message: coordinator.HandOver) -> FeedbackFile:
    name = convert.text(message.worker, "a worker's name", limits.JOB_NAME_CHARACTERS_MAX)
    return FeedbackFile(name, _ref(message.path, message.length, message.sha256))


def written_from_wire(length: int, sha256: bytes, what: str) -> Written:
    if len(sha256) != DIGEST_BYTES:
        raise MalformedPayload(f"{what} with a digest of {len(sha256)} bytes; not {DIGEST_BYTES}")
    if length > limits.JOB_BYTES_MAX:
        raise TooLarge(f"{what} of {length} bytes; at most {limits.JOB_BYTES_MAX} are taken")
    return Written(length, sha256.hex())


def _ref(path: str, length: int, sha256: bytes) -> FileRef:
    path = check_path(convert.text(path, "the path of a checkpoint's file"))
    return FileRef(path, written_from_wire(length, sha256, path))


def entry_to_wire(entry: PartitionEntry, logs: Iterable[Incarnation] = ()) -> server.RestoredPartition:
    """`logs`: the servers whose logs say what came after the checkpoint."""
    return server.RestoredPartition(
        partition=entry.partition,
        version=convert.version_to_wire(entry.version),
        files=[file_to_wire(file) for file in entry.files],
        logs=logs,
    )


def entry_from_wire(message: server.RestoredPartition) -> PartitionEntry:
    if not 1 <= len(message.files) <= FILES_PER_PARTITION_MAX:
        raise MalformedPayload(f"partition {message.partition} to be restored from {len(message.files)} files")
    return PartitionEntry(
        PartitionId(message.partition),
        convert.version_from_wire(message.version),
        tuple(file_from_wire(file) for file in message.files),
    )
