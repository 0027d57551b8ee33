"""Where servers' logs are stored, and how the log of a dead server passes to its successors (ledger.md, rule C2).

    ROOT/id                                        names the folder, so that servers know whether they share it
    ROOT/JOB/SERVER/000000000007.log               the segment that began with checkpoint 7 (0: with the job)
                    synced                         up to where the log is durable
                    fenced                         a successor reads the log, so its owner makes nothing more visible.
                                                   Contains the job's generation in which it became the successor
                    end                            up to where the log counts, as its first successor found it
    ROOT/JOB/SERVER.of-another-yard-1f2e3d4c/      an older log under the same numbers, from another yard
    ROOT/JOB/SERVER.of-an-ended-job-1f2e3d4c/      a log whose server died before its job ended, and that nobody read

A log that was put aside is deleted ASIDE_KEPT_S later, when a server starts and finds it. Until then a person can use
it, for instance if a lost journal is found again.

Owns: the folders, and the order of a successor's steps: it raises the fence, durably; then it reads; and it writes down
where the log ends before it relies on the log. Invariants: after a log was read once, it ends for all readers at the
same place; a fence is never lowered, and never names an earlier generation than the one that raised it. Must not know:
what records mean, which servers are alive.
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
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Final

from shardyard.domain.errors import StorageUnavailable
from shardyard.domain.ids import Generation, Incarnation, JobId
from shardyard.runtime.durable import sync_folder
from shardyard.runtime.failpoints import failpoint
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
    """The folder in which a server keeps its logs, and finds those of other servers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def id(self) -> str:
        """Servers that read the same id share the folder. Drawn at random at the first call. Raises
        StorageUnavailable."""
        path = self.path / ID
        with storing(path):
            if not path.exists():
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_once(path, secrets.token_hex(ID_CHARACTERS // 2).encode())
            found = path.read_text()
        if len(found) != ID_CHARACTERS or not set(found) <= _HEXADECIMAL:
            raise damaged(path, 0, "it does not name a folder of logs")
        return found

    def log(self, job: JobId, server: Incarnation) -> LogFiles:
        return LogFiles(self.path / f"{int(job):x}" / f"{int(server):x}", job, server)

    def others(self, job: JobId, server: Incarnation) -> list[LogFiles]:
        """Returns the logs of a job that other servers wrote here."""
        folder = self.path / f"{int(job):x}"
        names = os.listdir(folder) if folder.is_dir() else []
        numbers = [int(name, 16) for name in names if set(name) <= _HEXADECIMAL]
        return [self.log(job, Incarnation(number)) for number in sorted(numbers) if number != server]

    def prune(self, job: JobId, server: Incarnation, generation: Generation, needed: Container[Incarnation]) -> None:
        """Deletes logs of other servers that are not in `needed`, which the coordinator sent under `generation`. Raises
        StorageUnavailable."""
        for other in self.others(job, server):
            fenced = other.fenced_under
            # A frozen server may get the request late, after other servers have become owners and died. The
            # request does not list their logs, but these were taken over under a later generation.
            if other.server not in needed and fenced is not None and fenced <= generation:
                other.remove()

    def end_job(self, job: JobId, server: Incarnation) -> None:
        """Deletes the logs of other servers, or puts them aside, because the job has ended."""
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
        """Deletes logs that were put aside ASIDE_KEPT_S ago or earlier; `now_s`: seconds since 1970. Logs that cannot
        be deleted stay. Raises StorageUnavailable."""
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
        """Numbers of the segments that are there, ascending. Raises StorageUnavailable."""
        with storing(self.folder):
            stems = [name.removesuffix(SUFFIX) for name in os.listdir(self.folder) if name.endswith(SUFFIX)]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    @property
    def is_fenced(self) -> bool:
        return os.path.exists(self.folder / FENCED)

    @property
    def is_taken(self) -> bool:
        """Whether a successor has taken the log over. It raises the fence. Later the fence may be deleted with the log,
        when no checkpoint needs it."""
        return self.is_fenced or not os.path.exists(self.folder / SYNCED)

    @property
    def fenced_under(self) -> Generation | None:
        """The highest generation of the job under which a successor has raised the fence; None: none has, or the file
        cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            content = (self.folder / FENCED).read_bytes()
            if content.endswith(b"\n"):  # otherwise it is cut short
                return Generation(int(content))
        return None

    def begin(self) -> Path | None:
        """Makes the folder, empty. A coordinator whose journal was lost assigns numbers of jobs and servers again. If a
        log already has these numbers, it is put aside, and its new folder is returned. Raises OSError, and
        StorageUnavailable if a live server writes that log."""
        aside = None
        if self.folder.exists():
            with self._lock() as is_free:
                if not is_free:
                    raise StorageUnavailable(
                        f"server {self.server} of another yard writes the log in {self.folder}",
                        why="two yards that share a folder of logs give the same numbers to their jobs and servers",
                        todo="give each yard a folder of its own (yard.wal)",
                    )
            aside = self._put_aside(ANOTHER_YARDS)
        self.folder.mkdir(parents=True)
        return aside

    def end_with_job(self) -> Path | None:
        """Cleans up after the job has ended. A log that a successor has read is deleted. The log of a server that died
        is put aside, and its new folder is returned. A live server deletes its own log. Raises StorageUnavailable."""
        if self.is_fenced:
            self.remove()
            return None
        with storing(self.folder), self._lock() as is_free:
            return self._put_aside(AN_ENDED_JOBS) if is_free and (self.folder / SYNCED).exists() else None

    def _put_aside(self, why: str) -> Path:
        aside = self.folder.with_name(f"{self.folder.name}{why}{secrets.token_hex(4)}")
        self.folder.rename(aside)
        os.utime(aside)
        return aside

    def claim(self) -> int:
        """Returns the descriptor of `synced`, which stays locked while it is open. Raises OSError."""
        fd = os.open(self.folder / SYNCED, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks cannot tell two yards apart
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Locks the log. Yields False if a live server writes it, and True without a lock if `synced` is missing.
        Raises OSError."""
        with contextlib.ExitStack() as opened:
            try:
                synced = opened.enter_context(open(self.folder / SYNCED, "rb"))
                fcntl.flock(synced, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (FileNotFoundError, BlockingIOError) as error:
                yield isinstance(error, FileNotFoundError)
            else:
                yield True

    def remove(self) -> None:
        """Deletes the log, and the job's folder if that is empty. Files that cannot be deleted stay."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()

    # ---- for successors

    def take_over(self, generation: Generation) -> Mark:
        """Fences the log of a dead server, and returns where it ends, now and for all later readers. `generation`: the
        job's, under which the log is read. Raises StorageUnavailable if the log is not here, LogDamaged."""
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
                write_once(end, encode_mark(self._find_end()), before=lambda: failpoint("wal.before_end"))
                failpoint("wal.after_end")
            return decode_mark(_read(end), end)

    def records(self, base: int, end: Mark, *, payloads: bool = True) -> Iterator[Record]:
        """Yields records from the beginning of checkpoint `base` to `end`. `payloads`: False for heads alone. Raises
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
        """Returns the place after the last valid record."""
        numbers = self.numbers()
        synced = decode_mark(_read(self.folder / SYNCED), self.folder / SYNCED)
        if synced.segment not in numbers:
            raise damaged(self.segment(synced.segment), 0, "it is not there, and was durable")
        # no record of a later segment was acknowledged
        last = synced.segment
        with _opened(self.segment(last)) as fd:
            self._check_head(read_segment_head(fd, self.segment(last)), last)
            reader = SegmentReader(fd, self.segment(last), last, durable=synced.offset, until=None)
            for _ in reader.records():
                pass
            # the owner may have died between writing and syncing; what counts from now on must be durable
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
    """Deletes a folder that was last changed at that time or earlier. Returns whether it did."""
    with contextlib.suppress(OSError):
        if folder.stat().st_mtime <= latest_s:
            shutil.rmtree(folder)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
            return True
    return False


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turns OSError into StorageUnavailable."""
    try:
        yield
    except OSError as error:
        raise StorageUnavailable(
            f"{error.filename or path}: {error.strerror or error}",
            why="a server's log must be written, and read, where it is kept (yard.wal)",
        ) from error


def write_durably(path: Path, data: bytes) -> None:
    """Writes a file, new or not, and makes it and its name durable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if data:
            os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_folder(path.parent)


def write_once(path: Path, data: bytes, *, before: Callable[[], None] = lambda: None) -> None:
    """Creates a file with this content, durably, unless it exists. If several processes do so at once, the content of
    the first stays. `before` is called just before the name appears."""
    mine = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    write_durably(mine, data)
    before()
    with contextlib.suppress(FileExistsError):
        os.link(mine, path)
    mine.unlink()
    sync_folder(path.parent)


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
