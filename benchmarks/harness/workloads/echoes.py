"""Messages that are sent there and back, and how each says how many there are, and of how many bytes."""

from __future__ import annotations

import struct

from shardyard.wire.method import Method, Wire
from shardyard.wire.methods import PACKAGE

SERVICE = "Echo"
_HEAD = struct.Struct("<QQ")
HEAD_BYTES = _HEAD.size


def _same(message: bytes) -> bytes:
    return message


_BYTES = Wire(_same, _same)
ECHO = Method(f"{PACKAGE}.{SERVICE}", "Echo", _BYTES, _BYTES, streams_in=True, streams_out=True)


def message(count: int, nbytes: int) -> bytes:
    """The first of `count` messages of `nbytes` each."""
    return _HEAD.pack(count, nbytes) + bytes(nbytes - HEAD_BYTES)


def sizes_in(head: bytes) -> tuple[int, int]:
    """What `message` has written."""
    count, nbytes = _HEAD.unpack_from(head)
    return count, nbytes
