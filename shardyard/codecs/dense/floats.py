"""Elements without compression, and in 16 bits: codes RAW, BF16 and FP16.

Owns: rounding to bfloat16 and to IEEE 754 half precision, to nearest, halves to even. Halves are scaled by one power of
two for the block, so that its largest magnitude lies in [2**14, 2**15): gradients are often below 6e-8, where a half
ends, and nothing can overflow. Must not know: feedback (these codes have none).

Bounds, with m the largest magnitude of the block: BF16 |x - y| <= 2**-8 |x| + 2**-133; FP16 |x - y| <= 2**-11 |x| +
2**-39 m + 2**-149 (float64 elements are rounded to float32 first, 2**-24 |x| more).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from shardyard.codecs.format.compiled import CHUNK, Array, Float32s, Scratch, Uint8s, Words
from shardyard.codecs.format.form import CodeId, Reader, blank
from shardyard.domain.compiling import compiled
from shardyard.domain.errors import MalformedPayload

Uint16s = npt.NDArray[np.uint16]

_EXPONENT_MIN = -110
_EXPONENT_BIAS = 128
_MAGNITUDE_MAX = float(np.uint32(0x7F7F7FFF).view(np.float32))
"""The largest float32 that bfloat16 does not round to infinity."""


def encode_raw(values: npt.NDArray[Any]) -> Uint8s:
    """Elements of any dtype, shape (n,), little-endian. Exact."""
    code, body = blank(CodeId.RAW, values.size, b"", values.nbytes)
    body[:] = values.view(np.uint8)
    return code


def decode_raw(reader: Reader, out: npt.NDArray[Any]) -> None:
    out.view(np.uint8)[:] = reader.rest("elements", out.nbytes)


def magnitude(values: Array) -> float:
    """The largest |x| of an array of shape (n,); 0 if it is empty; infinity if an element is not finite."""
    scratch = Scratch(values.dtype, 1)
    scratch.bits[0] = _largest(values.view(scratch.bits.dtype), scratch.magnitude)
    found = float(scratch.values[0])
    return found if math.isfinite(found) else math.inf


def encode_bf16(values: Array) -> Uint8s | None:
    """None if an element is not finite, or beyond bfloat16."""
    if magnitude(values) > _MAGNITUDE_MAX:
        return None
    halves = np.empty(values.size, np.uint16)
    _to_bf16(_as_float32(values).view(np.uint32), halves)
    return _halves_code(CodeId.BF16, b"", halves)


def decode_bf16(reader: Reader, out: Array) -> None:
    _from_bf16(_halves(reader), np.empty(min(CHUNK, out.size), np.uint32), out)


def encode_fp16(values: Array) -> Uint8s | None:
    """None if an element is not finite, or beyond float32."""
    largest = magnitude(values)
    if largest > _MAGNITUDE_MAX:
        return None
    halves, exponent = _scaled_halves(_as_float32(values), largest)
    return _halves_code(CodeId.FP16, bytes((exponent,)), halves)


def decode_fp16(reader: Reader, out: Array) -> None:
    exponent = reader.byte("exponent")
    from_halves(_halves(reader), exponent, out)


def to_halves(values: Float32s) -> tuple[Uint16s, int]:
    """Finite float32 as halves times 2**(exponent - 128); the exponent is a byte."""
    return _scaled_halves(values, magnitude(values))


def _scaled_halves(values: Float32s, largest: float) -> tuple[Uint16s, int]:
    exponent = max(_EXPONENT_MIN, math.frexp(largest)[1] - 15)
    halves = np.empty(values.size, np.uint16)
    _to_fp16(values, np.float32(math.ldexp(1.0, -exponent)), np.empty(CHUNK, np.float32), halves)
    return halves, exponent + _EXPONENT_BIAS


def from_halves(halves: Uint16s, exponent: int, out: Array) -> None:
    """The inverse, into float32 or float64."""
    scale = out.dtype.type(math.ldexp(1.0, exponent - _EXPONENT_BIAS))
    _from_fp16(halves, scale, np.empty(min(CHUNK, out.size), np.uint32), out)


def _as_float32(values: Array) -> Float32s:
    return values.astype(np.float32, copy=False)


def _halves_code(code: CodeId, header: bytes, halves: Uint16s) -> Uint8s:
    made, body = blank(code, halves.size, header, halves.nbytes)
    body[:] = halves.view(np.uint8)
    return made


def _halves(reader: Reader) -> Uint16s:
    return reader.rest("elements", 2 * reader.elements).copy().view(np.uint16)


def check_floating(out: npt.NDArray[Any], reader: Reader) -> None:
    """Raises MalformedPayload unless the array's elements are float32 or float64."""
    if out.dtype not in (np.float32, np.float64):
        raise MalformedPayload(f"a {reader.id.name} code came for elements of {out.dtype}, which travel only as RAW")


