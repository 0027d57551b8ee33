"""Payload frames: protobuf's bytes, written and read without protobuf objects, so that payloads are not copied.

`PushFrame` and `PullFrame` have the same fields: `header = 1` (a message, here kept as bytes), `offset = 2` (fixed64)
and `data = 15` (bytes, last). Encoding copies the payload once. Decoding returns a view of it. Generated clients read
and write the same bytes (tests/unit/library/wire/test_frames.py compares the two).

Invariant: for any bytes, `decode` returns a Frame within the limits, or raises MalformedPayload or TooLarge.
Must not know: what a header means.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from shardyard.domain.errors import MalformedPayload, TooLarge
from shardyard.domain.limits import BLOCKS_MAX, FRAME_BYTES, FRAME_BYTES_MAX, MESSAGE_BYTES_MAX, VARIABLES_MAX

_TAG_HEADER = 1 << 3 | 2
_TAG_OFFSET = 2 << 3 | 1
_TAG_DATA = 15 << 3 | 2
_SMALL = tuple(bytes((value,)) for value in range(0x80))
_OFFSET = struct.Struct("<BQ")
_FIXED64 = struct.Struct("<Q")

Buffer = bytes | bytearray | memoryview


class Frame(NamedTuple):
    """`header`: a serialized PushHeader or PullHeader in the first frame of a stream; empty in the others. `offset`:
    where `data` begins in the payload of the stream, in bytes."""

    header: bytes
    offset: int
    data: Buffer


def encode(frame: Frame) -> bytes:
    """The frame as protobuf writes it."""
    parts: list[Buffer] = []
    if frame.header:
        parts += (bytes((_TAG_HEADER,)), _varint(len(frame.header)), frame.header)
    if frame.offset:
        parts.append(_OFFSET.pack(_TAG_OFFSET, frame.offset))
    if len(frame.data):
        parts += (bytes((_TAG_DATA,)), _varint(len(frame.data)), frame.data)
    return b"".join(parts)


def decode(message: bytes) -> Frame:
    """Reads a frame in any field order, unknown fields skipped. `data` is a view of `message`.

    Raises MalformedPayload if the bytes are not a frame, TooLarge if they are beyond a limit.
    """
    if len(message) > MESSAGE_BYTES_MAX:
        raise TooLarge(f"a frame has {len(message)} bytes; at most {MESSAGE_BYTES_MAX} are allowed")
    view = memoryview(message)
    end = len(view)
    headers: list[memoryview] = []  # protobuf allows a message in several pieces
    offset, data, at = 0, view[:0], 0
    while at < end:  # most numbers are of one byte
        tag, at = (view[at], at + 1) if view[at] < 0x80 else _read_varint(view, at)
        kind = tag & 7
        if tag >> 3 == 0:
            raise MalformedPayload(f"a frame has the field number 0 at byte {at}")
        if kind == 2:
            is_short = at < end and view[at] < 0x80
            length, at = (view[at], at + 1) if is_short else _read_varint(view, at)
            if length > end - at:
                raise MalformedPayload(f"a frame of {end} bytes has a field of {length} bytes at byte {at}")
            field, at = view[at : at + length], at + length
            if tag == _TAG_HEADER:
                headers.append(field)
            elif tag == _TAG_DATA:
                data = field
        elif kind in (1, 5):
            width = 8 if kind == 1 else 4
            if width > end - at:
                raise MalformedPayload(f"a frame ends within the number at byte {at}")
            if tag == _TAG_OFFSET:
                offset = _FIXED64.unpack_from(view, at)[0]
            at += width
        elif kind == 0:
            _, at = _read_varint(view, at)
        else:
            raise MalformedPayload(f"a frame has the unknown wire type {kind} at byte {at}")
    if len(data) > FRAME_BYTES_MAX:
        raise TooLarge(f"a frame has {len(data)} bytes of payload; at most {FRAME_BYTES_MAX} are allowed")
    return Frame(b"".join(headers), offset, data)


def cut(header: bytes, payload: Iterable[Buffer], frame_bytes: int = FRAME_BYTES) -> Iterator[Frame]:
    """Frames for a payload that is given in pieces. The first frame has the header.

    A payload of at most `frame_bytes` becomes one frame. A larger one is cut at the ends of its pieces and at each
    `frame_bytes`, so that large pieces are copied only once.
    """
    pieces: list[memoryview] = []
    total = 0
    for piece in payload:
        if len(piece):
            pieces.append(memoryview(piece).cast("B"))
            total += len(pieces[-1])
    if total <= frame_bytes:
        return iter((Frame(header, 0, pieces[0] if len(pieces) == 1 else b"".join(pieces)),))
    return _cut(header, pieces, frame_bytes)


def _cut(header: bytes, pieces: Sequence[memoryview], frame_bytes: int) -> Iterator[Frame]:
    offset = 0
    for piece in pieces:
        for start in range(0, len(piece), frame_bytes):
            part = piece[start : start + frame_bytes]
            yield Frame(header if offset == 0 else b"", offset, part)
            offset += len(part)


def cut_places(header: bytes, places: Iterable[tuple[int, Buffer]], frame_bytes: int = FRAME_BYTES) -> Iterator[Frame]:
    """Frames for pieces of a payload, each at its offset. The first frame has the header, if there is one. Without
    pieces: one frame with only the header."""
    for offset, piece in places:
        whole = memoryview(piece).cast("B")
        for start in range(0, len(whole), frame_bytes):
            yield Frame(header, offset + start, whole[start : start + frame_bytes])
            header = b""
    if header:
        yield Frame(header, 0, b"")


def cut_in_order(header: bytes, payload: Iterable[Buffer], frame_bytes: int = FRAME_BYTES) -> Iterator[Frame]:
    """As `cut`, for pieces that are made one by one: none is kept. Small ones share a frame."""
    offset, few = 0, bytearray()
    for piece in payload:
        whole = memoryview(piece).cast("B")
        if len(few) + len(whole) <= frame_bytes:
            few += whole
            continue
        for part in (memoryview(bytes(few)), whole):
            for start in range(0, len(part), frame_bytes):
                data = part[start : start + frame_bytes]
                yield Frame(header, offset, data)
                header, offset = b"", offset + len(data)
        few.clear()
    if header or few:
        yield Frame(header, offset, bytes(few))


class Scatter:
    """Puts frames, in any order, into memory that the caller gave. With `once`, each byte may come only once.

    Invariant: never writes beyond `into`; `complete` only when every byte has come.
    """

    def __init__(self, into: memoryview, *, once: bool = False) -> None:
        self._into = into
        self._once = once
        self._spans_max = BLOCKS_MAX if once else VARIABLES_MAX
        self._covered: list[tuple[int, int]] = []

    @property
    def complete(self) -> bool:
        return self._covered == [(0, len(self._into))] or len(self._into) == 0

    def add(self, frame: Frame) -> int:
        """Returns the number of bytes written. Raises MalformedPayload, without writing, for a frame beyond the end,
        and with `once` for a frame with bytes that have come before."""
        begin, end = frame.offset, frame.offset + len(frame.data)
        if end > len(self._into):
            raise MalformedPayload(
                f"a frame has {len(frame.data)} bytes at offset {begin} of a payload of {len(self._into)} bytes"
            )
        if begin == end:
            return 0
        if self._once and self._touches(begin, end):
            raise MalformedPayload(
                f"a frame has {len(frame.data)} bytes at offset {begin}, and some of them have come before"
            )
        self._into[begin:end] = frame.data
        self._cover(begin, end)
        return end - begin

    def has(self, begin: int, end: int) -> bool:
        """Whether every byte of [begin, end) has come."""
        at = bisect.bisect_right(self._covered, begin, key=lambda span: span[0]) - 1
        return begin >= end or (at >= 0 and self._covered[at][1] >= end)

    def _touches(self, begin: int, end: int) -> bool:
        at = bisect.bisect_right(self._covered, begin, key=lambda span: span[1])
        return at < len(self._covered) and self._covered[at][0] < end

    def _cover(self, begin: int, end: int) -> None:
        """Spans stay sorted, and do not touch each other."""
        spans = self._covered
        first = bisect.bisect_left(spans, begin, key=lambda span: span[1])
        last = bisect.bisect_right(spans, end, key=lambda span: span[0])
        if first < last:
            begin, end = min(begin, spans[first][0]), max(end, spans[last - 1][1])
        spans[first:last] = [(begin, end)]
        if len(spans) > self._spans_max:
            raise TooLarge(f"a payload comes in more than {self._spans_max} pieces that do not touch")


class Assembler:
    """Puts the frames of a stream, in order, into memory that the caller gave, and checks every length.

    `into`: pieces of memory that are filled one after the other. Invariant: never writes beyond them; `complete` only
    when every byte has come.
    """

    def __init__(self, *into: memoryview) -> None:
        self._pieces = [piece for piece in into if len(piece)]
        self._total = sum([len(piece) for piece in into])
        self._filled = 0
        self._piece = 0
        self._begin = 0
        """Where in the payload the current piece begins."""

    @property
    def complete(self) -> bool:
        return self._filled == self._total

    def add(self, frame: Frame) -> None:
        """Raises MalformedPayload for a frame out of order or beyond the announced length."""
        length = len(frame.data)
        if length == 0:
            return
        if frame.offset != self._filled:
            raise MalformedPayload(
                f"a frame has the offset {frame.offset}; expected {self._filled}, the bytes that came so far"
            )
        if length > self._total - self._filled:
            raise MalformedPayload(
                f"a frame has {length} bytes at offset {frame.offset}; the header announced {self._total} in all"
            )
        taken = 0
        while taken < length:
            piece, at = self._pieces[self._piece], self._filled - self._begin
            fits = min(length - taken, len(piece) - at)
            piece[at : at + fits] = frame.data[taken : taken + fits]
            taken, self._filled = taken + fits, self._filled + fits
            if at + fits == len(piece):
                self._piece, self._begin = self._piece + 1, self._filled

    def finish(self) -> None:
        """Raises MalformedPayload unless the whole payload has come."""
        if not self.complete:
            raise MalformedPayload(f"the stream ended after {self._filled} of {self._total} bytes of payload")


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _SMALL[value]
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        if at >= len(view):
            raise MalformedPayload("a frame ends within a number")
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise MalformedPayload(f"a frame has a number of more than 10 bytes before byte {at}")
