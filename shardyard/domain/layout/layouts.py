"""How the variables and tables of a job are cut into partitions, and which server owns each partition."""

from __future__ import annotations

from dataclasses import dataclass

from shardyard.domain.ids import Generation, Incarnation, PartitionId
from shardyard.domain.limits import BLOCK_ALIGN_BYTES
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.domain.variables import VariableSpec


@dataclass(frozen=True, slots=True)
class Block:
    """Elements [offset, offset + length) of a variable, at byte `position` of the payload of a partition."""

    variable: int
    offset: int
    length: int
    position: int


@dataclass(frozen=True, slots=True)
class PartitionLayout:
    partition: PartitionId
    payload_bytes: int
    blocks: tuple[Block, ...]


def aligned_bytes(nbytes: int) -> int:
    """`nbytes`, rounded up to a multiple of BLOCK_ALIGN_BYTES. A block takes so many bytes in a payload."""
    return -(-nbytes // BLOCK_ALIGN_BYTES) * BLOCK_ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class JobLayout:
    """What a server or worker needs to cut variables into the payloads of partitions."""

    variables: tuple[VariableSpec, ...]
    optimizer: OptimizerSpec
    partitions: tuple[PartitionLayout, ...]
    tables: tuple[TableSettings, ...] = ()
    """Each partition has a part of the ids of each table (shardyard.domain.tables.row_ids.partition_of)."""


@dataclass(frozen=True, slots=True)
class PartitionOwner:
    partition: PartitionId
    server: Incarnation
    address: str


@dataclass(frozen=True, slots=True)
class PartitionMap:
    """The owner of each partition: `owners[i].partition == i`."""

    generation: Generation
    owners: tuple[PartitionOwner, ...]

    def by_server(self) -> dict[Incarnation, tuple[PartitionOwner, ...]]:
        found: dict[Incarnation, list[PartitionOwner]] = {}
        for owner in self.owners:
            found.setdefault(owner.server, []).append(owner)
        return {server: tuple(owners) for server, owners in sorted(found.items())}
