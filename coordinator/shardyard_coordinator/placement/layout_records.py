"""A job's layout and map as records have them: as they were decided, to the last offset.

Owns: their form. Invariants: what is read is equal to what was written; numbers are held against the bounds of
shardyard.domain.limits, and a layout is whole (shardyard.domain.layout.checks). Must not know: how layouts are planned.
"""

from __future__ import annotations

from shardyard.domain import limits
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Generation, Incarnation, PartitionId
from shardyard.domain.layout.checks import check_layout
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout, PartitionMap, PartitionOwner
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard_coordinator.placement import table_specs
from shardyard_coordinator.records import (
    Body,
    DamagedRecord,
    checked_float,
    checked_items,
    checked_number,
    checked_text,
    require,
)


def to_record(layout: JobLayout) -> dict[str, object]:
    return {
        "variables": [[v.name, v.dtype.value, list(v.shape), v.kind.value, v.group] for v in layout.variables],
        "optimizer": [layout.optimizer.kind, [list(group) for group in layout.optimizer.groups]],
        "partitions": [
            [part.payload_bytes, [[b.variable, b.offset, b.length, b.position] for b in part.blocks]]
            for part in layout.partitions
        ],
        "tables": table_specs.to_record(layout.tables),
    }


def map_to_record(map_: PartitionMap) -> dict[str, object]:
    return {"generation": map_.generation, "owners": [[owner.server, owner.address] for owner in map_.owners]}


def of_record(body: Body) -> JobLayout:
    """Raises DamagedRecord."""
    said = checked_items(body.items("optimizer"), "optimizer", count=2)
    groups = checked_items(said[1], "the optimizer's groups")
    optimizer = OptimizerSpec(
        checked_text(said[0], "the optimizer's kind"),
        tuple(
            tuple(checked_float(value, "a setting") for value in checked_items(group, "a parameter group"))
            for group in groups
        ),
    )
    variables = tuple(_variable_of(each) for each in body.items("variables"))
    require(len(variables) <= limits.VARIABLES_MAX, f"{len(variables)} variables")
    parts = body.items("partitions")
    require(1 <= len(parts) <= limits.PARTITIONS_MAX, f"{len(parts)} partitions")
    partitions = tuple(_partition_of(at, each) for at, each in enumerate(parts))
    layout = JobLayout(variables, optimizer, partitions, table_specs.of_record(body))
    try:
        check_layout(layout)
    except InvalidRequest as error:
        raise DamagedRecord(error.what) from error
    return layout


def map_of_record(body: Body, partitions: int) -> PartitionMap:
    """Raises DamagedRecord."""
    owners = checked_items(body.items("owners"), "owners", count=partitions)
    return PartitionMap(
        Generation(body.number("generation", least=1)), tuple(_owner_of(at, each) for at, each in enumerate(owners))
    )


def _owner_of(partition: int, item: object) -> PartitionOwner:
    server, address = checked_items(item, "an owner", count=2)
    return PartitionOwner(
        PartitionId(partition),
        Incarnation(checked_number(server, "an owner's server", least=1)),
        checked_text(address, "an owner's address"),
    )


def _variable_of(item: object) -> VariableSpec:
    name, dtype, shape, kind, group = checked_items(item, "a variable", count=5)
    dimensions = checked_items(shape, "a shape")
    require(len(dimensions) <= limits.DIMENSIONS_MAX, f"a shape of {len(dimensions)} dimensions")
    try:
        known_dtype, known_kind = DType(dtype), VariableKind(kind)
    except ValueError as error:
        raise DamagedRecord(f"variable {name!r}: {error}") from error
    return VariableSpec(
        checked_text(name, "a variable's name"),
        known_dtype,
        tuple(checked_number(each, "a dimension") for each in dimensions),
        known_kind,
        checked_number(group, "a variable's group", most=limits.GROUPS_MAX),
    )


def _partition_of(number: int, item: object) -> PartitionLayout:
    payload_bytes, blocks = checked_items(item, "a partition", count=2)
    return PartitionLayout(
        PartitionId(number),
        checked_number(payload_bytes, "a partition's bytes", most=2 * limits.JOB_BYTES_MAX),
        tuple(_block_of(each) for each in checked_items(blocks, "a partition's blocks")),
    )


def _block_of(item: object) -> Block:
    variable, offset, length, position = (
        checked_number(each, "a block") for each in checked_items(item, "a block", count=4)
    )
    return Block(variable, offset, length, position)
