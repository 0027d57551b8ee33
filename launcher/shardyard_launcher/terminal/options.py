"""What the commands have in common: options for settings, the end by a signal.

Owns: `-c`, `--set`, `--log-format` and their way into settings; `StopSignals`. Must not know: what a command does.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from shardyard.config.configuration import Flag, Loaded
    from shardyard.domain.errors import ConfigurationError

F = TypeVar("F", bound=Callable[..., Any])

ADDRESS = "HOST:PORT"

coordinator_option = click.option(
    "--coordinator", metavar=ADDRESS, help="The coordinator's address (default: that of the yard in --state)."
)
state_option = click.option(
    "--state", metavar="DIR", help="The folder of a yard on this machine (default: the setting yard.state)."
)


def settings_options(command: F) -> F:
    """Adds -c and --set, which every command that needs settings takes."""
    command = click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="NAME=VALUE",
        help="A setting, such as job.seed=3. It overrides the file.",
    )(command)
    return click.option(
        "-c", "--config", "config", metavar="FILE", help="A YAML file of settings (default: $SHARDYARD_CONFIG)."
    )(command)


def yard_options(command: F) -> F:
    """Adds --coordinator, --state, -c and --set. The command gets the `settings` that they make."""

    @wraps(command)
    def called(
        *, coordinator: str | None, state: str | None, config: str | None, sets: tuple[str, ...], **given: Any
    ) -> Any:
        flags: dict[str, object] = {"coordinator": coordinator, "yard.state": state}
        return command(settings=load_given(config, sets, flags).loaded.settings, **given)

    return cast(F, coordinator_option(state_option(settings_options(called))))


def log_option(command: F) -> F:
    return click.option("--log-format", type=click.Choice(["auto", "human", "json"]), help="The format of log lines.")(
        command
    )


def insecure_network_option(command: F) -> F:
    return click.option(
        "--insecure-network",
        is_flag=True,
        help="Listen on the network without TLS (security.tls=false). Whoever reaches a port can run programs here.",
    )(command)


def script_options(*, required: bool = True) -> Callable[[F], F]:
    """Adds -c, --set and --log-format, and the script with its arguments as `command`."""
    metavar = "SCRIPT [ARGUMENTS...]" if required else "[SCRIPT ARGUMENTS...]"
    script = click.argument("command", nargs=-1, type=click.UNPROCESSED, required=required, metavar=metavar)
    return lambda command: settings_options(log_option(script(command)))


def require_script(path: str) -> None:
    """Raises ConfigurationError if there is no such file."""
    if not Path(path).is_file():
        raise _no_script(path)


def _no_script(path: str) -> ConfigurationError:
    from shardyard.domain.errors import ConfigurationError

    todo = "check the path; the command's own options come before the script"
    if path.startswith("-"):
        todo = "put the command's own options before the script; `--help` lists them"
    return ConfigurationError(f"there is no script {path}", why="", todo=todo)


@dataclass(frozen=True)
class Given:
    """Settings, with what is needed to pass them on to other processes: `sets` has --set and --log-format."""

    loaded: Loaded
    config: str | None
    sets: tuple[tuple[str, Flag], ...]


def load_given(config: str | None, sets: tuple[str, ...], flags: dict[str, object] | None = None) -> Given:
    """Settings of a command: file < environment < --set < the command's own flags. Raises ConfigurationError."""
    from shardyard.config.configuration import CONFIG_VARIABLE, Flag, load, parse_set

    file = config or os.environ.get(CONFIG_VARIABLE) or None
    parsed = tuple(parse_set(text) for text in sets)
    own = {path: value for path, value in (flags or {}).items() if value is not None}
    loaded = load(None if file is None else Path(file), os.environ, {**dict(parsed), **own})
    for notice in loaded.notices:
        click.echo(f"note: {notice}", err=True)
    # all processes of a yard write logs in the same format, including the training processes
    if "log.format" in own:
        parsed = (*parsed, ("log.format", Flag(str(own["log.format"]), "--log-format")))
    return Given(loaded, file, parsed)


class StopSignals:
    """SIGINT and SIGTERM set `stop` while the block lasts, instead of their usual effect, and a second one sets
    `hurry`. `exit_code`: the program's exit code after such a signal; None if none came.

    A thread sets the events. A signal's handler runs on top of the main thread's present code. If that code waits for
    the event, or sets it, a handler that set the event would wait for its lock for ever.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.hurry = threading.Event()
        self._number: int | None = None

    @property
    def exit_code(self) -> int | None:
        return None if self._number is None else 128 + self._number

    def __enter__(self) -> StopSignals:
        read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._listen, args=(read,), name="stop-signals", daemon=True)
        self._thread.start()
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *ended: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._write)
        self._thread.join()

    def _listen(self, read: int) -> None:
        """Reads the numbers of signals that the interpreter writes, until the other end is closed."""
        with os.fdopen(read, "rb", buffering=0) as stream:
            while got := stream.read(1):
                if got[0] in (signal.SIGINT, signal.SIGTERM):
                    if self._number is None:
                        self._number = got[0]
                    else:
                        self.hurry.set()
                    self.stop.set()


def _ignore(number: int, frame: FrameType | None) -> None:
    """The signal's number is written to the pipe before this is called."""
