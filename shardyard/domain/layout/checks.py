"""Checks the variables and the layout of a job, wherever they come from: a message, a manifest, or a journal.

The rules: blocks lie in their partition one after the other (docs/reference/protocol.md); each element of each variable
is in exactly one block; parameters are not cut if their optimizer needs them whole; names are unique. Must not know:
how layouts are planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardyard.domain import limits, optimizers
from shardyard.domain.consistency import StaleRule
from shardyard.domain.errors import InvalidRequest, MalformedPayload, TooLarge
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout, aligned_bytes
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.domain.variables import VariableKind, VariableSpec


def check_layout(layout: JobLayout) -> None:
    """Raises MalformedPayload, and what check_variables and optimizers.check_spec raise."""
    optimizers.check_spec(layout.optimizer)
    check_variables(layout.variables, len(layout.optimizer.groups))
    for part in layout.partitions:
        _check_blocks(part, layout.variables)
        if layout.optimizer.kind in optimizers.WHOLE_VARIABLES:
            _check_whole(layout.optimizer.kind, part.blocks, layout.variables)
    _check_cover([block for part in layout.partitions for block in part.blocks], layout.variables)
    check_tables(layout.tables)


def check_variables(variables: Sequence[VariableSpec], groups: int) -> None:
    """Raises InvalidRequest for a name that comes twice or for a group that does not exist, TooLarge."""
    seen: set[str] = set()
    for spec in variables:
        check_variable(spec)
        if spec.name in seen:
            raise InvalidRequest(f"variable {spec.name!r} comes twice")
        seen.add(spec.name)
        if spec.kind is VariableKind.PARAMETER and spec.group >= groups:
            raise InvalidRequest(f"variable {spec.name!r} is in parameter group {spec.group}; there are {groups}")
    total = sum(spec.payload_bytes for spec in variables)
    if total > limits.JOB_BYTES_MAX:
        raise TooLarge(f"the variables have {total} bytes; at most {limits.JOB_BYTES_MAX}")


def check_stale_rows(tables: Sequence[TableSettings], rule: StaleRule) -> None:
    """Raises InvalidRequest if a rule for stale gradients cannot be applied to the rows of tables."""
    if tables and rule.compensation:
        raise InvalidRequest(
            "stale gradients of embedding tables cannot be compensated",
            why="this needs the values on which a gradient was computed, and servers do not keep versions of rows",
            todo="set job.consistency.delay_compensation to 0; staleness_scaling works with tables",
        )
    for table in tables:
        if rule.divides_rate and table.optimizer == "ftrl":
            raise InvalidRequest(
                f"table {table.name!r} has the optimizer ftrl, and the job divides the rates of stale gradients",
                why="with ftrl a row's values, and not their change, are proportional to the rate: a late gradient"
                " would shrink the row",
                todo="give the table another optimizer, or set job.consistency.staleness_scaling to never",
            )


def check_tables(tables: Sequence[TableSettings]) -> None:
    """Raises InvalidRequest for a name that is empty or comes twice, TooLarge."""
    if len(tables) > limits.TABLES_MAX:
        raise TooLarge(f"a job has {len(tables)} tables; at most {limits.TABLES_MAX} are allowed")
    seen: set[str] = set()
    for table in tables:
        if not table.name:
            raise InvalidRequest("a table has no name")
        if len(table.name) > limits.VARIABLE_NAME_CHARACTERS_MAX:
            raise TooLarge(
                f"the name of a table has {len(table.name)} characters; at most {limits.VARIABLE_NAME_CHARACTERS_MAX}"
            )
        if table.name in seen:
            raise InvalidRequest(f"table {table.name!r} comes twice")
        seen.add(table.name)
        if not -limits.TABLE_SEED_MAX <= table.seed <= limits.TABLE_SEED_MAX:
            raise InvalidRequest(f"table {table.name!r} has the seed {table.seed}; expected a number of 64 bits")


def check_variable(spec: VariableSpec) -> None:
    """Raises InvalidRequest, TooLarge."""
    if not spec.name:
        raise InvalidRequest("a variable has no name")
    if len(spec.shape) > limits.DIMENSIONS_MAX:
        raise TooLarge(
            f"variable {spec.name!r} has {len(spec.shape)} dimensions; at most {limits.DIMENSIONS_MAX} are taken"
        )
    if spec.payload_bytes > limits.VARIABLE_BYTES_MAX:
        raise TooLarge(f"variable {spec.name!r} has {spec.payload_bytes} bytes; at most {limits.VARIABLE_BYTES_MAX}")
    if spec.kind is VariableKind.PARAMETER and not spec.dtype.is_floating:
        raise InvalidRequest(f"parameter {spec.name!r} is of dtype {spec.dtype.value}; expected float32 or float64")


def _check_whole(kind: str, blocks: Sequence[Block], variables: Sequence[VariableSpec]) -> None:
    for block in blocks:
        spec = variables[block.variable]
        if spec.kind is VariableKind.PARAMETER and block.length != spec.elements:
            raise MalformedPayload(
                f"a block of {block.length} elements of variable {spec.name!r}, which has {spec.elements}; "
                f"{kind!r} needs it whole"
            )


def _check_blocks(part: PartitionLayout, variables: Sequence[VariableSpec]) -> None:
    end = 0
    for block in part.blocks:
        if block.variable >= len(variables):
            raise MalformedPayload(
                f"a block of variable {block.variable} in partition {part.partition}; it does not exist"
            )
        spec = variables[block.variable]
        if block.offset + block.length > spec.elements:
            raise MalformedPayload(f"a block of partition {part.partition} beyond the end of variable {spec.name!r}")
        if block.position != end:
            raise MalformedPayload(
                f"a block of variable {spec.name!r} at byte {block.position} of partition {part.partition}; expected "
                f"{end}"
            )
        end = block.position + aligned_bytes(block.length * spec.dtype.item_bytes)
    if end != part.payload_bytes:
        raise MalformedPayload(
            f"the blocks of partition {part.partition} take {end} bytes; announced {part.payload_bytes}"
        )


def _check_cover(blocks: Iterable[Block], variables: Sequence[VariableSpec]) -> None:
    ends = [0] * len(variables)
    for block in sorted(blocks, key=lambda block: (block.variable, block.offset)):
        name = variables[block.variable].name
        if block.offset != ends[block.variable] or block.length == 0:
            raise MalformedPayload(
                f"a block of {block.length} elements at element {block.offset} of variable {name!r}; expected one at "
                f"{ends[block.variable]}, after the one before"
            )
        ends[block.variable] += block.length
    for spec, end in zip(variables, ends, strict=True):
        if end != spec.elements:
            raise MalformedPayload(f"the blocks of variable {spec.name!r} have {end} elements; it has {spec.elements}")
