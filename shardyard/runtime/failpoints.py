"""Named places in the code where a test can end, fail or delay a process, to see what a crash there leaves behind.

    shardyard server --failpoints storage.before_rename=exit@3,storage.after_write=sleep:50

The option is not in the help text, and no environment variable arms anything: what a process inherits must not end it.
Each entry is NAME=ACTION. With @N the action runs only the N-th time that the place is passed; otherwise each time.
The NAME "*" means every place. Actions: `exit` ends the process at once with EXIT_CODE, like kill -9 (nothing is
flushed, no handler runs); `error` raises OSError (EIO, or the one that is named, as in `error:ENOSPC`); `sleep:MS`.

Owns: which places are armed. This is the only module state of the library, because a place in the middle of a write has
no argument to get it from. Invariant: a place for which nothing is armed costs one look-up. Must not know: what happens
at a place. Pure cores have no such places.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from shardyard.domain.errors import ConfigurationError

EXIT_CODE: Final = 91
SLEEP_MS_MAX: Final = 600_000
EVERY_PLACE: Final = "*"

_ENTRY: Final = re.compile(
    r"(?P<name>[a-z0-9_.]+|\*)=(?P<action>[a-z]+)(?::(?P<argument>[A-Za-z0-9]+))?(?:@(?P<at>\d+))?"
)

Action = Callable[[str], None]
"""A function that is called with the name of the place."""


@dataclass(frozen=True)
class _Armed:
    name: str
    action: Action
    at: int | None
    passings: Iterator[int] = field(default_factory=lambda: itertools.count(1))


_armed: list[_Armed] = []


def failpoint(name: str) -> None:
    """Marks a place. Raises what an armed action raises."""
    if not _armed:
        return
    for each in tuple(_armed):
        if each.name in (name, EVERY_PLACE) and (each.at is None or next(each.passings) == each.at):
            each.action(name)


@contextlib.contextmanager
def armed(name: str, action: Action, *, at: int | None = None) -> Iterator[None]:
    """Within the block, calls `action` at the place: each time, or only the `at`-th time (1 is the first)."""
    mine = _Armed(name, action, at)
    _armed.append(mine)
    try:
        yield
    finally:
        _armed.remove(mine)


def arm(text: str) -> None:
    """Arms places for as long as this process lives. Raises ConfigurationError."""
    _armed.extend(_parse(text))


def action_of(text: str) -> Action:
    """The action for a text such as "exit", "error:ENOSPC" or "sleep:50". Raises ConfigurationError."""
    kind, _, argument = text.partition(":")
    if kind == "exit" and not argument:
        return _exit
    if kind == "error" and (number := getattr(errno, argument or "EIO", None)) is not None:
        return partial(_fail, number)
    if kind == "sleep" and argument.isdigit() and int(argument) <= SLEEP_MS_MAX:
        return partial(_sleep, int(argument))
    raise _wrong(text, f"exit, error, error:NAME (as ENOSPC) or sleep:MS (at most {SLEEP_MS_MAX})")


def _parse(text: str) -> list[_Armed]:
    found = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        match = _ENTRY.fullmatch(entry)
        if match is None or match["at"] == "0":
            raise _wrong(entry, "NAME=exit, NAME=error or NAME=sleep:MS, with @N after it for the N-th time only")
        action = action_of(match["action"] + (f":{match['argument']}" if match["argument"] else ""))
        found.append(_Armed(match["name"], action, None if match["at"] is None else int(match["at"])))
    return found


def _wrong(text: str, expected: str) -> ConfigurationError:
    return ConfigurationError(f"--failpoints has {text!r}; expected {expected}", todo="correct it, or leave it out")


def _exit(_: str) -> None:
    os._exit(EXIT_CODE)


def _fail(number: int, name: str) -> None:
    raise OSError(number, f"{os.strerror(number)} (failpoint {name})")


def _sleep(wait_ms: int, _: str) -> None:
    time.sleep(wait_ms / 1_000)
