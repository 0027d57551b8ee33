"""Makes the tables of one partition, empty or from a checkpoint, and cuts them together.

Invariants: a returned table is complete; either all tables are cut, or none. Must not know: pushes, ledgers, when a
partition is open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardyard.checkpoints.rows_file import Cells, Removed
from shardyard.checkpoints.table_state import TableState
from shardyard.domain.errors import CheckpointDamaged, ShardyardError, TableError
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.tables.table_settings import TableSettings
from shardyard_ps_server.tables.cuts import TableCut
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.tables.table import Table

Tables = Mapping[str, Table]
Since = Mapping[str, int]
"""By table name, the generation of an earlier cut. A later cut then has only what changed since."""


def make_tables(layout: JobLayout, budget: Budget | None = None) -> Tables:
    """Makes empty tables; `budget`: the server's. Raises TableError if address space is refused."""
    return {settings.name: Table(in_partition(settings, layout), budget) for settings in layout.tables}


def in_partition(settings: TableSettings, layout: JobLayout) -> TableSettings:
    """Returns the settings for one partition. The bound on a table's rows is divided between all partitions, rounded
    up."""
    kept = -(-settings.expiry.rows_kept // len(layout.partitions))
    if kept == settings.expiry.rows_kept:
        return settings  # the same object in all partitions, which each push and look-up compare
    return replace(settings, expiry=replace(settings.expiry, rows_kept=kept))


def read_tables(states: tuple[TableState, ...], budget: Budget | None = None) -> Tables:
    """Reads the tables of a checkpoint, one file at a time. Raises CheckpointDamaged, CheckpointNotFound,
    StorageUnavailable, and TableError if address space is refused."""
    return {state.settings.name: _read(state, budget) for state in states}


def cut_tables(tables: Tables, since: Since) -> Mapping[str, TableCut]:
    """Cuts all tables; nothing may be pushed meanwhile. A table that does not know what has changed since then is cut
    whole. Raises NotReady while a reader reads a whole table, and TableError; then none is cut."""
    found: dict[str, TableCut] = {}
    try:
        for name, table in tables.items():
            known = since.get(name)
            found[name] = table.cuts.take(known if known == table.cuts.known_since else None)
    except ShardyardError:
        for cut in found.values():
            cut.close()
        raise
    return found


def _read(state: TableState, budget: Budget | None) -> Table:
    table = Table(in_partition(state.settings, state.layout), budget)
    called = f"table {state.settings.name!r} of partition {state.partition} in {state.storage.locate(state.folder)}"
    try:
        for part in state.parts():
            if isinstance(part, Removed):
                table.remove(part.ids)
            elif isinstance(part, Cells):
                table.load_cells(part.cells, part.begin)
            else:
                table.load(part.ids, part.values, part.state, part.frequencies, part.steps)
        table.resume(state.entry.updates, state.entry.now_ms)
    except TableError as error:  # each file is intact, but they do not fit together
        raise CheckpointDamaged(f"{called}: {error.what}") from error
    found, expected = (table.rows, table.state.entries), (state.entry.rows, state.entry.ids)
    if found != expected:
        raise CheckpointDamaged(
            f"{called} has {found[0]} rows and {found[1]} ids; the manifest says {expected[0]} and {expected[1]}"
        )
    return table
