"""Files of checkpoints from states in memory, and back. A server writes its blocks one at a time instead."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from shardyard.checkpoints import partition_file
from shardyard.checkpoints.library import CheckpointLibrary, read_partition
from shardyard.checkpoints.manifest import FileRef, Manifest, partition_path
from shardyard.checkpoints.partition_file import BlockSource, PartitionHead, PartitionState
from shardyard.domain.ids import PartitionId
from shardyard.domain.variables import DType
from shardyard.storage import tensors
from shardyard.storage.storage import Buffer


def state_pieces(state: PartitionState) -> Iterator[Buffer]:
    """The file of a partition."""
    blocks = [
        BlockSource(
            block.index,
            DType(block.values.dtype.name),
            len(block.values),
            block.count,
            partial(tensors.bytes_of, block.values),
            {name: partial(tensors.bytes_of, array) for name, array in block.slots.items()},
        )
        for block in state.blocks
    ]
    return partition_file.pieces(PartitionHead(state.partition, state.version, state.marks, state.floor), blocks)


def write_state(library: CheckpointLibrary, job: str, number: int, state: PartitionState) -> FileRef:
    """Writes the file of a partition where checkpoint `number` has it."""
    path = partition_path(number, state.partition)
    return FileRef(path, library.storage.write(f"{job}/{path}", state_pieces(state)))


def load_partition(library: CheckpointLibrary, manifest: Manifest, partition: PartitionId) -> PartitionState:
    """A partition's state, put together from its files. Raises what `read_partition` raises."""
    return read_partition(library.storage, manifest.layout, manifest.partitions[partition], folder=manifest.job_name)
