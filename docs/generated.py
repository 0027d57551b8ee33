"""The parts of pages that are written from the code: settings, errors, the command line.

A page marks such a part with `<!-- generated: NAME -->` and `<!-- end -->`. The text between is committed, so that
GitHub shows it. `.venv/bin/python docs/generated.py` writes it anew, and a test fails where it is not fresh. `make
docs` does not trust the committed text: it always takes what the code says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

PAGES = Path(__file__).parent
EVERYWHERE = {"config", "sets"}
"""Options that every command has: -c and --set."""
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def settings() -> str:
    from shardyard.config.configuration import written
    from shardyard.config.settings import catalogue

    rows = [
        f"| `{path}` | `{written(setting.default)}` | {setting.expected} | {setting.description} |"
        for path, setting in catalogue().settings.items()
    ]
    return "\n".join(["| setting | default | takes | what it is |", "|---|---|---|---|", *rows])


def errors() -> str:
    from shardyard.domain.errors import BY_CODE
    from shardyard.transport.error_codes import status_of

    rows = [
        f"| `{code}` | {status_of(kind('')).name} | {kind.why} | {kind.todo} |".replace("  |", " |")
        for code, kind in BY_CODE.items()
    ]
    return "\n".join(["| code | status | why it is an error | what to do |", "|---|---|---|---|", *rows])


def commands() -> str:
    import click

    from shardyard_launcher.cli import shardyard

    def walk(command: click.Command, context: click.Context) -> Iterator[str]:
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                if child is not None and not child.hidden:
                    yield from walk(child, click.Context(child, info_name=name, parent=context))
            return
        usage = command.collect_usage_pieces(context)
        yield f"### {context.command_path}\n"
        yield f"`{' '.join([context.command_path, *usage])}`\n"
        yield f"{' '.join((command.help or '').split())}\n"
        records = [
            parameter.get_help_record(context)
            for parameter in command.params
            if isinstance(parameter, click.Option) and parameter.name not in EVERYWHERE
        ]
        if any(records):
            yield "| option | what it does |\n|---|---|"
            yield from (
                f"| `{spelled.replace('|', '/')}` | {' '.join(said.split())} |"
                for spelled, said in filter(None, records)
            )
            yield ""

    return "\n".join(walk(shardyard, click.Context(shardyard, info_name="shardyard"))).rstrip()


PARTS: dict[str, Callable[[], str]] = {"settings": settings, "errors": errors, "commands": commands}


def fresh(text: str) -> str:
    """A page's text with its generated parts as the code has them now."""
    return PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", text)


def main() -> int:
    for page in sorted(PAGES.rglob("*.md")):
        text = page.read_text()
        if (now := fresh(text)) != text:
            page.write_text(now)
    return 0


if __name__ == "__main__":
    sys.exit(main())
