"""Entries of manifests and the messages that carry them, both ways. What comes in is checked."""

from __future__ import annotations

from collections.abc import Iterable

from shardyard.checkpoints.manifest import FILES_PER_PARTITION_MAX, FileRef, PartitionEntry, PartitionFile
from shardyard.checkpoints.storage import Written, check_path
from shardyard.ground import limits
from shardyard.ground.errors import MalformedPayload, TooLarge
from shardyard.ground.types import Incarnation, PartitionId
from shardyard.wire import convert
from shardyard.wire.v1 import parameter_server_pb2 as server

DIGEST_BYTES = 32


def file_to_wire(file: PartitionFile) -> server.CheckpointFile:
    written = file.file.written
    return server.CheckpointFile(
        path=file.file.path, length=written.nbytes, sha256=bytes.fromhex(written.sha256), blocks=file.blocks
    )


def file_from_wire(message: server.CheckpointFile) -> PartitionFile:
    path = check_path(convert.text(message.path, "the path of a checkpoint's file"))
    if len(message.sha256) != DIGEST_BYTES:
        raise MalformedPayload(f"{path} with a digest of {len(message.sha256)} bytes; not {DIGEST_BYTES}")
    if len(message.blocks) > limits.BLOCKS_MAX:
        raise TooLarge(f"{len(message.blocks)} blocks of a file; at most {limits.BLOCKS_MAX} are taken")
    written = Written(message.length, message.sha256.hex())
    return PartitionFile(FileRef(path, written), tuple(message.blocks))


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
