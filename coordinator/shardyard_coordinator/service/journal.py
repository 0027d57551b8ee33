"""The coordinator's journal: its term, its records, and the audit made from them, on disk or in memory.

Owns: a state folder with a SQLite file and a lock file. The lock file also has the term and the number of the last
record, for two cases that the SQLite file does not show: SQLite ignores a damaged tail of its log, and a file that is
moved away takes its terms with it. Invariants: one process at a time has a folder's journal. Each opening has a higher
term than all before. `append` returns when all its records, or none, are on the disk, in order. `replace` leaves the
old records or the new ones. `records` returns all records as they were written; it raises if the file has another
format, or a record is missing or has a wrong checksum. The audit has an entry for each audited record that was ever
appended, written in the same transaction; when there are too many, the oldest are deleted. Must not know: what records
mean.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardyard.domain.errors import ConfigurationError, NotFound, StorageUnavailable
from shardyard.domain.ids import JobId, Term
from shardyard.runtime.failpoints import failpoint
from shardyard_coordinator.records import Entry, Record
from shardyard_coordinator.service.audit import JOB_ENDED, JOB_STARTED, Audited, Page, audited

log = logging.getLogger("shardyard.coordinator")

FILE: Final = "coordinator.sqlite"
LOCK: Final = "coordinator.lock"
TERMS_KEPT: Final = 16
NOTE_BYTES: Final = 80
AUDIT_MAX: Final = 1_000_000
"""Entries of the audit over all jobs. Older ones are deleted."""
AUDIT_SLACK: Final = 1_024
"""The oldest entries are deleted once per this many new ones."""
AUDITED_JOBS_MAX: Final = 10_000
"""Jobs of which the audit knows the name. Older ones are deleted."""
PAGE_ENTRIES_MAX: Final = 20_000
"""Entries that are examined for one page of the audit."""
PAGE_BYTES_MAX: Final = 4 << 20
ROOM_BYTES: Final = 8 << 20
"""Room that the journal's files have for records to come, each of both files. It lasts for some 10,000 data shards."""
ROOM_OF_DISK: Final = 1 / 16
"""The room is at most this part of what is free on the disk."""
LOG_PAGES: Final = 16, 256
"""The least and most pages of SQLite's log that are written before it begins anew. So it needs half of its room."""
FORMAT: Final = 3
"""The format of the file and of its records, in SQLite's user_version. A new file has 0."""

_TABLES: Final = (
    """CREATE TABLE terms (
        term INTEGER PRIMARY KEY, time REAL NOT NULL, pid INTEGER NOT NULL, checksum INTEGER NOT NULL)""",
    """CREATE TABLE records (
        number INTEGER PRIMARY KEY AUTOINCREMENT, term INTEGER NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL,
        body TEXT NOT NULL, checksum INTEGER NOT NULL)""",
    "CREATE TABLE kept (first INTEGER NOT NULL)",
    "INSERT INTO kept VALUES (1)",
    """CREATE TABLE audit (
        number INTEGER PRIMARY KEY AUTOINCREMENT, term INTEGER NOT NULL, time REAL NOT NULL, job INTEGER NOT NULL,
        kind TEXT NOT NULL, body TEXT NOT NULL, checksum INTEGER NOT NULL)""",
    "CREATE TABLE audited_jobs (job INTEGER PRIMARY KEY, name TEXT NOT NULL, first INTEGER NOT NULL, last INTEGER)",
    f"PRAGMA user_version = {FORMAT}",
)
_INSERT: Final = "INSERT INTO records (number, term, time, kind, body, checksum) VALUES (?, ?, ?, ?, ?, ?)"
_SELECT: Final = """
    SELECT number, term, time, CAST(kind AS BLOB), CAST(body AS BLOB), checksum FROM records ORDER BY number"""
