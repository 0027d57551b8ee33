"""What the commands have in common: options for settings, the end by a signal.

Owns: `-c`, `--set`, `--log-format` and their way into settings; `StopSignals`. Must not know: what a command does.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from shardyard.runtime.configuration import Flag, Loaded

F = TypeVar("F", bound=Callable[..., Any])

ADDRESS = "HOST:PORT"


def settings_options(command: F) -> F:
    """Adds -c and --set, which every command that needs settings takes."""
    command = click.option(
        "--set", "sets", multiple=True, metavar="NAME=VALUE", help="A setting, such as job.seed=3. Wins over the file."
    )(command)
    return click.option(
        "-c", "--config", "config", metavar="FILE", help="A YAML file of settings (default: $SHARDYARD_CONFIG)."
    )(command)


def log_option(command: F) -> F:
    return click.option(
        "--log-format", type=click.Choice(["auto", "human", "json"]), help="How log lines are written."
    )(command)


@dataclass(frozen=True)
class Given:
    """Settings, with what is needed to pass them on to other processes."""

    loaded: Loaded
    config: str | None
    sets: tuple[tuple[str, Flag], ...]


def load_given(config: str | None, sets: tuple[str, ...], flags: dict[str, object] | None = None) -> Given:
    """Settings of a command: file < environment < --set < the command's own flags. Raises ConfigurationError."""
    from shardyard.runtime.configuration import CONFIG_VARIABLE, load, parse_set

    file = config or os.environ.get(CONFIG_VARIABLE) or None
    parsed = tuple(parse_set(text) for text in sets)
    own = {path: value for path, value in (flags or {}).items() if value is not None}
    loaded = load(None if file is None else Path(file), os.environ, {**dict(parsed), **own})
    for notice in loaded.notices:
        click.echo(f"note: {notice}", err=True)
    return Given(loaded, file, parsed)


class StopSignals:
    """SIGINT and SIGTERM set an event, in place of what they did before, while the block lasts. `exit_code` is what
    a program ends with that such a signal has stopped; None while none came."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._number: int | None = None

    @property
    def exit_code(self) -> int | None:
        return None if self._number is None else 128 + self._number

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._on) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *ended: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._number is None:
            self._number = number
        self.stop.set()
