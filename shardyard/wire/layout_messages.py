"""Converts variables, optimizers, layouts and partition maps between messages and domain types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardyard.domain import limits, optimizers
from shardyard.domain.errors import InvalidRequest, MalformedPayload
from shardyard.domain.ids import Generation, Incarnation, PartitionId
from shardyard.domain.layout import checks
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout, PartitionMap, PartitionOwner
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard.wire import table_messages
from shardyard.wire.common_messages import EnumNumbers, bounded, text
from shardyard.wire.v1 import common_pb2 as common

_DTYPES = EnumNumbers(DType, common.DType, "DTYPE_", "the dtype of variable ")
_VARIABLE_KINDS = EnumNumbers(VariableKind, common.VariableKind, "VARIABLE_KIND_", "the kind of variable ")


def variable_to_wire(spec: VariableSpec) -> common.VariableSpec:
    return common.VariableSpec(
        name=spec.name,
        dtype=_DTYPES.to_wire(spec.dtype),
        shape=spec.shape,
        kind=_VARIABLE_KINDS.to_wire(spec.kind),
        group=spec.group,
    )


def variable_from_wire(message: common.VariableSpec) -> VariableSpec:
    name = text(message.name, "a variable's name", limits.VARIABLE_NAME_CHARACTERS_MAX)
    dtype = _DTYPES.from_wire(message.dtype, repr(name))
    kind = _VARIABLE_KINDS.from_wire(message.kind, repr(name))
    spec = VariableSpec(name, dtype, tuple(message.shape), kind, message.group)
    checks.check_variable(spec)
    return spec


def variables_from_wire(messages: Sequence[common.VariableSpec], groups: int) -> tuple[VariableSpec, ...]:
    """Raises what shardyard.domain.layout.checks.check_variables raises."""
    specs = tuple(variable_from_wire(m) for m in bounded(messages, limits.VARIABLES_MAX, "variables"))
    checks.check_variables(specs, groups)
    return specs


def groups_to_wire(groups: Iterable[Sequence[float]]) -> list[common.ParameterGroup]:
    return [common.ParameterGroup(values=values) for values in groups]


def groups_from_wire(messages: Sequence[common.ParameterGroup]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(m.values) for m in bounded(messages, limits.GROUPS_MAX, "parameter groups"))


def optimizer_to_wire(spec: OptimizerSpec) -> common.OptimizerSpec:
    return common.OptimizerSpec(
        kind=spec.kind, settings=optimizers.setting_names(spec.kind), groups=groups_to_wire(spec.groups)
    )


def optimizer_from_wire(message: common.OptimizerSpec) -> OptimizerSpec:
    spec = OptimizerSpec(message.kind, groups_from_wire(message.groups))
    optimizers.check_spec(spec)
    if tuple(message.settings) != optimizers.setting_names(spec.kind):
        raise InvalidRequest(
            f"optimizer {spec.kind!r} has the settings {', '.join(message.settings)}; expected "
            + ", ".join(optimizers.setting_names(spec.kind))
        )
    return spec


def layout_to_wire(layout: JobLayout) -> common.JobLayout:
    return common.JobLayout(
        variables=[variable_to_wire(spec) for spec in layout.variables],
        optimizer=optimizer_to_wire(layout.optimizer),
        partitions=[
            common.PartitionLayout(
                partition=part.partition,
                payload_bytes=part.payload_bytes,
                blocks=[
                    common.Block(variable=b.variable, offset=b.offset, length=b.length, position=b.position)
                    for b in part.blocks
                ],
            )
            for part in layout.partitions
        ],
        tables=table_messages.tables_to_wire(layout.tables),
    )


def layout_from_wire(message: common.JobLayout) -> JobLayout:
    """Raises what shardyard.domain.layout.checks.check_layout raises."""
    optimizer = optimizer_from_wire(message.optimizer)
    variables = variables_from_wire(message.variables, len(optimizer.groups))
    partitions = []
    bounded([block for part in message.partitions for block in part.blocks], limits.BLOCKS_MAX, "blocks")
    for index, part in enumerate(bounded(message.partitions, limits.PARTITIONS_MAX, "partitions")):
        if part.partition != index:
            raise MalformedPayload(f"partition {part.partition} stands at place {index} of a layout")
        blocks = tuple(Block(b.variable, b.offset, b.length, b.position) for b in part.blocks)
        partitions.append(PartitionLayout(PartitionId(index), part.payload_bytes, blocks))
    layout = JobLayout(variables, optimizer, tuple(partitions), table_messages.tables_from_wire(message.tables))
    checks.check_layout(layout)
    return layout


def map_to_wire(map_: PartitionMap) -> common.PartitionMap:
    return common.PartitionMap(
        generation=map_.generation,
        owners=[common.PartitionOwner(partition=o.partition, server=o.server, address=o.address) for o in map_.owners],
    )


def map_from_wire(message: common.PartitionMap) -> PartitionMap:
    owners = tuple(
        PartitionOwner(PartitionId(o.partition), Incarnation(o.server), text(o.address, "an address", 512))
        for o in bounded(message.owners, limits.PARTITIONS_MAX, "partitions")
    )
    if any(owner.partition != index for index, owner in enumerate(owners)):
        raise MalformedPayload("the partitions of a partition map are not in order")
    return PartitionMap(Generation(message.generation), owners)
