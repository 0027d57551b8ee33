"""The hand-made frame codec against the generated classes, and the assembler against torn and lying streams."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.domain.errors import MalformedPayload, TooLarge
from shardyard.domain.limits import FRAME_BYTES, FRAME_BYTES_MAX, MESSAGE_BYTES_MAX
from shardyard.wire import frames
from shardyard.wire.frames import Assembler, Frame
from shardyard.wire.v1 import parameter_server_pb2 as wire

KINDS = (wire.PushFrame, wire.PullFrame)
HEADERS = {
    wire.PushFrame: wire.PushHeader(generation=3, weight=2.5, kind=wire.PUSH_KIND_GRADIENT),
    wire.PullFrame: wire.PullHeader(parts=[wire.PulledPart(partition=4, alike=64)]),
}
HEADER = b"\x0a\x02\x28\x01"  # field 1, 2 bytes: kind 1
OFFSET = b"\x11\x40" + bytes(7)  # field 2, fixed64, 64
DATA = b"\x7a\x03abc"  # field 15, 3 bytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_header", [True, False])
def test_codec_and_generated_class_write_and_read_the_same_bytes(
    kind: type[wire.PushFrame] | type[wire.PullFrame], with_header: bool
) -> None:
    for offset, length in itertools.product((0, 1, (1 << 64) - 1), (0, 1, 127, 128, 16_383, 16_384, FRAME_BYTES)):
        _compare(kind, with_header, offset, length)


def _compare(kind: type[wire.PushFrame] | type[wire.PullFrame], with_header: bool, offset: int, length: int) -> None:
    data = bytes(index % 251 for index in range(min(length, 4_096))).ljust(length, b"\x07")
    header = HEADERS[kind] if with_header else None
    theirs = kind(header=header, offset=offset, data=data)  # type: ignore[arg-type]
    ours = Frame(header.SerializeToString() if header else b"", offset, data)
    assert frames.encode(ours) == theirs.SerializeToString()
    assert kind.FromString(frames.encode(ours)) == theirs
    assert frames.decode(theirs.SerializeToString()) == ours


def test_every_kind_of_buffer_is_encoded_alike() -> None:
    data = bytes(range(64))
    array = np.frombuffer(data, dtype=np.uint8)
    for buffer in (data, bytearray(data), memoryview(data), array.data):
        assert frames.encode(Frame(b"h", 7, buffer)) == frames.encode(Frame(b"h", 7, data))


def test_payload_is_decoded_as_a_view_of_the_message() -> None:
    message = frames.encode(Frame(b"", 0, b"x" * 1000))
    data = frames.decode(message).data
    assert isinstance(data, memoryview)
    assert data.obj is message


@pytest.mark.parametrize(
    "message",
    [DATA + OFFSET + HEADER, OFFSET + DATA + HEADER, HEADER + DATA + OFFSET],
    ids=["backwards", "header last", "data in the middle"],
)
def test_fields_may_come_in_any_order(message: bytes) -> None:
    assert frames.decode(message) == Frame(b"\x28\x01", 64, b"abc")


def test_of_a_field_that_comes_twice_the_last_counts_and_headers_are_joined() -> None:
    pieces = [wire.PushHeader(generation=3), wire.PushHeader(generation=4, weight=2.0)]
    message = b"".join(wire.PushFrame(header=piece, offset=1, data=b"old").SerializeToString() for piece in pieces)
    message += OFFSET + DATA
    theirs = wire.PushFrame.FromString(message)
    ours = frames.decode(message)
    assert (ours.offset, bytes(ours.data)) == (theirs.offset, theirs.data) == (64, b"abc")
    assert wire.PushHeader.FromString(ours.header) == theirs.header == wire.PushHeader(generation=4, weight=2.0)


@pytest.mark.parametrize(
    "unknown",
    [
        b"\x18\x96\x01",  # field 3, varint
        b"\x21" + bytes(8),  # field 4, 64 bits
        b"\x2d" + bytes(4),  # field 5, 32 bits
        b"\x32\x05hello",  # field 6, bytes
        b"\x08\x05",  # field 1 with the wire type of a number
        b"\x12\x02hi",  # field 2 with the wire type of bytes
        b"\x7d" + bytes(4),  # field 15 with the wire type of 32 bits
        b"\xf8\xff\xff\xff\x0f\x01",  # the highest field number
    ],
)
def test_unknown_fields_are_skipped(unknown: bytes) -> None:
    for at in range(4):
        fields = [HEADER, OFFSET, DATA]
        fields.insert(at, unknown)
        message = b"".join(fields)
        assert frames.decode(message) == Frame(b"\x28\x01", 64, b"abc")
        assert wire.PushFrame.FromString(message).data == b"abc"


def test_overlong_numbers_are_read() -> None:
    tag = b"\xfa\x80\x80\x80\x00"
    length = b"\x83\x80\x80\x80\x80\x00"
    assert frames.decode(tag + b"\x03abc").data == b"abc"
    assert frames.decode(b"\x7a" + length + b"abc").data == b"abc"


@pytest.mark.parametrize(
    "message",
    [
        b"\x00",  # field number 0
        b"\x02\x00",
        b"\x7a",  # no length
        b"\x7a\x04abc",  # cut off
        b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # 2**64 - 1 bytes
        b"\x7a\xff\xff\xff\xff\x0f",  # 4 GiB
        b"\x7a" + b"\x80" * 10 + b"\x00",  # a number of 11 bytes
        b"\xff" * 64,
        b"\x80",  # ends within a tag
        b"\x11" + bytes(7),  # a fixed64 of 7 bytes
        b"\x2d" + bytes(3),
        b"\x18\x80",
        b"\x0b\x0c",  # groups, which proto3 does not have
        b"\x0e",  # wire types 6 and 7
        b"\x0f",
        HEADER + OFFSET + DATA[:-1],
    ],
)
def test_bytes_that_are_no_frame_are_malformed(message: bytes) -> None:
    with pytest.raises(MalformedPayload):
        frames.decode(message)


def test_frame_beyond_the_limits_is_too_large() -> None:
    assert len(frames.decode(frames.encode(Frame(b"", 0, bytes(FRAME_BYTES_MAX)))).data) == FRAME_BYTES_MAX
    with pytest.raises(TooLarge):
        frames.decode(frames.encode(Frame(b"", 0, bytes(FRAME_BYTES_MAX + 1))))
    with pytest.raises(TooLarge):
        frames.decode(bytes(MESSAGE_BYTES_MAX + 1))


def test_small_payload_travels_in_the_frame_of_its_header() -> None:
    assert list(frames.cut(b"h", [])) == [Frame(b"h", 0, b"")]
    assert list(frames.cut(b"h", [b"", b"ab", b"c"], 4)) == [Frame(b"h", 0, b"abc")]


def test_large_payload_is_cut_in_order_and_within_the_limit() -> None:
    found = list(frames.cut(b"h", [b"abcde", b"f", b"ghij"], 2))
    assert [(frame.header, frame.offset, bytes(frame.data)) for frame in found] == [
        (b"h", 0, b"ab"),
        (b"", 2, b"cd"),
        (b"", 4, b"e"),
        (b"", 5, b"f"),
        (b"", 6, b"gh"),
        (b"", 8, b"ij"),
    ]


def room(length: int) -> tuple[bytearray, Assembler]:
    """Memory of that length within guards of 8 bytes, and an assembler for it."""
    memory = bytearray(b"\xee" * (length + 16))
    return memory, Assembler(memoryview(memory)[8 : 8 + length])


@pytest.mark.parametrize("offset", [0, 1, 3, 4, (1 << 64) - 1])
def test_frame_out_of_order_is_malformed_and_writes_nothing(offset: int) -> None:
    memory, assembler = room(4)
    assembler.add(Frame(b"", 0, b"ab"))
    before = bytes(memory)
    with pytest.raises(MalformedPayload, match="expected 2"):
        assembler.add(Frame(b"", offset, b"cd"))
    assert bytes(memory) == before


def test_frame_beyond_the_announced_length_is_malformed_and_writes_nothing() -> None:
    memory, assembler = room(4)
    assembler.add(Frame(b"", 0, b"abc"))
    before = bytes(memory)
    with pytest.raises(MalformedPayload, match="announced 4"):
        assembler.add(Frame(b"", 3, b"de"))
    assert bytes(memory) == before
    assembler.add(Frame(b"", 3, b"d"))
    with pytest.raises(MalformedPayload):
        assembler.add(Frame(b"", 4, b"e"))


def test_stream_that_ends_early_is_malformed() -> None:
    _, assembler = room(4)
    assembler.add(Frame(b"", 0, b"abc"))
    with pytest.raises(MalformedPayload, match="3 of 4"):
        assembler.finish()


@given(st.data())
def test_pieces_in_any_order_make_a_payload_whole_when_every_byte_has_come(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 60))
    place = st.tuples(st.integers(0, 60), st.binary(max_size=20))
    into, expected, come = bytearray(length), bytearray(length), set[int]()
    scatter = frames.Scatter(memoryview(into))
    for offset, piece in data.draw(st.lists(place, max_size=25)):
        if offset + len(piece) > length:
            with pytest.raises(MalformedPayload):
                scatter.add(Frame(b"", offset, piece))
            continue
        assert scatter.add(Frame(b"", offset, piece)) == len(piece)
        expected[offset : offset + len(piece)] = piece
        come.update(range(offset, offset + len(piece)))
        assert into == expected
        assert scatter.complete == (len(come) == length)


def test_bytes_that_may_come_once_are_taken_at_any_place_and_never_again() -> None:
    into = bytearray(100)
    scatter = frames.Scatter(memoryview(into), once=True)
    for begin, end in ((60, 80), (0, 20), (20, 30)):
        scatter.add(Frame(b"", begin, b"x" * (end - begin)))
    assert scatter.has(0, 30)
    assert scatter.has(65, 80)
    assert not scatter.has(0, 31)
    assert not scatter.has(59, 61)
    before = bytes(into)
    for begin, length in ((0, 1), (10, 60), (29, 5), (59, 2), (79, 2), (55, 40), (0, 100)):
        with pytest.raises(MalformedPayload, match="come before"):
            scatter.add(Frame(b"", begin, b"y" * length))
    for begin, length in ((80, 21), (100, 1), (1 << 40, 1)):
        with pytest.raises(MalformedPayload):
            scatter.add(Frame(b"", begin, b"y" * length))
    assert bytes(into) == before
    scatter.add(Frame(b"", 30, b"z" * 30))
    assert not scatter.complete
    scatter.add(Frame(b"", 80, b"z" * 20))
    assert scatter.complete
