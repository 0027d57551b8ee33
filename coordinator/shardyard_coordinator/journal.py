"""The coordinator's journal: its term and its records, on disk or in memory.

Owns: a state folder with a SQLite file and a lock file. Invariants: one process at a time has a folder's journal; each
opening has a higher term than all before; `append` returns when all its records, or none, are on the disk, in order;
the records of the latest TERMS_KEPT terms are kept. Must not know: what records mean.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardyard.ground.errors import ConfigurationError
from shardyard.ground.types import Term

FILE: Final = "coordinator.sqlite"
LOCK: Final = "coordinator.lock"
TERMS_KEPT: Final = 16

_TABLES: Final = """
CREATE TABLE IF NOT EXISTS terms (term INTEGER PRIMARY KEY, time REAL NOT NULL, pid INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    term INTEGER NOT NULL,
    time REAL NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL
);
"""


@dataclass(frozen=True, slots=True)
class Record:
    """`time`: seconds since 1970."""

    number: int
    term: Term
    time: float
    kind: str
    body: Mapping[str, object]


class Journal:
    """Opens the journal of `folder` for this process; None keeps it in memory. `secluded`: no member of a former life
    can come by, as in a yard inside one process.

    Not safe for several threads at a time. Raises ConfigurationError where another process has it, or where the folder
    cannot be written.
    """

    def __init__(
        self, folder: Path | None, *, wall_clock: Callable[[], float] = time.time, secluded: bool = False
    ) -> None:
        self._wall_clock = wall_clock
        self._lock: int | None = None
        if folder is None:
            self._database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
            # nothing remembers former lives; the time of day keeps their incarnations apart from ours
            term = 1 if secluded else int(wall_clock())
        else:
            self._lock = _lock(folder)
            try:
                self._database = _open(folder / FILE)
            except sqlite3.DatabaseError as error:
                os.close(self._lock)
                raise ConfigurationError(
                    f"cannot open the journal {folder / FILE}: {error}",
                    why="the coordinator writes down what it decides before anybody is told",
                    todo="move the file away, or set yard.state to another folder",
                ) from error
            term = 1
        self.term = self._begin(term)

    def append(self, records: Sequence[tuple[str, Mapping[str, object]]]) -> None:
        """Writes records of (kind, body), all or none."""
        now = self._wall_clock()
        rows = [(self.term, now, kind, json.dumps(body, separators=(",", ":"))) for kind, body in records]
        self._database.execute("BEGIN IMMEDIATE")
        try:
            self._database.executemany("INSERT INTO records (term, time, kind, body) VALUES (?, ?, ?, ?)", rows)
        except sqlite3.Error:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def records(self) -> tuple[Record, ...]:
        """All that are kept, the oldest first."""
        rows = self._database.execute("SELECT number, term, time, kind, body FROM records ORDER BY number")
        return tuple(Record(number, Term(term), at, kind, json.loads(body)) for number, term, at, kind, body in rows)

    def close(self) -> None:
        self._database.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _begin(self, least: int) -> Term:
        self._database.executescript(_TABLES)
        (latest,) = self._database.execute("SELECT COALESCE(MAX(term), 0) FROM terms").fetchone()
        term = max(latest + 1, least)
        self._database.execute("BEGIN IMMEDIATE")
        self._database.execute("INSERT INTO terms VALUES (?, ?, ?)", (term, self._wall_clock(), os.getpid()))
        self._database.execute("DELETE FROM records WHERE term <= ?", (term - TERMS_KEPT,))
        self._database.execute("COMMIT")
        return Term(term)


def _lock(folder: Path) -> int:
    """A descriptor that holds the folder's lock until it is closed; the process's death closes it."""
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write to the state folder {folder}: {error.strerror}",
            todo="set yard.state to a folder that this user can write to",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigurationError(
            f"the coordinator's journal in {folder} is in use by process {holder}",
            why="two coordinators on one journal would both decide",
            todo=f"stop process {holder}, or set yard.state to another folder",
            facts={"pid": holder},
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
    return descriptor


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
    except sqlite3.DatabaseError:
        database.close()
        raise
    return database
