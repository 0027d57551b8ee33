"""A job's layout as JSON, in manifests and in the coordinator's journal.

Owns: both ways. Invariants: what comes back equals what went in, and is whole (shardyard.domain.layout.checks). Must
not know: files, manifests.
"""

from __future__ import annotations

import re
from typing import Final

from shardyard.checkpoints import tables
from shardyard.domain import limits
from shardyard.domain.errors import CheckpointDamaged, InvalidRequest
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.checks import check_layout
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import KINDS, OptimizerSpec
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard.storage.json_reader import JsonNode

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
        **({"tables": [tables.to_document(table) for table in layout.tables]} if layout.tables else {}),
    }


def from_document(node: JsonNode) -> JobLayout:
    """Raises CheckpointDamaged."""
    has_tables = "tables" in node.mapping()
    fields = node.fields(("variables", "optimizer", "partitions", *(["tables"] if has_tables else [])))
    optimizer = _optimizer(fields["optimizer"])
    variables = tuple(_variable(each) for each in fields["variables"].items(limits.VARIABLES_MAX))
    partitions = tuple(
        _partition(PartitionId(index), each)
        for index, each in enumerate(fields["partitions"].items(limits.PARTITIONS_MAX))
    )
    if sum(len(part.blocks) for part in partitions) > limits.BLOCKS_MAX:
        fields["partitions"].refuse(f"at most {limits.BLOCKS_MAX} blocks")
    layout = JobLayout(variables, optimizer, partitions, tables.from_documents(fields["tables"]) if has_tables else ())
    try:
        check_layout(layout)
    except InvalidRequest as error:
        raise CheckpointDamaged(f"{node.file}: {node.place}: {error.what}") from error
    return layout


def _optimizer(node: JsonNode) -> OptimizerSpec:
    fields = node.fields(("kind", "groups"))
    kind = fields["kind"].text(_OPTIMIZER, f"one of {', '.join(sorted(KINDS))}")
    groups = tuple(each.reals(len(KINDS[kind])) for each in fields["groups"].items(limits.GROUPS_MAX))
    return OptimizerSpec(kind, groups)


def _variable(node: JsonNode) -> VariableSpec:
    fields = node.fields(("name", "dtype", "shape", "kind", "group"))
    return VariableSpec(
        fields["name"].text(_NAME, f"1 to {limits.VARIABLE_NAME_CHARACTERS_MAX} characters"),
        DType(fields["dtype"].text(_DTYPE, f"one of {', '.join(dtype.value for dtype in DType)}")),
        fields["shape"].numbers(limits.DIMENSIONS_MAX, limits.VARIABLE_BYTES_MAX),
        VariableKind(fields["kind"].text(_KIND, f"one of {', '.join(kind.value for kind in VariableKind)}")),
        fields["group"].number(limits.GROUPS_MAX),
    )


def _partition(index: PartitionId, node: JsonNode) -> PartitionLayout:
    fields = node.fields(("payload_bytes", "blocks"))
    blocks = []
    for each in fields["blocks"].items(limits.BLOCKS_MAX):
        numbers = each.numbers(_BLOCK_NUMBERS)
        if len(numbers) != _BLOCK_NUMBERS:
            each.refuse("variable, offset, length and position")
        blocks.append(Block(*numbers))
    return PartitionLayout(index, fields["payload_bytes"].number(), tuple(blocks))
