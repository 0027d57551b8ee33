"""A job's layout as JSON, in manifests and in the coordinator's journal.

Invariants: what is read equals what was written, and is complete (shardyard.domain.layout.checks). Must not know:
files, manifests.
"""

from __future__ import annotations

from typing import Final

from shardyard.domain import limits
from shardyard.domain.errors import CheckpointDamaged, InvalidRequest
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.checks import check_layout
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.domain.variables import VariableSpec
from shardyard.storage.json_reader import JsonNode, document_of

_BLOCK_NUMBERS: Final = 4


def to_document(layout: JobLayout) -> dict[str, object]:
    partitions = [
        {
            "payload_bytes": part.payload_bytes,
            "blocks": [[block.variable, block.offset, block.length, block.position] for block in part.blocks],
        }
        for part in layout.partitions
    ]
    document = {
        "variables": document_of(layout.variables),
        "optimizer": document_of(layout.optimizer),
        "partitions": partitions,
    }
    return document | ({"tables": document_of(layout.tables)} if layout.tables else {})


def from_document(node: JsonNode) -> JobLayout:
    """Raises CheckpointDamaged."""
    has_tables = "tables" in node.mapping()
    fields = node.fields(("variables", "optimizer", "partitions", *(["tables"] if has_tables else [])))
    tables = fields["tables"].items(limits.TABLES_MAX) if has_tables else ()
    layout = JobLayout(
        tuple([each.to(VariableSpec) for each in fields["variables"].items(limits.VARIABLES_MAX)]),
        fields["optimizer"].to(OptimizerSpec),
        tuple(
            [
                _partition(PartitionId(index), each)
                for index, each in enumerate(fields["partitions"].items(limits.PARTITIONS_MAX))
            ]
        ),
        tuple([each.to(TableSettings, signed=("seed",)) for each in tables]),
    )
    if has_tables and not layout.tables:
        fields["tables"].refuse("at least one table")
    try:
        check_layout(layout)
    except InvalidRequest as error:
        raise CheckpointDamaged(f"{node.file}: {node.place}: {error.what}") from error
    return layout


def _partition(index: PartitionId, node: JsonNode) -> PartitionLayout:
    fields = node.fields(("payload_bytes", "blocks"))
    blocks = []
    for each in fields["blocks"].items(limits.BLOCKS_MAX):
        numbers = each.numbers(_BLOCK_NUMBERS)
        if len(numbers) != _BLOCK_NUMBERS:
            each.refuse("variable, offset, length and position")
        blocks.append(Block(*numbers))
    return PartitionLayout(index, fields["payload_bytes"].number(), tuple(blocks))
