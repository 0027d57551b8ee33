"""Where servers' logs lie, and how a log passes from a server that is gone to its successors (docs/ledger.md, rule C2).

    ROOT/id                                        names the folder, so that servers which share it can be told
    ROOT/JOB/SERVER/000000000007.log               the segment that began with checkpoint 7 (0: with the job)
                    synced                         up to where the log is durable
                    fenced                         a successor reads it: its owner makes nothing visible any more; in it
                                                   the generation of the job under which that one was appointed
                    end                            up to where it counts, as its first successor has found it
    ROOT/JOB/SERVER.of-another-yard-1f2e3d4c/      what was there before under these numbers, and is nobody's now
    ROOT/JOB/SERVER.of-an-ended-job-1f2e3d4c/      whose server had died when the job ended, and nobody has read it

What was put aside is deleted when a server starts that finds it there ASIDE_KEPT_S later: until then a person may take
it for what it was, should a journal that was lost be found again.

Owns: the folders, and the order of what a successor does: it raises the fence, durably, before it reads, and says where
the log ends before it believes it. Invariants: a log that was read once ends for all readers at the same place; a fence
is never lowered, nor is it said that it was raised earlier than it was. Must not know: what records mean, who is alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import secrets
import shutil
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Final

from shardyard.domain.errors import StorageUnavailable
from shardyard.domain.failpoints import failpoint
from shardyard.domain.ids import Generation, Incarnation, JobId
from shardyard_ps_server.wal.records import (
    MARK_BYTES,
    Mark,
    Record,
    SegmentHead,
    SegmentReader,
    damaged,
    decode_mark,
    encode_mark,
    read_segment_head,
)

log = logging.getLogger("shardyard.server")

ID: Final = "id"
SYNCED: Final = "synced"
FENCED: Final = "fenced"
END: Final = "end"
SUFFIX: Final = ".log"
ANOTHER_YARDS: Final = ".of-another-yard-"
AN_ENDED_JOBS: Final = ".of-an-ended-job-"
_ASIDE: Final = re.compile(rf"[0-9a-f]+(?:{re.escape(ANOTHER_YARDS)}|{re.escape(AN_ENDED_JOBS)})[0-9a-f]{{8}}")
DAY_S: Final = 24 * 3_600
ASIDE_KEPT_S: Final = 7 * DAY_S
ID_CHARACTERS: Final = 32
_HEXADECIMAL: Final = frozenset("0123456789abcdef")


class LogRoot:
    """The folder in which a server keeps its logs, and finds those of others."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def id(self) -> str:
        """Two servers that name the same one read each other's logs. Drawn at random at the first call. Raises
        StorageUnavailable."""
        path = self.path / ID
        with storing(path):
            if not path.exists():
                self.path.mkdir(parents=True, exist_ok=True)
                drawn = self.path / f".{ID}-{secrets.token_hex(8)}"
                write_durably(drawn, secrets.token_hex(ID_CHARACTERS // 2).encode())
                with contextlib.suppress(FileExistsError):  # another server was first
                    os.link(drawn, path)
                drawn.unlink()
                sync_folder(self.path)
            found = path.read_text()
        if len(found) != ID_CHARACTERS or not set(found) <= _HEXADECIMAL:
            raise damaged(path, 0, "it does not name a folder of logs")
        return found

    def log(self, job: JobId, server: Incarnation) -> LogFiles:
        return LogFiles(self.path / f"{int(job):x}" / f"{int(server):x}", job, server)

    def others(self, job: JobId, server: Incarnation) -> list[LogFiles]:
        """The logs of a job that other servers have left here."""
        folder = self.path / f"{int(job):x}"
        names = os.listdir(folder) if folder.is_dir() else []
        numbers = [int(name, 16) for name in names if set(name) <= _HEXADECIMAL]
        return [self.log(job, Incarnation(number)) for number in sorted(numbers) if number != server]

    def prune(self, job: JobId, server: Incarnation, generation: Generation, needed: Container[Incarnation]) -> None:
        """Deletes those of others that an order of `generation` to this server does not need any more. Raises
        StorageUnavailable."""
        for other in self.others(job, server):
            fenced = other.fenced_under
            # an order may come late, to a server that was given up and woke: of others that became owners since, and
            # died, it does not say that their logs are needed; they were taken over under a later generation
            if other.server not in needed and fenced is not None and fenced <= generation:
                other.remove()

    def end_job(self, job: JobId, server: Incarnation) -> None:
        """What others have left goes with the job, or is put aside."""
        for other in self.others(job, server):
            try:
                aside = other.end_with_job()
            except StorageUnavailable as error:
                log.warning(
                    "the log of server %s, of job %s, which has ended, stays: %s", other.server, other.job, error.what
                )
                continue
            if aside is not None:
                what = "job %s has ended; the log of server %s, which is gone, is now in %s, and kept there for %d days"
                log.warning(what, other.job, other.server, aside, ASIDE_KEPT_S // DAY_S)

    def delete_aside(self, now_s: float) -> list[Path]:
        """Deletes what was put aside ASIDE_KEPT_S ago, or earlier; `now_s`: seconds since 1970. What cannot be deleted
        stays. Raises StorageUnavailable."""
        with storing(self.path):
            names = sorted(os.listdir(self.path)) if self.path.is_dir() else []
            jobs = [self.path / name for name in names if set(name) <= _HEXADECIMAL]
            aside = [job / name for job in jobs if job.is_dir() for name in sorted(os.listdir(job))]
        return [each for each in aside if _ASIDE.fullmatch(each.name) and _delete_old(each, now_s - ASIDE_KEPT_S)]


class LogFiles:
    """The files of one server's log of one job."""

    def __init__(self, folder: Path, job: JobId, server: Incarnation) -> None:
        self.folder = folder
        self.job = job
        self.server = server

    def segment(self, number: int) -> Path:
        return self.folder / f"{number:012d}{SUFFIX}"

    def numbers(self) -> list[int]:
        """Of the segments that are there, ascending. Raises StorageUnavailable."""
        with storing(self.folder):
            stems = [name.removesuffix(SUFFIX) for name in os.listdir(self.folder) if name.endswith(SUFFIX)]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    @property
    def is_fenced(self) -> bool:
        return os.path.exists(self.folder / FENCED)

    @property
    def is_taken(self) -> bool:
        """Whether the owner has lost its log: a successor has raised the fence, which may have gone with the log since,
        when no checkpoint needed that any more."""
        return self.is_fenced or not os.path.exists(self.folder / SYNCED)

    @property
    def fenced_under(self) -> Generation | None:
        """The highest generation of the job under which a successor has raised the fence; None: none has, or it cannot
        be told."""
        with contextlib.suppress(OSError, ValueError):
            said = (self.folder / FENCED).read_bytes()
            if said.endswith(b"\n"):  # else not all of it is there
                return Generation(int(said))
        return None

    def begin(self) -> Path | None:
        """Makes the folder, empty. A coordinator whose journal was lost gives the numbers of its jobs and servers
        again: what lies there under them is put aside, into the folder that is given. Raises OSError, and
        StorageUnavailable where somebody writes there."""
        aside = None
        if self.folder.exists():
            self._check_abandoned()
            aside = self._put_aside(ANOTHER_YARDS)
        self.folder.mkdir(parents=True)
        return aside

    def end_with_job(self) -> Path | None:
        """The job has ended. A log that was read has gone over to others, and is deleted; that of a server that died is
        put aside, into the folder that is given; one that lives deletes its own. Raises StorageUnavailable."""
        if self.is_fenced:
            self.remove()
            return None
        with storing(self.folder), contextlib.suppress(FileNotFoundError, BlockingIOError):
            with open(self.folder / SYNCED, "rb") as synced:
                fcntl.flock(synced, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self._put_aside(AN_ENDED_JOBS)
        return None

    def _put_aside(self, why: str) -> Path:
        aside = self.folder.with_name(f"{self.folder.name}{why}{secrets.token_hex(4)}")
        self.folder.rename(aside)
        os.utime(aside)
        return aside

    def claim(self) -> int:
        """The descriptor of `synced`, which is locked for as long as it is open. Raises OSError."""
        fd = os.open(self.folder / SYNCED, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # where a file system knows no locks two yards are not told apart
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd

    def _check_abandoned(self) -> None:
        with contextlib.suppress(FileNotFoundError), open(self.folder / SYNCED, "rb") as synced:
            try:
                fcntl.flock(synced, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StorageUnavailable(
                    f"server {self.server} of another yard writes the log in {self.folder}",
                    why="two yards that share a folder of logs give the same numbers to their jobs and servers",
                    todo="give each yard a folder of its own (yard.wal)",
                ) from None

    def remove(self) -> None:
        """Deletes the log, and the job's folder where it was the last in it. What cannot be deleted stays."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()

    # ---- for successors

    def take_over(self, generation: Generation) -> Mark:
        """Where this log, whose owner is gone, ends for ever. `generation`: that of the job under which it is read.
        Raises StorageUnavailable where it is not here, LogDamaged."""
        if not self.folder.is_dir():
            raise StorageUnavailable(
                f"the log of server {self.server} is not at {self.folder}",
                why="what was acknowledged since the checkpoint is in it",
                todo="start a server on the machine that has it, or go back to a checkpoint alone with `shardyard "
                "checkpoint restore`",
            )
        with storing(self.folder):
            failpoint("wal.before_fence")
            if generation > (self.fenced_under or -1):
                write_durably(self.folder / FENCED, b"%d\n" % generation)
            failpoint("wal.after_fence")
            end = self.folder / END
            if not end.exists():
                found = self._find_end()
                mine = self.folder / f".{END}-{secrets.token_hex(8)}"
                write_durably(mine, encode_mark(found))
                failpoint("wal.before_end")
                with contextlib.suppress(FileExistsError):  # another successor was first; it may have seen less
                    os.link(mine, end)
                mine.unlink()
                sync_folder(self.folder)
                failpoint("wal.after_end")
            return decode_mark(_read(end), end)

    def records(self, base: int, end: Mark, *, payloads: bool = True) -> Iterator[Record]:
        """What came after checkpoint `base` was begun, and before `end`; `payloads`: False for heads alone. Raises
        LogDamaged, StorageUnavailable."""
        numbers = [number for number in self.numbers() if number <= end.segment]
        heads = {number: self._head(number) for number in numbers}
        if base in heads:
            numbers = [number for number in numbers if number >= base]
        elif not numbers or numbers[0] < base or heads[numbers[0]].before is not None:
            raise damaged(self.segment(base), 0, f"it is not there; there are segments {_listed(numbers)}")
        self._check_chain(numbers, heads, end)
        for number, following in zip(numbers, [*numbers[1:], None], strict=True):
            if following is None:
                until = end.offset
            else:
                before = heads[following].before
                assert before is not None
                until = before.offset
            with _opened(self.segment(number)) as fd:
                reader = SegmentReader(fd, self.segment(number), number, durable=until, until=until)
                yield from reader.records(payloads=payloads)

    # ---- inside

    def _find_end(self) -> Mark:
        """Behind the last record that is valid."""
        numbers = self.numbers()
        synced = decode_mark(_read(self.folder / SYNCED), self.folder / SYNCED)
        if synced.segment not in numbers:
            raise damaged(self.segment(synced.segment), 0, "it is not there, and was durable")
        # a segment behind the durable place was created, and nothing in it was acknowledged
        last = synced.segment
        with _opened(self.segment(last)) as fd:
            self._check_head(read_segment_head(fd, self.segment(last)), last)
            reader = SegmentReader(fd, self.segment(last), last, durable=synced.offset, until=None)
            for _ in reader.records():
                pass
            # its owner may have died between writing and syncing: what counts from now on must stay there
            os.fsync(fd)
            return Mark(last, reader.end)

    def _head(self, number: int) -> SegmentHead:
        with _opened(self.segment(number)) as fd:
            head = read_segment_head(fd, self.segment(number))
        self._check_head(head, number)
        return head

    def _check_head(self, head: SegmentHead, number: int) -> None:
        if (head.job, head.server, head.number) != (self.job, self.server, number):
            raise damaged(
                self.segment(number), 0, f"it is segment {head.number} of server {head.server}, job {head.job}"
            )

    def _check_chain(self, numbers: Sequence[int], heads: dict[int, SegmentHead], end: Mark) -> None:
        if numbers[-1] != end.segment:
            raise damaged(self.segment(end.segment), 0, "it is not there, and the log ends in it")
        for number, following in itertools.pairwise(numbers):
            before = heads[following].before
            if before is None or before.segment != number:
                raise damaged(self.segment(following), 0, f"it does not follow segment {number}")


# ---- files


def _delete_old(folder: Path, latest_s: float) -> bool:
    """Deletes a folder that was last changed at that time or earlier. Whether it did."""
    with contextlib.suppress(OSError):
        if folder.stat().st_mtime <= latest_s:
            shutil.rmtree(folder)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
            return True
    return False


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    """Raises StorageUnavailable for what the system refuses."""
    try:
        yield
    except OSError as error:
        raise StorageUnavailable(
            f"{error.filename or path}: {error.strerror or error}",
            why="a server's log must be written, and read, where it is kept (yard.wal)",
        ) from error


def write_durably(path: Path, data: bytes) -> None:
    """A new file, or a former one's new content, and its name."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if data:
            os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    with storing(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with storing(path):
            yield fd
    finally:
        os.close(fd)


def _read(path: Path) -> bytes:
    with _opened(path) as fd:
        return os.pread(fd, MARK_BYTES + 1, 0)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) or "none"