@compiled
def _largest(bits: Words, mask: np.unsignedinteger[Any]) -> np.unsignedinteger[Any]:
    top = mask ^ mask
    for i in range(bits.size):
        top = max(top, bits[i] & mask)
    return top


@compiled
def _to_bf16(bits: Words, out: Uint16s) -> None:
    for i in range(bits.size):
        b = bits[i]
        out[i] = np.uint16((b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@compiled
def _from_bf16(halves: Uint16s, bits: Words, out: Array) -> None:
    values = bits.view(np.float32)
    for start in range(0, halves.size, CHUNK):
        hs, ys = halves[start : start + CHUNK], out[start : start + CHUNK]
        for i in range(hs.size):
            bits[i] = np.uint32(hs[i]) << np.uint32(16)
        for i in range(hs.size):
            ys[i] = values[i]


@compiled
def _to_fp16(values: Float32s, scale: np.float32, scratch: Float32s, out: Uint16s) -> None:
    """|values| * scale < 2**15. A half below 2**-14 is subnormal: there, adding 1/2 leaves its bits at the end."""
    bits = scratch.view(np.int32)
    tiny = np.empty(CHUNK, np.float32)
    tiny_bits = tiny.view(np.int32)
    for start in range(0, values.size, CHUNK):
        xs, hs = values[start : start + CHUNK], out[start : start + CHUNK]
        for i in range(xs.size):
            scratch[i] = xs[i] * scale
        for i in range(xs.size):
            tiny[i] = abs(scratch[i]) + np.float32(0.5)
        for i in range(xs.size):
            b = np.int32(bits[i] & np.int32(0x7FFFFFFF))
            sign = np.int32(bits[i] >> np.int32(16)) & np.int32(0x8000)
            odd = np.int32(b >> np.int32(13)) & np.int32(1)
            normal = np.int32(np.int32(b - np.int32((112 << 23) - 0xFFF)) + odd) >> np.int32(13)
            subnormal = np.int32(tiny_bits[i] - np.int32(126 << 23))
            hs[i] = np.uint16((subnormal if b < np.int32(113 << 23) else normal) | sign)


@compiled
def _from_fp16(halves: Uint16s, scale: np.floating[Any], bits: Words, out: Array) -> None:
    """Halves by their bits: the exponent is moved from 5 bits to 8; below 2**-14 a subtraction normalises."""
    values = bits.view(np.float32)
    for start in range(0, halves.size, CHUNK):
        hs, ys = halves[start : start + CHUNK], out[start : start + CHUNK]
        for i in range(hs.size):
            h = np.int32(hs[i])
            exponent = h & np.int32(0x7C00)
            step = np.int32(224 << 23) if exponent == np.int32(0x7C00) else np.int32(112 << 23)
            step = np.int32(113 << 23) if exponent == np.int32(0) else step
            bits[i] = np.uint32(np.int32((h & np.int32(0x7FFF)) << np.int32(13)) + step)
        for i in range(hs.size):
            h = np.int32(hs[i])
            values[i] -= np.float32(2.0**-14) if (h & np.int32(0x7C00)) == np.int32(0) else np.float32(0)
        for i in range(hs.size):
            v = values[i] * scale
            ys[i] = -v if np.int32(hs[i]) & np.int32(0x8000) else v
