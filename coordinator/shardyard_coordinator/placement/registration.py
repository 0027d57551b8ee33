"""Compares the variables, tables and optimizer that a worker registers with those of the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from shardyard.domain import optimizers
from shardyard.domain.errors import VariableConflict
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.tables import row_optimizers
from shardyard.domain.tables.table_settings import AdmissionSettings, ExpirySettings, TableSettings
from shardyard.domain.variables import VariableSpec

T = TypeVar("T", VariableSpec, TableSettings)


def check_registration(
    layout: JobLayout,
    variables: Sequence[VariableSpec],
    optimizer: OptimizerSpec,
    tables: Sequence[TableSettings] = (),
    whose: str = "the job",
) -> None:
    """Raises VariableConflict unless a registration equals that of `whose`, which made the layout."""
    try:
        _check_same("variable", layout.variables, variables, _describe_variable, lambda left, right: left == right)
        _check_optimizer(layout.optimizer, optimizer)
        _check_same("table", layout.tables, tables, _describe_table, _is_same_table)
    except VariableConflict as error:
        raise VariableConflict(f"{error.what} (as {whose} has it)", facts=error.facts) from error


def _check_same(
    what: str,
    first: Sequence[T],
    second: Sequence[T],
    describe: Callable[[T], str],
    is_same: Callable[[T, T], bool],
) -> None:
    for index, (expected, got) in enumerate(zip(first, second, strict=False)):
        if not is_same(expected, got):
            raise VariableConflict(
                f"{what} {index} differs from the job's: expected {describe(expected)}, got {describe(got)}",
                facts={what: expected.name},
            )
    if len(first) != len(second):
        odd = max(first, second, key=len)[min(len(first), len(second))].name
        raise VariableConflict(
            f"expected the job's {len(first)} {what}s, got {len(second)}; {odd!r} is on one side only",
            facts={what: odd},
        )


def _is_same_table(first: TableSettings, second: TableSettings) -> bool:
    """Seeds may differ, and so may the room, and the place in the model: the first registration wins."""
    return replace(second, seed=first.seed, rows_max=first.rows_max, path=first.path) == first


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


def _describe_variable(spec: VariableSpec) -> str:
    return f"{spec.kind.value} {spec.name!r} {spec.dtype.value}{list(spec.shape)} in group {spec.group}"


def _describe_table(table: TableSettings) -> str:
    names = [setting.name for setting in row_optimizers.settings_of(table.optimizer)]
    settings = ", ".join(f"{name} {value:g}" for name, value in zip(names, table.group, strict=True))
    return (
        f"{table.name!r} of dim {table.dim}, {table.initial.kind.name.lower()} {table.initial.scale:g}, "
        f"{table.optimizer} ({settings})"
        + (f", {table.admission}" if table.admission != AdmissionSettings() else "")
        + (f", {table.expiry}" if table.expiry != ExpirySettings() else "")
    )
