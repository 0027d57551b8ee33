"""What a state folder says of the yard that was started from it.

Owns: STATE/yard.json (which processes, where, which were restarted, which were given up), STATE/yard.lock (one start or
stop at a time). Invariants: the file is written whole or not at all, again after each process that is started, so that
`shardyard down` finds all of them even if the starter was killed half way. One process writes it at a time: the
supervisor while it lives, else the holder of the lock. Must not know: processes beyond their numbers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from shardyard.config.settings import AUTO, CHECKPOINTS, NEVER, Settings
from shardyard.domain import errors
from shardyard.runtime.failpoints import failpoint
from shardyard_launcher.yard.role_process import RoleProcess
from shardyard_worker.agent.launch_folders import FOLDER

FORMAT: Final = 1
STATE_FILE: Final = "yard.json"
LOCK_FILE: Final = "yard.lock"
LOGS: Final = "logs"
JOURNAL: Final = "coordinator"
"""The coordinator's own state folder, within."""
LAUNCHES: Final = FOLDER
"""What scripts have printed, which the agent keeps there."""
SUPERVISOR: Final = "supervisor"
RESTARTS_KEPT: Final = 50
"""The latest restarts that the file remembers."""

T = TypeVar("T", RoleProcess, "RoleRestart")
_TYPES: Final[dict[str, Callable[[Any], Any]]] = {each.__name__: each for each in (str, int, float, bool, Path)}
"""The types of the values in a state file, by their names in the dataclasses."""


@dataclass(frozen=True, slots=True)
class RoleRestart:
    """A process died and is restarted: restart `number` of `restarts_max` within `window_ms`. `died_s`: seconds since
    1970. `pid`: of the process that died. `ending`: how it died, in words that follow its name."""

    name: str
    pid: int
    ending: str
    died_s: float
    number: int
    restarts_max: int
    window_ms: int

    def __str__(self) -> str:
        within = f"within {self.window_ms / 1000:g} s"
        return f"{self.name} (pid {self.pid}) {self.ending}; restart {self.number} of {self.restarts_max} {within}"


@dataclass(frozen=True)
class YardState:
    """`restarts`: the latest, in their order. `given_up`: by a process's name, how it ended and why it is not
    restarted, in words that follow its name."""

    processes: tuple[RoleProcess, ...]
    restarts: tuple[RoleRestart, ...] = ()
    given_up: Mapping[str, str] = field(default_factory=dict)

    @property
    def roles(self) -> tuple[RoleProcess, ...]:
        """All but the supervisor."""
        return tuple(process for process in self.processes if process.role != SUPERVISOR)

    @property
    def supervisor(self) -> RoleProcess | None:
        return next((process for process in self.processes if process.role == SUPERVISOR), None)

    @property
    def coordinator(self) -> str:
        return self.address_of("coordinator")

    @property
    def agent(self) -> str:
        return self.address_of("agent")

    def address_of(self, role: str) -> str:
        """The first address of a role; empty if none has one yet."""
        return next((process.address for process in self.processes if process.role == role), "")

    def write(self, folder: Path) -> None:
        text = json.dumps(
            {
                "format": FORMAT,
                "coordinator": self.coordinator,
                "processes": [{**asdict(process), "log": str(process.log)} for process in self.processes],
                "restarts": [asdict(restart) for restart in self.restarts[-RESTARTS_KEPT:]],
                "given_up": dict(self.given_up),
            }
        )
        part = folder / (STATE_FILE + ".part")
        try:
            part.write_text(text + "\n", encoding="utf-8")
        except OSError:
            part.unlink(missing_ok=True)
            raise
        failpoint("yard.before_rename")
        os.replace(part, folder / STATE_FILE)
        failpoint("yard.after_rename")


def read_state(folder: Path) -> YardState | None:
    """None if no yard was started from this folder, or it was stopped. Raises ConfigurationError for a file of another
    origin."""
    path = folder / STATE_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}, expected {FORMAT}")
        return YardState(
            tuple(_read(RoleProcess, {"ready": bool(each["address"]), **each}) for each in document["processes"]),
            tuple(_read(RoleRestart, each) for each in document.get("restarts", ())),
            {str(name): str(why) for name, why in document.get("given_up", {}).items()},
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.ConfigurationError(
            f"{path} cannot be read: {error}",
            why="the file says which processes belong to the yard",
            todo="end the yard's processes by hand, then delete the file",
        ) from error


def coordinator_of(settings: Settings) -> str:
    """The address of the coordinator for a command: the given one, else that of the state folder's yard. Raises
    NotFound."""
    if settings.coordinator:
        return settings.coordinator
    found = read_state(Path(settings.yard.state))
    address = found.coordinator if found else ""
    if not address:
        raise errors.NotFound(
            f"no yard is up in {settings.yard.state}, and no coordinator's address was given",
            why="",
            todo="start one with `shardyard up`, or give --coordinator HOST:PORT",
        )
    return address


def checkpoints_of(settings: Settings) -> str:
    """The URL of the checkpoints of a job with these settings, in the yard of their state folder."""
    url = settings.job.checkpoint.url
    return str(Path(settings.yard.state) / JOURNAL / CHECKPOINTS) if url in (AUTO, NEVER) else url


def _read(kind: type[T], entry: dict[str, Any]) -> T:
    """A dataclass with the entry's values. Raises KeyError, TypeError, ValueError."""
    return kind(**{each.name: _TYPES[str(each.type)](entry[each.name]) for each in fields(kind)})


def forget_state(folder: Path) -> None:
    (folder / STATE_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Allows one start or stop from a folder at a time. Raises NotReady while another is under way,
    ConfigurationError if there can be no such folder."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # the lock file stays: removing it would let two processes hold "the" lock
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise errors.ConfigurationError(
            f"{folder} cannot hold the state of a yard: {error.strerror}",
            todo="give a folder that you can write, with --state or yard.state",
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise errors.NotReady(
                f"another `shardyard up` or `shardyard down` is running in {folder}",
                todo="wait until it ends, then try again",
            ) from None
        yield
    finally:
        os.close(descriptor)
