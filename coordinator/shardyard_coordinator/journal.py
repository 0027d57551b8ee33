"""The coordinator's journal: its term and its records, on disk or in memory.

Owns: a state folder with a SQLite file and a lock file, which also notes the term and the number of the last record:
SQLite takes a damaged tail of its log for one that was never written, and a file that was moved away takes its terms
along. Invariants: one process at a time has a folder's journal; each opening has a higher term than all before;
`append` returns when all its records, or none, are on the disk, in order; `replace` leaves the old records or the new
ones; `records` gives all of them as they were written, or refuses: a file of another format, a record that is missing,
a wrong checksum. Must not know: what records mean.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardyard.ground.errors import ConfigurationError
from shardyard.ground.failpoints import failpoint
from shardyard.ground.types import Term
from shardyard_coordinator.records import Entry, Record

FILE: Final = "coordinator.sqlite"
LOCK: Final = "coordinator.lock"
TERMS_KEPT: Final = 16
NOTE_BYTES: Final = 80
FORMAT: Final = 1
"""Of the file and of what records mean. Kept as SQLite's user_version; 0 is that of a file without a format."""

_TABLES: Final = (
    """CREATE TABLE terms (
        term INTEGER PRIMARY KEY, time REAL NOT NULL, pid INTEGER NOT NULL, checksum INTEGER NOT NULL)""",
    """CREATE TABLE records (
        number INTEGER PRIMARY KEY AUTOINCREMENT, term INTEGER NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL,
        body TEXT NOT NULL, checksum INTEGER NOT NULL)""",
    "CREATE TABLE kept (first INTEGER NOT NULL)",
    "INSERT INTO kept VALUES (1)",
    f"PRAGMA user_version = {FORMAT}",
)
_INSERT: Final = "INSERT INTO records (number, term, time, kind, body, checksum) VALUES (?, ?, ?, ?, ?, ?)"
_SELECT: Final = """
    SELECT number, term, time, CAST(kind AS BLOB), CAST(body AS BLOB), checksum FROM records ORDER BY number"""
_UNREADABLE: Final = (sqlite3.DatabaseError, ValueError, TypeError)
"""What reading a damaged file raises: SQLite's own words may quote bytes that are no text, and a number may be none."""
_REFUSED_WHY: Final = "a coordinator that goes on from half of its records would decide against what was decided"
_REFUSED_TODO: Final = (
    "start the release that wrote it, or bring the folder back from a copy; else move it away, or set yard.state to "
    "another folder: the jobs that it knows are lost then"
)


@dataclass(frozen=True, slots=True)
class Note:
    """What stands in the lock file beside the holder's process id: the last record's number, and the term."""

    record: int = 0
    term: int = 0


