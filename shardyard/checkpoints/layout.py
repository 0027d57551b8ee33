"""A job's layout as JSON.

Owns: both ways. Invariants: what comes back equals what went in; blocks lie in their partitions as docs/protocol.md
says, and each element of each variable is in exactly one of them. Must not know: files, manifests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

from shardyard.checkpoints.documents import Node
from shardyard.ground import limits
from shardyard.ground.errors import InvalidRequest
from shardyard.ground.optimizers import KINDS, check_spec
from shardyard.ground.types import (
    Block,
    DType,
    JobLayout,
    OptimizerSpec,
    PartitionId,
    PartitionLayout,
    VariableKind,
    VariableSpec,
    aligned_bytes,
)

_BLOCK_NUMBERS: Final = 4
_NAME: Final = re.compile(rf".{{1,{limits.VARIABLE_NAME_CHARACTERS_MAX}}}", re.DOTALL)
_DTYPE: Final = re.compile("|".join(dtype.value for dtype in DType))
_KIND: Final = re.compile("|".join(kind.value for kind in VariableKind))
_OPTIMIZER: Final = re.compile("|".join(KINDS))


def to_document(layout: JobLayout) -> dict[str, object]:
    return {
        "variables": [
            {
                "name": spec.name,
                "dtype": spec.dtype.value,
                "shape": list(spec.shape),
                "kind": spec.kind.value,
                "group": spec.group,
            }
            for spec in layout.variables
        ],
        "optimizer": {
            "kind": layout.optimizer.kind,
            "groups": [[float(value) for value in group] for group in layout.optimizer.groups],
        },
        "partitions": [
            {
                "payload_bytes": part.payload_bytes,
                "blocks": [[block.variable, block.offset, block.length, block.position] for block in part.blocks],
            }
            for part in layout.partitions
        ],
    }


def from_document(node: Node) -> JobLayout:
    """Raises CheckpointDamaged."""
    fields = node.fields(("variables", "optimizer", "partitions"))
    optimizer = _optimizer(fields["optimizer"])
    variables = tuple(
        _variable(each, len(optimizer.groups)) for each in fields["variables"].items(limits.VARIABLES_MAX)
    )
    if len({spec.name for spec in variables}) != len(variables):
        fields["variables"].refuse("each name once")
    if sum(spec.payload_bytes for spec in variables) > limits.JOB_BYTES_MAX:
        fields["variables"].refuse(f"at most {limits.JOB_BYTES_MAX} bytes")
    partitions = tuple(
        _partition(PartitionId(index), each, variables)
        for index, each in enumerate(fields["partitions"].items(limits.PARTITIONS_MAX))
    )
    _check_cover(fields["partitions"], partitions, variables)
    return JobLayout(variables, optimizer, partitions)


def _optimizer(node: Node) -> OptimizerSpec:
    fields = node.fields(("kind", "groups"))
    kind = fields["kind"].text(_OPTIMIZER, f"one of {', '.join(sorted(KINDS))}")
    groups = tuple(each.reals(len(KINDS[kind])) for each in fields["groups"].items(limits.GROUPS_MAX))
    spec = OptimizerSpec(kind, groups)
    try:
        check_spec(spec)
    except InvalidRequest as error:
        node.refuse(f"settings of {kind} ({error.what})")
    return spec


def _variable(node: Node, groups: int) -> VariableSpec:
    fields = node.fields(("name", "dtype", "shape", "kind", "group"))
    spec = VariableSpec(
        fields["name"].text(_NAME, f"1 to {limits.VARIABLE_NAME_CHARACTERS_MAX} characters"),
        DType(fields["dtype"].text(_DTYPE, f"one of {', '.join(dtype.value for dtype in DType)}")),
        fields["shape"].numbers(limits.DIMENSIONS_MAX, limits.VARIABLE_BYTES_MAX),
        VariableKind(fields["kind"].text(_KIND, f"one of {', '.join(kind.value for kind in VariableKind)}")),
        fields["group"].number(limits.GROUPS_MAX),
    )
    if math.prod(spec.shape) * spec.dtype.item_bytes > limits.VARIABLE_BYTES_MAX:
        node.refuse(f"a variable of at most {limits.VARIABLE_BYTES_MAX} bytes")
    if spec.kind is VariableKind.PARAMETER and (spec.group >= groups or not spec.dtype.is_floating):
        node.refuse(f"a parameter of a floating dtype in one of {groups} groups")
    return spec


def _partition(index: PartitionId, node: Node, variables: Sequence[VariableSpec]) -> PartitionLayout:
    fields = node.fields(("payload_bytes", "blocks"))
    blocks = []
    end = 0
    for each in fields["blocks"].items(limits.BLOCKS_MAX):
        numbers = each.numbers(_BLOCK_NUMBERS)
        if len(numbers) != _BLOCK_NUMBERS:
            each.refuse("variable, offset, length and position")
        block = Block(*numbers)
        if block.variable >= len(variables) or block.length == 0 or block.position != end:
            each.refuse(f"a block of one of {len(variables)} variables at byte {end}")
        end += aligned_bytes(block.length * variables[block.variable].dtype.item_bytes)
        blocks.append(block)
    if fields["payload_bytes"].number() != end:
        fields["payload_bytes"].refuse(f"{end}, where its blocks end")
    return PartitionLayout(index, end, tuple(blocks))


def _check_cover(node: Node, partitions: Sequence[PartitionLayout], variables: Sequence[VariableSpec]) -> None:
    blocks = [block for part in partitions for block in part.blocks]
    if len(blocks) > limits.BLOCKS_MAX:
        node.refuse(f"at most {limits.BLOCKS_MAX} blocks")
    ends = [0] * len(variables)
    for block in sorted(blocks, key=lambda block: (block.variable, block.offset)):
        if block.offset != ends[block.variable]:
            node.refuse(f"a block at element {ends[block.variable]} of variable {variables[block.variable].name!r}")
        ends[block.variable] = block.offset + block.length
    for spec, end in zip(variables, ends, strict=True):
        if end != spec.elements:
            node.refuse(f"blocks with all {spec.elements} elements of variable {spec.name!r}, not {end}")
