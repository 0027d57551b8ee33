"""What an agent starts: scripts below certain folders, with certain environment variables.

Owns: the rules of the settings agent.allow and agent.variables. Invariant: symbolic links are followed before a path is
compared. Must not know: who asks for a launch, which other forms a request must have (service).
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from pathlib import Path

from shardyard.config.configuration import PREFIX
from shardyard.config.settings import AUTO, AgentSettings
from shardyard.domain.errors import NotPermitted


class Allowed:
    """The rules of an agent with `settings`."""

    def __init__(self, settings: AgentSettings) -> None:
        self._folders = [Path(each).resolve() for each in settings.allow.split()]
        patterns = settings.variables
        if patterns == AUTO:
            patterns = "" if self._folders else "*"
        self._variables = patterns.split()

    def check_script(self, script: Path) -> None:
        """Raises NotPermitted for a script that is not below one of the folders."""
        if self._folders and not any(script.resolve().is_relative_to(folder) for folder in self._folders):
            raise NotPermitted(
                f"this agent does not start {script}",
                why=f"it starts scripts below {' and '.join(map(str, self._folders))} only",
                todo="put the script there, or add its folder to agent.allow where the agent is started",
            )

    def check_variables(self, given: Mapping[str, str]) -> None:
        """Raises NotPermitted if a launch sets variables that it may not set. Those of Shardyard, and those that have
        the same value in the agent's own environment, are always allowed."""
        refused = sorted(
            name
            for name, value in given.items()
            if not name.startswith(PREFIX)
            and os.environ.get(name) != value
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self._variables)
        )
        if refused:
            raise NotPermitted(
                f"this agent does not let a launch set the environment variables {' '.join(refused[:20])}",
                why="variables such as LD_PRELOAD and PYTHONPATH decide which code runs",
                todo="leave them out, or add their names to agent.variables where the agent is started",
            )
