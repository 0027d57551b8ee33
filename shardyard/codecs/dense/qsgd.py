"""Random rounding to a few levels: code QSGD.

Alistarh, Grubic, Li, Tomioka, Vojnovic: *QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding*,
NeurIPS 2017. A bucket's elements are rounded to the neighbouring multiples of scale = m / levels, up or down at random,
so that the mean of y is x; no feedback. Departures: buckets are scaled by their largest magnitude m, not by their
2-norm; levels are packed into ceil(log2(2 levels + 1)) bits instead of Elias codes ("+zstd" serves where most are 0).

Bound: |x - y| <= 1.0001 * m / levels, and the mean of y is x. A bucket with m < 1e-35 is sent as zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardyard.codecs.dense.int8 import SCALE_MIN
from shardyard.codecs.format.compiled import Array, Float32s, Scratch, Uint8s, Words
from shardyard.codecs.format.form import CodeId, Reader, blank, varint
from shardyard.domain.compiling import compiled
from shardyard.domain.compression import LEVELS_MAX
from shardyard.domain.errors import MalformedPayload
from shardyard.domain.limits import BLOCK_ELEMENTS_MAX


def encode(values: Array, levels: int, bucket: int, key: int) -> Uint8s | None:
    """The code of `values`, shape (n,), with random numbers from `key` (64 bits). None if an element is not finite, or
    beyond float32."""
    buckets = -(-values.size // bucket)
    width = (2 * levels).bit_length()
    packed_bytes = -(-values.size * width // 8)
    made, body = blank(CodeId.QSGD, values.size, varint(bucket) + bytes((levels,)), 4 * buckets + packed_bytes)
    scales = np.empty(buckets, np.float32)
    scratch = Scratch(values.dtype, bucket)
    numbers = np.empty(-(-values.size // 8) * 8, np.uint8)
    numbers[values.size :] = 0
    if not _round(
        values,
        scratch.values,
        scratch.bits,
        scratch.magnitude,
        bucket,
        levels,
        np.uint32(key & 0xFFFFFFFF),
        np.uint32(key >> 32 & 0xFFFFFFFF),
        scales,
        numbers,
    ):
        return None
    body[: 4 * buckets] = scales.view(np.uint8)
    _pack(numbers, width, body[4 * buckets :])
    return made


def decode(reader: Reader, out: Array) -> None:
    bucket = reader.varint("bucket", BLOCK_ELEMENTS_MAX, minimum=1)
    levels = reader.byte("levels", LEVELS_MAX)
    if levels == 0:
        raise MalformedPayload("a QSGD code has 0 levels")
    scales = reader.float32s("scales", -(-out.size // bucket))
    width = (2 * levels).bit_length()
    packed = reader.rest("elements", -(-out.size * width // 8))
    _unpack(packed, width, levels, scales, bucket, out)


@compiled
def _noise(i: np.uint32, low: np.uint32, high: np.uint32) -> np.uint32:
    """A hash of the element's number under a key (Wellons' lowbias32, keyed twice)."""
    x = np.uint32(i * np.uint32(0x9E3779B1) + low)
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)) ^ high)
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@compiled
def _round(
    x: Array,
    t: Array,
    bits: Words,
    magnitude: np.unsignedinteger[Any],
    bucket: int,
    levels: int,
    low_key: np.uint32,
    high_key: np.uint32,
    scales: Float32s,
    numbers: Uint8s,
) -> bool:
    """Writes levels + round(x / scale) for each element. Returns False if one is not finite, or beyond float32."""
    top_bits = np.empty(1, bits.dtype)
    top_value = top_bits.view(t.dtype)
    noise = np.empty(t.size, np.uint32)
    for b in range(scales.size):
        low = b * bucket
        n = min(bucket, x.size - low)
        xs, out = x[low : low + n], numbers[low : low + n]
        for i in range(n):
            t[i] = xs[i]
        top = magnitude ^ magnitude
        for i in range(n):
            top = max(top, bits[i] & magnitude)
        top_bits[0] = top
        if not top_value[0] <= np.float32(3e38):
            return False
        # a little larger, so that no rounding puts an element beyond the last level
        scale = np.float32(top_value[0]) / np.float32(levels) * np.float32(1 + 2.0**-21)
        if scale < SCALE_MIN:
            scale = np.float32(0)
        scales[b] = scale
        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
        for i in range(n):
            noise[i] = _noise(np.uint32(low + i), low_key, high_key)
        for i in range(n):
            u = np.float32(np.int32(noise[i] >> np.uint32(8))) * np.float32(2.0**-24)
            out[i] = np.uint8(np.int32(t[i] * inverse + u + np.float32(levels)))
    return True


@compiled
def _pack(numbers: Uint8s, width: int, out: Uint8s) -> None:
    """Eight numbers of `width` bits to `width` bytes, lowest bits first. `numbers` has a multiple of 8."""
    for j in range(numbers.size // 8):
        eight = numbers[8 * j : 8 * j + 8]
        word = np.uint64(0)
        for k in range(8):
            word |= np.uint64(eight[k]) << np.uint64(width * k)
        to = out[j * width :]
        if to.size >= 8:  # bytes written too many are overwritten by the next eight
            for k in range(8):
                to[k] = np.uint8(word >> np.uint64(8 * k))
        else:
            for k in range(min(width, to.size)):
                to[k] = np.uint8(word >> np.uint64(8 * k))


@compiled
def _unpack(packed: Uint8s, width: int, levels: int, scales: Float32s, bucket: int, out: Array) -> None:
    """Fills `out`. Numbers beyond the last level are used as they are; they do no harm."""
    mask = np.uint64((1 << width) - 1)
    numbers = np.empty((out.size + 7) // 8 * 8, np.uint8)
    for j in range(numbers.size // 8):
        word = np.uint64(0)
        source = packed[j * width :]
        if source.size >= 8:
            for k in range(8):
                word |= np.uint64(source[k]) << np.uint64(8 * k)
        else:
            for k in range(source.size):
                word |= np.uint64(source[k]) << np.uint64(8 * k)
        eight = numbers[8 * j : 8 * j + 8]
        for k in range(8):
            eight[k] = np.uint8((word >> np.uint64(width * k)) & mask)
    for b in range(scales.size):
        low = b * bucket
        n = min(bucket, out.size - low)
        ys, qs = out[low : low + n], numbers[low : low + n]
        scale = scales[b]
        for i in range(n):
            ys[i] = np.float32(np.int32(qs[i]) - levels) * scale