class Journal:
    """Opens the journal of `folder` for this process; None keeps it in memory. `secluded`: no member of a former life
    can come by, as in a yard inside one process.

    Not safe for several threads at a time. Raises ConfigurationError where another process has it, where the folder
    cannot be written, where the file is damaged or of another format.
    """

    def __init__(
        self, folder: Path | None, *, wall_clock: Callable[[], float] = time.time, secluded: bool = False
    ) -> None:
        self._wall_clock = wall_clock
        self._lock: int | None = None
        noted = Note()
        if folder is None:
            self.name = "in memory"
            self._database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
            # nothing remembers former lives; the time of day keeps their incarnations apart from ours
            term = 1 if secluded else int(wall_clock())
        else:
            self.name = str(folder / FILE)
            self._lock, noted = _lock(folder)
            try:
                if noted.record and (folder / FILE).exists() and not (folder / FILE).stat().st_size:
                    raise sqlite3.DatabaseError(f"it is empty; record {noted.record} had been written")
                self._database = _open(folder / FILE)
            except _UNREADABLE as error:
                os.close(self._lock)
                raise ConfigurationError(
                    f"cannot open the journal {folder / FILE}: {error}",
                    why="the coordinator writes down what it decides before anybody is told",
                    todo="move the file away, or set yard.state to another folder",
                ) from error
            term = noted.term + 1
        try:
            self.term = self._begin(term, noted.record)
        except BaseException:
            self.close()
            raise

    def append(self, entries: Sequence[Entry]) -> None:
        """Writes records of (kind, body), all or none."""
        failpoint("journal.before_append")
        with self._transaction():
            latest = self._insert(entries, self._latest() + 1)
            failpoint("journal.before_commit")
        failpoint("journal.after_append")
        self._note(latest, self.term)

    def replace(self, entries: Sequence[Entry]) -> None:
        """Puts records in the place of all that are there: all of them, or nothing has changed."""
        with self._transaction():
            first = self._latest() + 1
            self._database.execute("DELETE FROM records")
            failpoint("journal.in_replace")
            self._database.execute("UPDATE kept SET first = ?", (first,))
            latest = self._insert(entries, first)
        failpoint("journal.after_replace")
        self._note(latest, self.term)

    def records(self) -> tuple[Record, ...]:
        """All that are kept, the oldest first. Raises ConfigurationError where one is damaged or missing."""
        try:
            rows = self._database.execute(_SELECT).fetchall()
            (wanted,) = self._database.execute("SELECT first FROM kept").fetchone()
            latest = self._latest()
        except _UNREADABLE as error:
            raise self._refused(str(error)) from error
        found = []
        for number, term, at, kind, body, checksum in rows:
            if number != wanted:
                raise self._refused("it is missing", wanted)
            found.append(self._checked(number, term, at, kind, body, checksum))
            wanted += 1
        if latest >= wanted:
            raise self._refused("it is missing", wanted)
        return tuple(found)

    def close(self) -> None:
        self._database.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---- within

    def _begin(self, least: int, noted: int) -> Term:
        try:
            with self._transaction():
                is_new = self._require_format()
                latest_record = self._latest()
                if latest_record < noted and not is_new:
                    raise self._refused(f"its last record is {latest_record}; record {noted} had been written")
                terms = self._database.execute("SELECT term, time, pid, checksum FROM terms ORDER BY term").fetchall()
                for term, at, pid, checksum in terms:
                    if checksum != _checksum(term, at, pid):
                        raise self._refused(f"the entry of term {term} has a wrong checksum")
                (written,) = self._database.execute("SELECT COALESCE(MAX(term), 0) FROM records").fetchone()
                latest = terms[-1][0] if terms else 0
                if not isinstance(written, int) or written > latest:
                    raise self._refused(f"it has records of term {written}, and the latest term is {latest}")
                term, at, pid = max(latest + 1, least), float(self._wall_clock()), os.getpid()
                self._database.execute(
                    "INSERT INTO terms VALUES (?, ?, ?, ?)", (term, at, pid, _checksum(term, at, pid))
                )
                self._database.execute("DELETE FROM terms WHERE term <= ?", (term - TERMS_KEPT,))
            # the tables are in the file itself, so that one that lost its log is not taken for a new one
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except _UNREADABLE as error:
            raise self._refused(str(error)) from error
        self._note(latest_record, term)
        return Term(term)

    def _require_format(self) -> bool:
        """Whether the file is new; its tables are made then."""
        (found,) = self._database.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise self._refused(" ".join(str(found).split()))
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        (tables,) = self._database.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
        if version == 0 and tables == 0:
            for statement in _TABLES:
                self._database.execute(statement)
            return True
        if version != FORMAT:
            raise self._refused(f"it is of format {version}, and this release reads format {FORMAT}")
        return False

    def _insert(self, entries: Sequence[Entry], first: int) -> int:
        """The number of the last one."""
        now = float(self._wall_clock())
        rows = []
        for number, (kind, body) in enumerate(entries, first):
            text = json.dumps(body, separators=(",", ":"))
            checksum = _checksum(number, self.term, now, kind.encode(), text.encode())
            rows.append((number, self.term, now, kind, text, checksum))
        self._database.executemany(_INSERT, rows)
        return first + len(rows) - 1

    def _note(self, record: int, term: int) -> None:
        if self._lock is not None:
            _write_note(self._lock, Note(record, term))

    def _latest(self) -> int:
        """The highest number that a record ever had."""
        row = self._database.execute("SELECT seq FROM sqlite_sequence WHERE name = 'records'").fetchone()
        return int(row[0]) if row is not None else 0

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _checked(self, number: int, term: object, at: object, kind: object, body: object, checksum: object) -> Record:
        if checksum != _checksum(number, term, at, kind, body):
            raise self._refused("its checksum is wrong", number)
        assert isinstance(term, int), term
        assert isinstance(at, float), at
        assert isinstance(kind, bytes), kind
        assert isinstance(body, bytes), body
        return Record(number, term, at, kind.decode(), json.loads(body))

    def _refused(self, what: str, number: int | None = None) -> ConfigurationError:
        which = f"the journal {self.name}" if number is None else f"record {number} of the journal {self.name}"
        facts = {"file": self.name} if number is None else {"file": self.name, "record": str(number)}
        return ConfigurationError(f"{which} cannot be read: {what}", why=_REFUSED_WHY, todo=_REFUSED_TODO, facts=facts)


def _checksum(*values: object) -> int:
    return zlib.crc32(repr(values).encode("utf-8", "surrogatepass"))


def _lock(folder: Path) -> tuple[int, Note]:
    """A descriptor that holds the folder's lock until it is closed, by the process's death too; and what its last
    holder noted."""
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
        holder = _read_lines(descriptor)[0] or "unknown"
        os.close(descriptor)
        raise ConfigurationError(
            f"the coordinator's journal in {folder} is in use by process {holder}",
            why="two coordinators on one journal would both decide",
            todo=f"stop process {holder}, or set yard.state to another folder",
            facts={"pid": holder},
        ) from None
    numbers = [int(line) if line.isascii() and line.isdigit() else 0 for line in _read_lines(descriptor)]
    noted = Note(numbers[1], numbers[2])
    _write_note(descriptor, noted)
    return descriptor, noted


def _read_lines(descriptor: int) -> list[str]:
    """Process id, number of the last record, term; empty where they are not there."""
    text = os.pread(descriptor, NOTE_BYTES, 0).decode("ascii", "replace")
    return [*(line.strip() for line in text.splitlines()), "", "", ""][:3]


def _write_note(descriptor: int, note: Note) -> None:
    text = f"{os.getpid()}\n{note.record}\n{note.term}\n"
    # not waited for, and of one length: it is a lower bound of what has been written, and whole if it is there
    with suppress(OSError):
        os.pwrite(descriptor, text.ljust(NOTE_BYTES).encode("ascii"), 0)


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
    except _UNREADABLE:
        database.close()
        raise
    return database
