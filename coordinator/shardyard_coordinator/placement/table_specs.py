"""Which jobs can have embedding tables, and how much address space a table gets.

Invariant: the address space that tables take at a server is bounded, whatever their number. Must not know: rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from shardyard.config.settings import JobSettings
from shardyard.domain import limits
from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.errors import ConfigurationError, InvalidRequest
from shardyard.domain.layout.checks import check_stale_rows
from shardyard.domain.tables.table_settings import TableSettings

Tables = Sequence[TableSettings]

ROWS_MAX: Final = 1 << 26
"""Rows of a table in one partition, where there is address space for as many."""
ROWS_MAX_LEAST: Final = 1 << 12
_STATES: Final = 4
"""A row with its optimizer state is at most this many times as large as its values."""


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
    """The same tables. A partition has room for as many rows as address space allows if one server has all
    partitions."""
    share = limits.TABLE_ADDRESS_BYTES // max(1, len(tables) * partitions)
    return tuple(
        replace(each, rows_max=min(each.rows_max, ROWS_MAX, max(ROWS_MAX_LEAST, share // (4 * _STATES * each.dim))))
        for each in tables
    )
