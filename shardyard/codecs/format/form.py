"""The form of all codes: an id, the number of elements, then what the codec itself defines.

Owns: the ids, how headers are written and read, the bounds. Invariant: a Reader never reads beyond its bytes, and
raises only MalformedPayload or TooLarge. Memory is allocated only for sizes that were checked against the bytes or
against the caller's array. Must not know: any codec.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardyard.codecs.format.compiled import Float32s, Uint8s
from shardyard.domain.errors import MalformedPayload, TooLarge
from shardyard.domain.limits import BLOCK_ELEMENTS_MAX

Buffer = bytes | bytearray | memoryview
VARINT_BYTES_MAX: Final = 5
_FLOAT32 = struct.Struct("<f")
_UINT64 = struct.Struct("<Q")


class CodeId(enum.IntEnum):
    """The first byte of a code."""

    RAW = 0
    BF16 = 1
    FP16 = 2
    INT8 = 3
    QSGD = 4
    ONEBIT = 5
    TOPK = 6
    RANDOMK = 7
    POWERSGD = 8
    DELTA = 9
    ZSTD = 10


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def float32(value: float) -> bytes:
    return _FLOAT32.pack(value)


def uint64(value: int) -> bytes:
    return _UINT64.pack(value)


def blank(code: CodeId, elements: int, header: bytes, body_bytes: int) -> tuple[Uint8s, Uint8s]:
    """A new code with its header, and a view of its body, which the codec fills."""
    head = bytes((code,)) + varint(elements) + header
    whole = np.empty(len(head) + body_bytes, np.uint8)
    whole[: len(head)] = np.frombuffer(head, np.uint8)
    return whole, whole[len(head) :]


def whole(code: CodeId, elements: int, header: bytes, *body: npt.NDArray[Any]) -> Uint8s:
    """A code with a header and arrays, one after the other."""
    made, rest = blank(code, elements, header, sum(part.nbytes for part in body))
    at = 0
    for part in body:
        rest[at : at + part.nbytes] = part.reshape(-1).view(np.uint8)
        at += part.nbytes
    return made


class Reader:
    """Reads a code. `elements`: the length of the array that it is for."""

    def __init__(self, code: Buffer, elements: int) -> None:
        if elements > BLOCK_ELEMENTS_MAX:
            raise TooLarge(f"a block has {elements} elements; at most {BLOCK_ELEMENTS_MAX} can be encoded")
        self._bytes: Uint8s = np.frombuffer(code, np.uint8)
        if not len(self._bytes):
            raise MalformedPayload("a code has no bytes")
        try:
            self.id = CodeId(int(self._bytes[0]))
        except ValueError:
            raise MalformedPayload(f"a code begins with {self._bytes[0]}, which is no codec") from None
        self._at = 1
        self.elements = elements
        counted = self.varint("number of elements", BLOCK_ELEMENTS_MAX)
        if counted != elements:
            raise MalformedPayload(f"a {self.id.name} code has {counted} elements; the block has {elements}")

    @property
    def left(self) -> int:
        return len(self._bytes) - self._at

    def byte(self, name: str, maximum: int = 255) -> int:
        if not self.left:
            raise MalformedPayload(f"a {self.id.name} code ends before its {name}")
        value = int(self._bytes[self._at])
        self._at += 1
        return self._bounded(name, value, 0, maximum)

    def varint(self, name: str, maximum: int, minimum: int = 0) -> int:
        value = 0
        for shift in range(0, 7 * VARINT_BYTES_MAX, 7):
            byte = self.byte(name)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return self._bounded(name, value, minimum, maximum)
        raise MalformedPayload(f"the {name} of a {self.id.name} code has more than {VARINT_BYTES_MAX} bytes")

    def _bounded(self, name: str, value: int, minimum: int, maximum: int) -> int:
        if not minimum <= value <= maximum:
            raise MalformedPayload(
                f"the {name} of a {self.id.name} code of {self.elements} elements is {value}; expected {minimum} to"
                f" {maximum}"
            )
        return value

    def take(self, name: str, length: int) -> Uint8s:
        """A view of the next `length` bytes."""
        if length > self.left:
            raise MalformedPayload(f"the {name} of a {self.id.name} code has {self.left} bytes; expected {length}")
        self._at += length
        return self._bytes[self._at - length : self._at]

    def rest(self, name: str, length: int) -> Uint8s:
        """A view of the last `length` bytes. Raises MalformedPayload if there are more or fewer."""
        if length != self.left:
            raise MalformedPayload(f"the {name} of a {self.id.name} code has {self.left} bytes; expected {length}")
        return self.take(name, length)

    def float32(self, name: str) -> float:
        return float(_FLOAT32.unpack(self.take(name, 4).data)[0])

    def uint64(self, name: str) -> int:
        return int(_UINT64.unpack(self.take(name, 8).data)[0])

    def float32s(self, name: str, count: int) -> Float32s:
        """A copy of the next `count` numbers, since a code may lie at any address."""
        return self.take(name, 4 * count).copy().view(np.float32)

    def end(self) -> None:
        if self.left:
            raise MalformedPayload(f"a {self.id.name} code has {self.left} bytes too many")
