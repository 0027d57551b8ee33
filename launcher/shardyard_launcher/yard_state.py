"""What a state folder says of the yard that was started from it.

Owns: STATE/yard.json (which processes, where), STATE/yard.lock (one start or stop at a time). Invariants: the file is
written whole or not at all, anew after each process that is started, so that `shardyard down` finds all of them even
if the one who started them was killed half way. Must not know: processes beyond their numbers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardyard.ground import errors
from shardyard_launcher.role_process import RoleProcess

FORMAT: Final = 1
STATE_FILE: Final = "yard.json"
LOCK_FILE: Final = "yard.lock"
LOGS: Final = "logs"


@dataclass(frozen=True)
class YardState:
    processes: tuple[RoleProcess, ...]

    def address_of(self, role: str) -> str:
        """The first address of a role; empty where none has one yet."""
        return next((process.address for process in self.processes if process.role == role), "")

    def write(self, folder: Path) -> None:
        entries = [
            {
                "name": process.name,
                "role": process.role,
                "pid": process.pid,
                "created_s": process.created_s,
                "log": str(process.log),
                "address": process.address,
            }
            for process in self.processes
        ]
        text = json.dumps({"format": FORMAT, "coordinator": self.address_of("coordinator"), "processes": entries})
        part = folder / (STATE_FILE + ".part")
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, folder / STATE_FILE)


def read_state(folder: Path) -> YardState | None:
    """None where no yard was started from this folder, or it was stopped. Raises ConfigurationError for a file that is
    not ours."""
    path = folder / STATE_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}, expected {FORMAT}")
        return YardState(
            tuple(
                RoleProcess(
                    name=str(entry["name"]),
                    role=str(entry["role"]),
                    pid=int(entry["pid"]),
                    created_s=float(entry["created_s"]),
                    log=Path(entry["log"]),
                    address=str(entry["address"]),
                )
                for entry in document["processes"]
            )
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise errors.ConfigurationError(
            f"{path} cannot be read: {error}",
            why="it says which processes belong to the yard",
            todo="end the yard's processes by hand, then delete the file",
        ) from error


def forget_state(folder: Path) -> None:
    (folder / STATE_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One start or stop from a folder at a time. Raises NotReady while another is at it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    # the lock file stays: removing it would let two processes hold "the" lock
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise errors.NotReady(
                f"another `shardyard up` or `shardyard down` is at work in {folder}",
                todo="let it finish, then try again",
            ) from None
        yield
    finally:
        os.close(descriptor)