_UNREADABLE: Final = (sqlite3.DatabaseError, ValueError, TypeError)
"""The errors of reading a damaged file: bytes may not be text, and a number may have another type."""
_FULL: Final = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_TRUNCATE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
)
"""SQLite's codes for a disk that refuses a write. They say nothing about what is in the file."""
_REFUSED_WHY: Final = "with only a part of its records, a coordinator would contradict its earlier decisions"
_REFUSED_TODO: Final = (
    "start the release that wrote it, or restore the folder from a copy; otherwise move it away, or set yard.state to "
    "another folder: then its jobs are lost"
)


@dataclass(frozen=True, slots=True)
class Note:
    """The last record's number and the term, in the lock file after the holder's process id."""

    record: int = 0
    term: int = 0


class Journal:
    """Opens the journal of `folder` for this process; None keeps it in memory. `secluded`: no member of an earlier run
    can connect, as in a yard inside one process.

    Not safe for several threads at a time. Raises ConfigurationError if another process has the journal, if the folder
    cannot be written, or if the file is damaged or has another format; StorageUnavailable if the disk is full.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        wall_clock: Callable[[], float] = time.time,
        secluded: bool = False,
        audit_max: int = AUDIT_MAX,
    ) -> None:
        self._wall_clock = wall_clock
        self._audit_max = audit_max
        self._folder = folder
        self._lock: int | None = None
        noted = Note()
        if folder is None:
            self.name = "in memory"
            self._database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
            # no record of earlier runs: the time of day makes this run's incarnations differ from theirs
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
                self._require_not_full(error)
                raise ConfigurationError(
                    f"cannot open the journal {folder / FILE}: {error}",
                    why="the coordinator records each decision before it replies",
                    todo="move the file away, or set yard.state to another folder",
                ) from error
            term = noted.term + 1
        self.audit = AuditReader(self._database, self.name)
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
            self._audit(entries)
            failpoint("journal.before_commit")
        failpoint("journal.after_append")
        self._note(latest, self.term)

    def replace(self, entries: Sequence[Entry]) -> None:
        """Replaces all records by these. Either all are replaced, or nothing changes."""
        with self._transaction():
            first = self._latest() + 1
            self._database.execute("DELETE FROM records")
            failpoint("journal.in_replace")
            self._database.execute("UPDATE kept SET first = ?", (first,))
            latest = self._insert(entries, first)
        failpoint("journal.after_replace")
        self._note(latest, self.term)

    def free_bytes(self) -> int | None:
        """What this process may still write to the journal's disk. None: it has none, or does not say."""
        if self._folder is None:
            return None
        try:
            found = os.statvfs(self._folder)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    def room_bytes(self) -> int:
        """How much can be appended before the file grows."""
        (pages,) = self._database.execute("PRAGMA freelist_count").fetchone()
        return int(pages) * self._page_bytes()

    def make_room(self) -> None:
        """Lets the files grow for records to come, so that a full disk does not stop the coordinator at once: SQLite
        uses pages that were freed again, and overwrites its log. Does nothing if there is enough room, or if the disk
        has little."""
        free = self.free_bytes()
        if free is None:
            return
        wanted = min(ROOM_BYTES, int(free * ROOM_OF_DISK))
        least, most = LOG_PAGES
        pages = min(max(wanted // self._page_bytes() // 2, least), most)
        # of this connection, not of the file: also where an earlier run has made the room
        self._database.execute(f"PRAGMA wal_autocheckpoint={pages}")
        if self._log_bytes() >= wanted and self.room_bytes() >= wanted // 2:
            return
        try:
            with self._transaction():
                self._database.execute("CREATE TABLE IF NOT EXISTS room (body BLOB)")
                self._database.execute("INSERT INTO room VALUES (zeroblob(?))", (wanted,))
            # only now do the pages have their place in the file
            self._database.execute("PRAGMA wal_checkpoint(RESTART)")
        finally:
            with self._transaction():
                self._database.execute("DROP TABLE IF EXISTS room")
            # the log is then overwritten from its start
            self._database.execute("PRAGMA wal_checkpoint(RESTART)")

    def records(self) -> tuple[Record, ...]:
        """All records, the oldest first. Raises ConfigurationError if one is damaged or missing."""
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
            # writes the tables into the file itself, so that a file that lost its log does not look like a new one
            self._database.execute("PRAGMA wal_checkpoint(RESTART)")
        except _UNREADABLE as error:
            self._require_not_full(error)
            raise self._refused(str(error)) from error
        self._note(latest_record, term)
        return Term(term)

    def _require_format(self) -> bool:
        """Whether the file is new. Its tables are created then."""
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
        """Returns the number of the last record."""
        now = float(self._wall_clock())
        rows = []
        for number, (kind, body) in enumerate(entries, first):
            text = json.dumps(body, separators=(",", ":"))
            checksum = _checksum(number, self.term, now, kind.encode(), text.encode())
            rows.append((number, self.term, now, kind, text, checksum))
        self._database.executemany(_INSERT, rows)
        return first + len(rows) - 1

    def _audit(self, entries: Sequence[Entry]) -> None:
        now = float(self._wall_clock())
        first = latest = self._latest("audit")
        rows: list[tuple[object, ...]] = []
        for found in (audited(kind, body) for kind, body in entries):
            if found is None:
                continue
            latest += 1
            job, (kind, body) = found
            text = json.dumps(body, separators=(",", ":"))
            checksum = _checksum(latest, self.term, now, int(job), kind.encode(), text.encode())
            rows.append((latest, self.term, now, int(job), kind, text, checksum))
            if kind == JOB_STARTED:
                self._database.execute(
                    "INSERT OR REPLACE INTO audited_jobs VALUES (?, ?, ?, NULL)", (int(job), str(body["name"]), latest)
                )
            elif kind == JOB_ENDED:
                self._database.execute("UPDATE audited_jobs SET last = ? WHERE job = ?", (latest, int(job)))
        self._database.executemany("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        if latest // AUDIT_SLACK > first // AUDIT_SLACK:
            self._database.execute("DELETE FROM audit WHERE number <= ?", (latest - self._audit_max,))
            self._database.execute(
                "DELETE FROM audited_jobs WHERE job NOT IN (SELECT job FROM audited_jobs ORDER BY first DESC LIMIT ?)",
                (AUDITED_JOBS_MAX,),
            )

    def _page_bytes(self) -> int:
        (nbytes,) = self._database.execute("PRAGMA page_size").fetchone()
        return int(nbytes)

    def _log_bytes(self) -> int:
        assert self._folder is not None
        try:
            return (self._folder / f"{FILE}-wal").stat().st_size
        except OSError:
            return 0

    def _note(self, record: int, term: int) -> None:
        if self._lock is not None:
            _write_note(self._lock, Note(record, term))

    def _latest(self, table: str = "records") -> int:
        """The highest number that a record, or an audit entry, ever had."""
        row = self._database.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
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

    def _require_not_full(self, error: Exception) -> None:
        """Raises StorageUnavailable if the disk has refused a write."""
        if getattr(error, "sqlite_errorcode", None) in _FULL:
            free = self.free_bytes()
            room = "" if free is None else f"; {free:,} bytes free on its disk"
            raise StorageUnavailable(
                f"the journal {self.name} cannot be opened ({error}{room})",
                why="the coordinator must write that a new run of it begins",
                todo="make room on the disk; leave the file where it is",
                facts={"file": self.name},
            ) from error

    def _refused(self, what: str, number: int | None = None) -> ConfigurationError:
        which = f"the journal {self.name}" if number is None else f"record {number} of the journal {self.name}"
        facts = {"file": self.name} if number is None else {"file": self.name, "record": str(number)}
        return ConfigurationError(f"{which} cannot be read: {what}", why=_REFUSED_WHY, todo=_REFUSED_TODO, facts=facts)


@contextmanager
def reading_audit(folder: Path) -> Iterator[AuditReader]:
    """The audit in a state folder. The coordinator need not run. Raises NotFound, ConfigurationError."""
    path = folder / FILE
    if not path.exists():
        raise NotFound(
            f"there is no journal of a coordinator in {folder}", why="", todo="give its state folder: --state"
        )
    try:
        database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)
    except sqlite3.DatabaseError as error:
        raise _unreadable(str(path), str(error)) from error
    try:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version != FORMAT:
            raise _unreadable(str(path), f"it is of format {version}, and this release reads format {FORMAT}")
        yield AuditReader(database, str(path))
    except sqlite3.DatabaseError as error:
        raise _unreadable(str(path), str(error)) from error
    finally:
        database.close()


class AuditReader:
    """Reads the audit in a journal's file. `name`: the name of the file, for messages."""

    def __init__(self, database: sqlite3.Connection, name: str) -> None:
        self._database = database
        self._name = name

    def find_job(self, job: str) -> int:
        """The job of that id, or the latest of that name. Raises NotFound."""
        rows = self._database.execute("SELECT job, name FROM audited_jobs ORDER BY first DESC").fetchall()
        for number, named in rows:
            if job in (named, str(JobId(number))):
                return int(number)
        known = ", ".join(sorted({str(named) for _, named in rows})[:8]) or "none"
        raise NotFound(f"no job {job!r} in the audit of {self._name}; its jobs are: {known}", why="", todo="")

    def read(self, job: int, after: int) -> Page:
        """The audit of a job, and of the yard during the job, from the entry after number `after` on. Raises
        ConfigurationError if an entry is damaged."""
        found = self._database.execute("SELECT first, last FROM audited_jobs WHERE job = ?", (job,)).fetchone()
        first, last = (1, None) if found is None else found
        after = max(after, first - 1)
        (least, latest) = self._database.execute(
            "SELECT COALESCE(MIN(number), 1), COALESCE(MAX(number), 0) FROM audit"
        ).fetchone()
        reached = min(max(after, least - 1) + PAGE_ENTRIES_MAX, latest)
        rows = self._database.execute(
            """SELECT number, term, time, job, CAST(kind AS BLOB), CAST(body AS BLOB), checksum FROM audit
            WHERE number > ? AND number <= ? AND (job = ? OR (job = 0 AND number <= ?)) ORDER BY number""",
            (after, reached, job, latest if last is None else last),
        )
        entries: list[Audited] = []
        nbytes = 0
        for number, term, at, of, kind, body, checksum in rows:
            if nbytes >= PAGE_BYTES_MAX:
                reached = entries[-1].number
                break
            if checksum != _checksum(number, term, at, of, kind, body):
                raise _unreadable(self._name, f"entry {number} of the audit has a wrong checksum")
            nbytes += len(body)
            entries.append(Audited(number, term, at, of, kind.decode(), json.loads(body)))
        return Page(tuple(entries), max(reached, after), reached < latest, least - 1 if least > first else 0)


def _unreadable(name: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the audit in {name} cannot be read: {what}",
        why="an audit with missing or wrong entries proves nothing",
        todo="restore the file from a copy",
        facts={"file": name},
    )


def _checksum(*values: object) -> int:
    return zlib.crc32(repr(values).encode("utf-8", "surrogatepass"))


def _lock(folder: Path) -> tuple[int, Note]:
    """A descriptor that holds the folder's lock until it is closed or the process ends, and the note of the last
    holder."""
    path = folder / LOCK
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    """Process id, number of the last record, term; empty if they are missing."""
    text = os.pread(descriptor, NOTE_BYTES, 0).decode("ascii", "replace")
    return [*(line.strip() for line in text.splitlines()), "", "", ""][:3]


def _write_note(descriptor: int, note: Note) -> None:
    text = f"{os.getpid()}\n{note.record}\n{note.term}\n"
    # not synced: the note is a lower bound of what was written. Its length is fixed, so a write replaces all of it
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
