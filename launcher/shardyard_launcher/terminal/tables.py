"""Tables for people. Importing this costs time, so a command imports it when it prints one."""

from __future__ import annotations

import sys

from rich.console import Console, RenderableType
from rich.table import Table


def new_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def show(what: RenderableType) -> None:
    # without a terminal, make lines wide enough for a table's rows
    Console(width=None if sys.stdout.isatty() else 200, soft_wrap=False).print(what)
