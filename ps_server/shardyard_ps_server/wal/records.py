"""The bytes of a server's log: segments of records, and the marks beside them.

    segment   header (SEGMENT_HEADER_BYTES), then records
    record    header (RECORD_HEADER_BYTES), head (a message of the protocol), payload (as it was received)
    mark      a place in the log, with a checksum: up to where it is durable, or where it ends

Owns: the format, and what counts as damage. Invariants: a record is used only after its checksums were compared; a
length in a file is compared with the file's size before memory is allocated; an invalid record in the durable part of
the log is damage, reported with file and offset; an invalid record after that part is a tail that was never
acknowledged, and ends the log. Must not know: when something is written, what records mean.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

from shardyard.domain import limits
from shardyard.domain.errors import LogDamaged
from shardyard.domain.ids import Incarnation, JobId
from shardyard_ps_server.values.versions import Bytes, aligned_empty

_SEGMENT = struct.Struct("<8sIQQQQQ")
_RECORD = struct.Struct("<IIIIQQ")
_MARK = struct.Struct("<8sQQ")
_CHECKSUM = struct.Struct("<I")

SEGMENT_MAGIC: Final = b"SHYWAL\x00\x01"
MARK_MAGIC: Final = b"SHYMRK\x00\x01"
RECORD_MAGIC: Final = 0x31525953
SEGMENT_HEADER_BYTES: Final = _SEGMENT.size + _CHECKSUM.size
RECORD_HEADER_BYTES: Final = _RECORD.size + _CHECKSUM.size
MARK_BYTES: Final = _MARK.size + _CHECKSUM.size
HEAD_BYTES_MAX: Final = 64 * limits.MIB


class RecordKind(IntEnum):
    """PUSH: the head is a PushHeader. OPEN: an OpenSourcesRequest. BEGIN: a CreatePartitionsRequest; earlier records of
    its partitions no longer apply. PASS_OVER: a PassOverRequest. VERDICT: a VerdictGiven. Only a push has a payload."""

    PUSH = 1
    OPEN = 2
    BEGIN = 3
    PASS_OVER = 4
    VERDICT = 5


_KINDS: Final = frozenset(RecordKind)


class Mark(NamedTuple):
    """Byte `offset` of a segment."""

    segment: int
    offset: int


class SegmentHead(NamedTuple):
    """`before`: the preceding segment, and its length; None for a log's first."""

    job: JobId
    server: Incarnation
    number: int
    before: Mark | None


@dataclass(frozen=True, slots=True)
class Record:
    """`payload` is valid until the next record is read. `at`: where the record begins, `end`: where the next one
    does."""

    kind: RecordKind
    head: bytes
    payload: Bytes
    at: Mark
    end: Mark


# ---- writing


def segment_header(head: SegmentHead) -> bytes:
    follows, number, length = (1, *head.before) if head.before else (0, 0, 0)
    return _sealed(_SEGMENT.pack(SEGMENT_MAGIC, follows, head.job, head.server, head.number, number, length))


def record_header(kind: RecordKind, head: bytes, payload_bytes: int, checksum: int, at: int) -> bytes:
    """`checksum`: of the payload; the header's own checksum also covers the head. `at`: the record's place in its
    segment; it is in the header, so that the bytes are not valid at any other place."""
    content = _RECORD.pack(RECORD_MAGIC, kind, len(head), checksum, payload_bytes, at)
    return content + _CHECKSUM.pack(zlib.crc32(head, zlib.crc32(content)))


def encode_mark(mark: Mark) -> bytes:
    return _sealed(_MARK.pack(MARK_MAGIC, mark.segment, mark.offset))


def _sealed(content: bytes) -> bytes:
    return content + _CHECKSUM.pack(zlib.crc32(content))


# ---- reading


def decode_mark(data: bytes, path: Path) -> Mark:
    """Raises LogDamaged."""
    if len(data) != MARK_BYTES or not _is_sealed(data) or not data.startswith(MARK_MAGIC):
        raise damaged(path, 0, "it is not a mark")
    _, segment, offset = _MARK.unpack_from(data)
    return Mark(segment, offset)


