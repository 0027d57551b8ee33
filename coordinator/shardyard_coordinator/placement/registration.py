"""Compares the variables, tables and optimizer that a worker registers with those of the job."""

from __future__ import annotations

from collections.abc import Sequence

from shardyard.domain import optimizers
from shardyard.domain.errors import VariableConflict
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.domain.variables import VariableSpec
from shardyard_coordinator.placement.table_specs import check_same


def check_registration(
    layout: JobLayout,
    variables: Sequence[VariableSpec],
    optimizer: OptimizerSpec,
    tables: Sequence[TableSettings] = (),
    whose: str = "the job",
) -> None:
    """Raises VariableConflict unless a registration equals that of `whose`, which made the layout."""
    try:
        _check_variables(layout.variables, variables)
        _check_optimizer(layout.optimizer, optimizer)
        check_same(layout.tables, tables)
    except VariableConflict as error:
        raise VariableConflict(f"{error.what} (as {whose} has it)", facts=error.facts) from error


def _check_variables(first: Sequence[VariableSpec], second: Sequence[VariableSpec]) -> None:
    for index, (expected, got) in enumerate(zip(first, second, strict=False)):
        if expected != got:
            raise VariableConflict(
                f"variable {index} differs from the job's: expected {_described(expected)}, got {_described(got)}",
                facts={"variable": expected.name},
            )
    if len(first) != len(second):
        longer = max(first, second, key=len)
        odd = longer[min(len(first), len(second))].name
        raise VariableConflict(
            f"expected the job's {len(first)} variables, got {len(second)}; {odd!r} is on one side only",
            facts={"variable": odd},
        )


def _check_optimizer(first: OptimizerSpec, second: OptimizerSpec) -> None:
    if first.kind != second.kind:
        raise VariableConflict(f"the job's optimizer is {first.kind!r}, this worker's is {second.kind!r}")
    if len(first.groups) != len(second.groups):
        raise VariableConflict(
            f"the job's optimizer has {len(first.groups)} parameter groups, this worker's has {len(second.groups)}"
        )
    names = optimizers.setting_names(first.kind)
    for index, (expected, got) in enumerate(zip(first.groups, second.groups, strict=True)):
        for name, left, right in zip(names, expected, got, strict=True):
            if left != right:
                raise VariableConflict(
                    f"setting {name} of parameter group {index}: expected {left!r} as the job has it, got {right!r}",
                    facts={"setting": name},
                )


def _described(spec: VariableSpec) -> str:
    return f"{spec.kind.value} {spec.name!r} {spec.dtype.value}{list(spec.shape)} in group {spec.group}"
