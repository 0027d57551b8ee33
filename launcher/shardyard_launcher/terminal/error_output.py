"""Prints an error of Shardyard: what happened, why, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from shardyard.domain.errors import ShardyardError


def print_error(error: ShardyardError) -> None:
    """What, why and what to do, each on lines of its own."""
    lines = [f"error: {error.what.rstrip()}"]
    if error.why_text:
        lines.append(f"  why: {error.why_text}")
    if error.todo_text:
        lines.append(f"  what to do: {error.todo_text}")
    click.echo("\n".join(lines), err=True)
