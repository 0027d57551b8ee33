"""Reads numbers of code headers inside compiled loops.

Invariant: the result is that of `form.Reader.varint`, and nothing is read from `end` on. Must not know: what the
numbers count.
"""

from __future__ import annotations

from typing import Final

from shardyard.codecs.format.compiled import Uint8s
from shardyard.codecs.format.form import VARINT_BYTES_MAX
from shardyard.domain.compiling import compiled

NONE: Final = -1


@compiled
def read_varint(codes: Uint8s, at: int, end: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends; NONE if it has no end."""
    value, shift = 0, 0
    while at < end and shift < 7 * VARINT_BYTES_MAX:
        byte = int(codes[at])
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    return NONE, at