def read_segment_head(fd: int, path: Path) -> SegmentHead:
    """Raises LogDamaged."""
    data = os.pread(fd, SEGMENT_HEADER_BYTES, 0)
    if len(data) != SEGMENT_HEADER_BYTES or not _is_sealed(data) or not data.startswith(SEGMENT_MAGIC):
        raise damaged(path, 0, "it does not begin as a segment of a log")
    _, follows, job, server, number, before, length = _SEGMENT.unpack_from(data)
    return SegmentHead(JobId(job), Incarnation(server), number, Mark(before, length) if follows else None)


class SegmentReader:
    """Reads records from one segment's file, `path`. Bytes before `durable` are durable; bytes before `until` count."""

    def __init__(self, fd: int, path: Path, number: int, *, durable: int, until: int | None) -> None:
        self._fd = fd
        self._path = path
        self._number = number
        self._durable = durable
        size = os.fstat(fd).st_size
        if size < durable:
            raise damaged(path, size, f"it ends there, and {durable} bytes of it were durable")
        self._size = size if until is None else min(size, until)
        if until is not None and size < until:
            raise damaged(path, size, f"it ends there, and its first {until} bytes count")
        self._buffer = aligned_empty(0)
        self.end = SEGMENT_HEADER_BYTES
        """All records before this offset are valid."""

    def records(self, *, payloads: bool = True) -> Iterator[Record]:
        """Yields records to the end of the file, or to a tail that was never acknowledged. `payloads`: False for heads
        alone. Raises LogDamaged."""
        while self.end < self._size:
            at = self.end
            record, why = self._read(at, payloads=payloads)
            if record is None:
                if at < self._durable:
                    raise damaged(self._path, at, why)
                return
            self.end = record.end.offset
            yield record

    def _read(self, at: int, *, payloads: bool) -> tuple[Record | None, str]:
        header = os.pread(self._fd, RECORD_HEADER_BYTES, at)
        if len(header) != RECORD_HEADER_BYTES:
            return None, "a record's header is cut short"
        magic, kind, head_bytes, checksum, payload_bytes, place = _RECORD.unpack_from(header)
        begin = at + RECORD_HEADER_BYTES
        end = begin + head_bytes + payload_bytes
        if magic != RECORD_MAGIC or place != at or head_bytes > HEAD_BYTES_MAX or end > self._size:
            return None, "no record begins there that ends within the log"
        head = os.pread(self._fd, head_bytes, begin)
        if _CHECKSUM.pack(zlib.crc32(head, zlib.crc32(header[: _RECORD.size]))) != header[_RECORD.size :]:
            return None, "the checksum of a record's header is wrong"
        if kind not in _KINDS:
            return None, f"a record of kind {kind}, which is unknown to this release"
        payload = self._fill(payload_bytes if payloads else 0, begin + head_bytes)
        if payload is None or (payloads and zlib.crc32(payload.data) != checksum):
            return None, "the checksum of a record's payload is wrong"
        return Record(RecordKind(kind), head, payload, Mark(self._number, at), Mark(self._number, end)), ""

    def _fill(self, nbytes: int, at: int) -> Bytes | None:
        if len(self._buffer) < nbytes:
            self._buffer = aligned_empty(nbytes)
        found = self._buffer[:nbytes]
        done = 0
        while done < nbytes:
            got = os.preadv(self._fd, [found[done:].data], at + done)
            if not got:
                return None
            done += got
        return found


def _is_sealed(data: bytes) -> bool:
    content = data[: -_CHECKSUM.size]
    return _CHECKSUM.pack(zlib.crc32(content)) == data[-_CHECKSUM.size :]


def damaged(path: Path, offset: int, why: str) -> LogDamaged:
    return LogDamaged(f"{path} at byte {offset}: {why}", facts={"path": str(path), "offset": str(offset)})
