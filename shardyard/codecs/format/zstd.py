"""A code in a zstd frame: code ZSTD. Nothing is lost.

Collet: *Zstandard*, RFC 8878. It is worth its time for codes that still have redundancy.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import zstandard

from shardyard.codecs.format.compiled import Uint8s
from shardyard.codecs.format.form import CodeId, Reader, varint, whole
from shardyard.domain.errors import MalformedPayload

LEVEL: Final = 1
WINDOW_BYTES_MAX: Final = 1 << 27
_BYTES_PER_ELEMENT_MAX: Final = 8
_HEADER_BYTES_MAX: Final = 64


def pack(code: Uint8s, elements: int) -> Uint8s:
    """The code in a zstd frame, or the code itself if the frame would be longer."""
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(code.data)
    packed = whole(CodeId.ZSTD, elements, varint(code.size), np.frombuffer(frame, np.uint8))
    return packed if packed.size < code.size else code


def unpack(reader: Reader) -> bytes:
    """The code in the frame. It is not a ZSTD code itself."""
    length = reader.varint("length", _BYTES_PER_ELEMENT_MAX * reader.elements + _HEADER_BYTES_MAX, minimum=1)
    frame = reader.rest("frame", reader.left).data
    try:
        announced = zstandard.get_frame_parameters(frame).content_size
        if announced != length:
            raise MalformedPayload(f"a ZSTD code announces {length} bytes, and its frame {announced}")
        inner = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX).decompress(
            frame, max_output_size=length, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise MalformedPayload(f"the frame of a ZSTD code cannot be read: {error}") from None
    if len(inner) != length or inner[0] == CodeId.ZSTD:
        raise MalformedPayload("a ZSTD code has another ZSTD code in it, or another length than it says")
    return inner
