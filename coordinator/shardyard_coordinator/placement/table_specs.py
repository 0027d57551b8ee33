"""A job's embedding tables: whether the job can have them, whether workers mean the same, and how records have them.

Owns: these rules. Invariants: the first registration wins, its seeds among the rest, so that all workers read the same
rows; the room of address space that tables take at a server has a bound, whatever their number. Must not know: rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from shardyard.config.settings import JobSettings
from shardyard.domain import limits
from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.errors import ConfigurationError, InvalidRequest, VariableConflict
from shardyard.domain.layout.checks import check_stale_rows
from shardyard.domain.tables import row_optimizers
from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard_coordinator.records import (
    Body,
    DamagedRecord,
    checked_float,
    checked_items,
    checked_number,
    checked_text,
    require,
)

Tables = Sequence[TableSettings]

ROWS_MAX: Final = 1 << 26
"""Rows of a table in one partition, where there is address space for as many."""
ROWS_MAX_LEAST: Final = 1 << 12
_RECORD_ITEMS: Final = 20
_STATES: Final = 4
"""A row with its optimizer state has at most so many times its values."""


def check_settings(tables: Tables, settings: JobSettings) -> None:
    """Raises ConfigurationError for a job that cannot have tables."""
    if not tables:
        return
    for cannot, what, why, todo in (
        (
            settings.consistency.mode is ConsistencyMode.LOCAL,
            "in a job with job.consistency.mode local",
            "a round is steps that a worker takes by itself, and rows are on the servers",
            "set job.consistency.mode to sync, hybrid, async or bounded",
        ),
        (
            settings.consistency.mode is ConsistencyMode.SYNC and any(each.expiry.by_time for each in tables),
            "whose rows expire by seconds, in a job with job.consistency.mode sync",
            "which rows go depends on the time, and a step's bits depend on its work alone",
            "tell ages in steps, or set job.consistency.mode to hybrid, async or bounded",
        ),
        (
            bool(settings.consistency.rows_at_once and settings.clip.norm),
            f"in a job with job.clip.norm {settings.clip.norm:g} and job.consistency.mode hybrid",
            "rows are updated before the gradient of their step, and so its norm, is known",
            "set job.clip.norm to 0, or clip by value; or set job.consistency.mode to sync",
        ),
    ):
        if cannot:
            raise ConfigurationError(f"embedding tables {what}", why=why, todo=todo)
    stale = settings.consistency.stale
    if stale is not None:
        try:
            check_stale_rows(tables, stale)
        except InvalidRequest as error:
            raise ConfigurationError(error.what, why=error.why_text, todo=error.todo_text) from error


def fitted(tables: Tables, *, partitions: int) -> tuple[TableSettings, ...]:
    """The same, with room for so many rows in a partition as address space allows if one server has them all."""
    share = limits.TABLE_ADDRESS_BYTES // max(1, len(tables) * partitions)
    return tuple(
        replace(each, rows_max=min(each.rows_max, ROWS_MAX, max(ROWS_MAX_LEAST, share // (4 * _STATES * each.dim))))
        for each in tables
    )


def check_same(first: Tables, second: Tables) -> None:
    """Raises VariableConflict unless a registration's tables are the job's, but for their seeds and their room."""
    for expected, got in zip(first, second, strict=False):
        alike = replace(got, seed=expected.seed, rows_max=expected.rows_max)
        if alike != expected:
            raise VariableConflict(
                f"table {expected.name!r} differs from the job's: expected {_described(expected)}, got "
                f"{_described(got)}",
                facts={"table": expected.name},
            )
    if len(first) != len(second):
        odd = max(first, second, key=len)[min(len(first), len(second))].name
        raise VariableConflict(
            f"expected the job's {len(first)} tables, got {len(second)}; {odd!r} is on one side only",
            facts={"table": odd},
        )


def _described(table: TableSettings) -> str:
    names = [setting.name for setting in row_optimizers.settings_of(table.optimizer)]
    settings = ", ".join(f"{name} {value:g}" for name, value in zip(names, table.group, strict=True))
    return (
        f"{table.name!r} of dim {table.dim}, {table.initial.kind.name.lower()} {table.initial.scale:g}, "
        f"{table.optimizer} ({settings})"
        + (f", {table.admission}" if table.admission != AdmissionSettings() else "")
        + (f", {table.expiry}" if table.expiry != ExpirySettings() else "")
    )


# ---- records


def to_record(tables: Tables) -> list[object]:
    return [
        [
            each.name,
            each.dim,
            each.optimizer,
            list(each.group),
            str(each.seed),
            each.initial.kind.value,
            each.initial.scale,
            each.rows_max,
            each.admission.kind.value,
            each.admission.threshold,
            each.admission.chance,
            each.admission.cells,
            int(each.admission.zeros),
            each.expiry.age_steps,
            each.expiry.frequency_min,
            each.expiry.norm_min,
            each.expiry.rows_kept,
            each.expiry.grace_steps,
            each.expiry.age_ms,
            each.expiry.grace_ms,
        ]
        for each in tables
    ]


def of_record(body: Body) -> tuple[TableSettings, ...]:
    """Of a layout. Raises DamagedRecord."""
    items = body.items("tables")
    require(len(items) <= limits.TABLES_MAX, f"{len(items)} tables")
    return tuple(_table_of(each) for each in items)


def _table_of(item: object) -> TableSettings:
    said = checked_items(item, "a table")
    require(len(said) == _RECORD_ITEMS, f"a table of {len(said)} items")
    seed = checked_text(said[4], "a table's seed")
    kinds = {kind.value: kind for kind in InitialKind}
    admissions = {kind.value: kind for kind in Admission}
    initial, admission = checked_number(said[5], "how rows begin"), checked_number(said[8], "an admission")
    require(initial in kinds and admission in admissions, f"a table that begins as {initial}, admits as {admission}")
    try:
        return TableSettings(
            checked_text(said[0], "a table's name"),
            checked_number(said[1], "a table's dim"),
            checked_text(said[2], "a table's optimizer"),
            tuple(checked_float(value, "a setting") for value in checked_items(said[3], "a table's settings")),
            int(seed),
            InitialValues(kinds[initial], checked_float(said[6], "a scale")),
            checked_number(said[7], "rows at most"),
            AdmissionSettings(
                admissions[admission],
                checked_number(said[9], "a threshold"),
                checked_float(said[10], "a chance"),
                checked_number(said[11], "cells"),
                bool(checked_number(said[12], "a flag", most=1)),
            ),
            ExpirySettings(
                checked_number(said[13], "an age"),
                checked_number(said[14], "a frequency"),
                checked_float(said[15], "a norm"),
                checked_number(said[16], "rows kept"),
                checked_number(said[17], "a grace"),
                checked_number(said[18], "an age in ms"),
                checked_number(said[19], "a grace in ms"),
            ),
        )
    except (InvalidRequest, ValueError) as error:
        raise DamagedRecord(f"a table that cannot be: {error}") from error
