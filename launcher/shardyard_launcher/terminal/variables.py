"""Environment variables that a command is given for a script (`--env`).

Must not know: what the script does with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from shardyard.domain.errors import ConfigurationError

SET_BY_AGENTS: Final = frozenset(
    {
        "SHARDYARD_COORDINATOR",
        "SHARDYARD_WORKERS",
        "SHARDYARD_AGENT",
        "SHARDYARD_LOCAL_INDEX",
        "SHARDYARD_ERROR_FILE",
    }
)
"""From these a training process learns its place."""


def given_variables(texts: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that `NAME=VALUE` and `NAME` name; the latter has its value in `environment`. Raises
    ConfigurationError.

    >>> given_variables(["LR=0.1", "HOME"], {"HOME": "/root"})
    {'LR': '0.1', 'HOME': '/root'}
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name:
            raise ConfigurationError(
                f"--env {text}: expected NAME=VALUE or NAME", why="", todo="give the variable a name, such as LR=0.1"
            )
        if name in SET_BY_AGENTS:
            raise ConfigurationError(
                f"--env {text}: the agent sets {name}", why="", todo="leave it out; options of `run` decide about it"
            )
        if not equals and name not in environment:
            raise ConfigurationError(
                f"--env {name}: this command has no variable {name}",
                why="",
                todo=f"give it a value: --env {name}=VALUE",
            )
        found[name] = value if equals else environment[name]
    return found
