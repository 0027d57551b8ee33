"""How a job looks in a notebook. Invariant: names and reasons are escaped; they are never read as markup. Must not
know: what the rows say."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Returns HTML: a title, and rows of a name and a value."""
    cells = "".join(
        f'<tr><th style="text-align: left">{escape(name)}</th><td style="text-align: left">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table><caption>{escape(title)}</caption><tbody>{cells}</tbody></table>"
