"""Frames of HTTP/2 (RFC 9113) and headers of HPACK (RFC 7541, literals only), as bytes to send to a gRPC server.

Must not know: connections, attacks.
"""

from __future__ import annotations

import struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4
ACK: Final = 1
INITIAL_WINDOW_SIZE: Final = 4
CANCEL: Final = 8
_FRAME_HEAD: Final = 9
_LITERAL: Final = b"\0"
_IN_ONE_BYTE: Final = 127


def frame(kind: int, stream: int = 0, payload: bytes = b"", flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def begin(settings: dict[int, int] | None = None) -> bytes:
    """What a client sends first."""
    payload = b"".join(struct.pack(">HI", name, value) for name, value in (settings or {}).items())
    return PREFACE + frame(SETTINGS, payload=payload)


def headers(path: str, **more: str) -> bytes:
    """The header block of a gRPC call."""
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":path": path,
        ":authority": "yard",
        "content-type": "application/grpc",
        "te": "trailers",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    return b"".join(_field(name.encode(), value.encode()) for name, value in fields.items())


def call(stream: int, path: str, **more: str) -> bytes:
    """Begins a call."""
    return frame(HEADERS, stream, headers(path, **more), END_HEADERS)


def message(content: bytes, *, claims_bytes: int | None = None, compressed: bool = False) -> bytes:
    """A message of gRPC, to be cut into DATA frames. `claims_bytes`: the length that it says, if not the true one."""
    return struct.pack(">BI", compressed, len(content) if claims_bytes is None else claims_bytes) + content


def data(stream: int, content: bytes, *, last: bool = False) -> bytes:
    """DATA frames of at most 16 KiB, which every peer takes."""
    pieces = [content[at : at + 16_384] for at in range(0, len(content), 16_384)] or [b""]
    ends = [END_STREAM if last and at == len(pieces) - 1 else 0 for at in range(len(pieces))]
    return b"".join(frame(DATA, stream, piece, flags) for piece, flags in zip(pieces, ends, strict=True))


def reset(stream: int) -> bytes:
    return frame(RST_STREAM, stream, struct.pack(">I", CANCEL))


def widen(stream: int, by_bytes: int) -> bytes:
    """Lets the server send more on a stream; 0: on the connection."""
    return frame(WINDOW_UPDATE, stream, struct.pack(">I", by_bytes))


def replies(received: bytearray) -> bytes:
    """What a client answers to frames that it has received: SETTINGS and PING. Whole frames are removed."""
    found = []
    while len(received) >= _FRAME_HEAD and len(received) >= (end := _FRAME_HEAD + int.from_bytes(received[:3], "big")):
        kind, flags = received[3:5]
        if kind in {SETTINGS, PING} and not flags & ACK:
            found.append(frame(kind, payload=bytes(received[_FRAME_HEAD:end]) if kind == PING else b"", flags=ACK))
        del received[:end]
    return b"".join(found)


def _field(name: bytes, value: bytes) -> bytes:
    return _LITERAL + _text(name) + _text(value)


def _text(content: bytes) -> bytes:
    length = len(content)
    if length < _IN_ONE_BYTE:
        return bytes((length,)) + content
    length -= _IN_ONE_BYTE
    found = [_IN_ONE_BYTE]
    while length >= 128:
        found.append(length % 128 + 128)
        length //= 128
    return bytes((*found, length)) + content
