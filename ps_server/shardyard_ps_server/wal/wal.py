"""A server's log of one job: durable, then visible, then acknowledged (docs/internals/ledger.md, rules C1 and C2).

A thread appends its record under `order`, so the order of the log is the order of the job. Then it waits until the
record is durable, then for its turn. The first thread that waits writes and syncs for all that have appended, so one
sync serves all records that arrive while the previous one lasts.

    with log.admission:
        check that the record is admissible
        ticket = log.append(...)
    log.sync(ticket)
    with log.turn(ticket):          in the order of the log: change what others see

Owns: the segment that is written, tickets and turns. Invariants: only a durable record gets a turn, in the log's order;
after a sync, and before anything becomes visible, the log checks for a fence; once a write or sync has failed, no later
record becomes durable, and `on_failure` is called, because a server that cannot know what is on its disk must stop.
Must not know: what records mean.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from shardyard.domain.errors import Internal, NotReady, ShardyardError, StaleIncarnation, TooLarge
from shardyard.runtime.durable import sync_folder
from shardyard.runtime.failpoints import failpoint
from shardyard.runtime.waits import WaitRegistry
from shardyard_ps_server.values.versions import Bytes
from shardyard_ps_server.wal.records import (
    SEGMENT_HEADER_BYTES,
    Mark,
    RecordKind,
    SegmentHead,
    encode_mark,
    record_header,
    segment_header,
)
from shardyard_ps_server.wal.segments import ASIDE_KEPT_S, DAY_S, LogFiles, storing

log = logging.getLogger("shardyard.server")

PIECES_MAX: Final = 512
"""The most buffers in one system call; Linux takes 1,024."""

OnFailure = Callable[[ShardyardError], None]


class Wal:
    """A new log, whose first segment has number `segment`. `wait_registry` explains its waits. Safe for several
    threads. Raises StorageUnavailable."""

    def __init__(self, files: LogFiles, *, segment: int, on_failure: OnFailure, wait_registry: WaitRegistry) -> None:
        self._files = files
        self._wait_registry = wait_registry
        self._on_failure = on_failure
        self.order = threading.Lock()
        """Held while a record is decided on and appended."""
        self._changed = threading.Condition()
        self._failure: ShardyardError | None = None
        self._writing = False
        self._queue: list[memoryview] = []
        self._appended = 0
        self._durable = 0
        self._applied = 0
        self._segment = segment
        with storing(files.folder), wait_registry.over(self._beginning):
            aside = files.begin()
            if aside is not None:
                what = "a log of another yard, whose numbers are given again, is now in %s, and kept there for %d days"
                log.warning(what, aside, ASIDE_KEPT_S // DAY_S)
            with ExitStack() as undo:
                undo.callback(files.remove)
                self._fd = self._begin(segment, None)
                undo.callback(os.close, self._fd)
                self._synced_fd = files.claim()
                undo.callback(os.close, self._synced_fd)
                self._note(Mark(segment, SEGMENT_HEADER_BYTES))
                os.fsync(self._synced_fd)
                for folder in (files.folder, files.folder.parent, files.folder.parent.parent):
                    sync_folder(folder)
                undo.pop_all()
        self._offset = SEGMENT_HEADER_BYTES

    @property
    def segment_bytes(self) -> int:
        """Bytes of the present segment: what was recorded since the last checkpoint began."""
        with self._changed:
            return self._offset

    # ---- recording

    def append(self, kind: RecordKind, head: bytes, *pieces: Bytes) -> int:
        """Appends a record, under `order`. Returns its ticket. `pieces`: of the payload; they must not change until
        the ticket's turn. Raises NotReady if the log has failed."""
        checksum = nbytes = 0
        for piece in pieces:
            checksum = zlib.crc32(piece.data, checksum)
            nbytes += len(piece)
        with self._changed:
            self._check()
            header = record_header(kind, head, nbytes, checksum, self._offset)
            self._queue += [memoryview(header), memoryview(head), *[piece.data for piece in pieces if len(piece)]]
            self._offset += len(header) + len(head) + nbytes
            self._appended += 1
            return self._appended

    def sync(self, ticket: int) -> None:
        """Returns when the record is durable. Raises NotReady if the log has failed."""
        with self._wait_registry.over(self._syncing), self._changed:
            while self._durable < ticket:
                self._check()
                if self._writing:
                    self._changed.wait()
                else:
                    self._write()

    @contextmanager
    def turn(self, ticket: int) -> Iterator[None]:
        """Enters when all earlier records have taken effect. A ShardyardError means that the record itself is refused.
        Any other error stops the log, because later records would be applied without this one."""
        self._await_applied(ticket - 1)
        try:
            failpoint("wal.before_apply")
            yield
        except ShardyardError as error:
            # memory is refused now but may be available at replay: the two results would differ
            if isinstance(error, TooLarge | Internal):
                self._fail(error)
                raise
            self._end_turn(ticket)
            raise
        except BaseException as error:
            self._fail(Internal(f"record {ticket} of a log could not be carried out: {error!r}"))
            raise
        self._end_turn(ticket)

    @contextmanager
    def recorded(self, kind: RecordKind, head: bytes, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Records a change without payload, and enters its turn. `check` is called under `order`; if it raises,
        nothing is recorded. Raises NotReady if the log has failed."""
        with self.order:
            check()
            ticket = self.append(kind, head)
        self.sync(ticket)
        with self.turn(ticket):
            yield

    def drain(self) -> None:
        """Returns when all records so far have taken effect. Raises NotReady if the log has failed."""
        with self._changed:
            ticket = self._appended
        self.sync(ticket)
        self._await_applied(ticket)

    # ---- segments

    def rotate(self, number: int) -> None:
        """Begins segment `number` for later records, under `order`. Returns when all earlier records have taken
        effect. Does nothing if the number is not higher than the present one. Raises NotReady."""
        self.drain()
        with self._wait_registry.over(self._beginning), self._changed:
            if number <= self._segment:
                return
            self._check()
            assert not self._queue, "appended without admission"
            assert not self._writing, "appended without admission"
            try:
                with storing(self._files.folder):
                    failpoint("wal.before_rotate")
                    fd = self._begin(number, Mark(self._segment, self._offset))
                    sync_folder(self._files.folder)
                    os.close(self._fd)
                    self._fd, self._segment, self._offset = fd, number, SEGMENT_HEADER_BYTES
                    self._note(Mark(number, SEGMENT_HEADER_BYTES))
                    os.fsync(self._synced_fd)  # a mark in an earlier segment would not cover this one
                    failpoint("wal.after_rotate")
            except ShardyardError as error:
                self._fail_here(self._taken_over() if self._files.is_taken else error)
                raise self._failed() from error

    def prune(self, oldest: int) -> None:
        """Deletes segments that no checkpoint from `oldest` on needs. Segments that cannot be deleted stay."""
        numbers = self._files.numbers()
        first = max((number for number in numbers if number <= oldest), default=0)
        for number in numbers:
            if number < first:
                try:
                    self._files.segment(number).unlink()
                except OSError as error:
                    log.warning("a segment of a log was not deleted: %s", error)

    def close(self, *, remove: bool = False) -> None:
        """Ends the log. `remove`: deletes it too."""
        with self._wait_registry.over(self._syncing), self._changed:
            while self._writing:
                self._changed.wait()
            if self._fd < 0:
                return
            self._failure = self._failure or NotReady("the log is closed")
            if remove:  # delete it while locked: a server that finds it unlocked takes this one for dead
                self._files.remove()
            os.close(self._fd)
            os.close(self._synced_fd)
            self._fd = self._synced_fd = -1
            self._changed.notify_all()

    # ---- what is waited for

    def _beginning(self) -> str:
        return f"a segment of the log {self._files.folder} to be begun"

    def _syncing(self) -> str:
        return f"the log {self._files.folder} to be durable up to record {self._appended:,}"

    def _applying(self) -> str:
        return f"record {self._applied + 1:,} of the log {self._files.folder} to take effect"

    # ---- inside

    def _begin(self, number: int, before: Mark | None) -> int:
        """Creates a segment's file with its header. Everything but its name is durable."""
        path = self._files.segment(number)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            failpoint("wal.before_segment")
            os.write(fd, segment_header(SegmentHead(self._files.job, self._files.server, number, before)))
            os.fsync(fd)
            failpoint("wal.after_segment")
        except OSError:
            os.close(fd)
            raise
        return fd

    def _write(self) -> None:
        """Makes all appended records durable. Called with the lock, which is released meanwhile."""
        queue, upto = self._queue, self._appended
        mark = Mark(self._segment, self._offset)
        self._queue, self._writing = [], True
        self._changed.release()
        failure: ShardyardError | None = None
        try:
            with storing(self._files.folder):
                failpoint("wal.before_write")
                _write_all(self._fd, queue)
                failpoint("wal.before_sync")
                os.fdatasync(self._fd)
                failpoint("wal.after_sync")
                self._note(mark)
            if self._files.is_taken:
                failure = self._taken_over()
        except ShardyardError as error:
            failure = error
        finally:
            self._changed.acquire()
            self._writing = False
        if failure is None:
            self._durable = upto
            self._changed.notify_all()
        else:
            self._fail_here(failure)

    def _note(self, mark: Mark) -> None:
        """Notes a lower bound of what is durable. A power cut may lose the newest notes; a kill does not."""
        os.pwrite(self._synced_fd, encode_mark(mark), 0)

    def _await_applied(self, ticket: int) -> None:
        with self._wait_registry.over(self._applying), self._changed:
            while self._applied < ticket:
                self._check()
                self._changed.wait()

    def _end_turn(self, ticket: int) -> None:
        with self._changed:
            self._applied = ticket
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failed()

    def _failed(self) -> ShardyardError:
        assert self._failure is not None
        return NotReady(
            f"server {self._files.server} stops: {self._failure.what}",
            why="nothing is acknowledged that is not in its log",
        )

    def _taken_over(self) -> ShardyardError:
        return StaleIncarnation(f"the log of server {self._files.server} was taken over by its successors")

    def _fail(self, failure: ShardyardError) -> None:
        with self._changed:
            self._fail_here(failure)

    def _fail_here(self, failure: ShardyardError) -> None:
        if self._failure is None:
            self._failure = failure
            self._on_failure(failure)
        self._changed.notify_all()


def _write_all(fd: int, pieces: Sequence[memoryview]) -> None:
    left = list(pieces)
    while left:
        written = os.writev(fd, left[:PIECES_MAX])
        done = 0
        while done < len(left) and written >= len(left[done]):
            written -= len(left[done])
            done += 1
        left = left[done:]
        if written:
            left[0] = left[0][written:]
