"""Eight bits for each element and one scale for each bucket: codes INT8 and DELTA.

Per-bucket absolute-maximum scaling as in Dettmers, *8-Bit Approximations for Parallelism in Deep Learning*, ICLR 2016,
with linear levels: y = q * scale, scale = m / 127, q = round(x / scale), where m is the largest magnitude of a bucket.
Departure: the rounding error is kept as feedback (Karimireddy et al., ICML 2019).
DELTA has the same form; the receiver adds it to its values.

Bound: |x - y| <= 1.0001 * m / 254. A bucket with m < 1e-35 is sent as zeros. Float64 elements: the same.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardyard.codecs.format.compiled import Array, Float32s, Scratch, Uint8s, Words, empty_like_pair
from shardyard.codecs.format.form import CodeId, Reader, blank, varint
from shardyard.domain.compiling import compiled
from shardyard.domain.limits import BLOCK_ELEMENTS_MAX

Int8s = npt.NDArray[np.int8]

SCALE_MIN: Final = np.float32(7.8e-38)
"""A bucket with a smaller scale is sent as zeros. Its inverse is finite, and with 127 levels no magnitude of 1e-35 or
more has a smaller one."""
PLAIN: Final = 0
FEEDBACK: Final = 1
DELTA: Final = 2


def encode(values: Array, bucket: int) -> Uint8s | None:
    """The code of `values`, shape (n,). None if an element is not finite, or beyond float32."""
    none = empty_like_pair(values)
    return _quantised(CodeId.INT8, PLAIN, values, none, none, bucket)


def encode_feedback(gradient: Array, before: Array, after: Array, bucket: int) -> Uint8s | None:
    """The code of gradient + before. Puts what it leaves out into `after`. All have shape (n,) and one dtype. None as
    above; then the content of `after` is undefined."""
    return _quantised(CodeId.INT8, FEEDBACK, gradient, before, after, bucket)


def encode_delta(values: Array, shadow: Array, bucket: int) -> Uint8s | None:
    """The code of values - shadow. `shadow` becomes the values of a receiver that adds the code. None as above; then
    the content of `shadow` is undefined."""
    return _quantised(CodeId.DELTA, DELTA, values, shadow, shadow, bucket)


def decode(reader: Reader, out: Array, *, add: bool = False) -> None:
    bucket = reader.varint("bucket", BLOCK_ELEMENTS_MAX, minimum=1)
    scales = reader.float32s("scales", -(-out.size // bucket))
    q = reader.rest("elements", out.size).view(np.int8)
    _dequantise(q, scales, bucket, add, out)


def _quantised(code: CodeId, mode: int, values: Array, before: Array, after: Array, bucket: int) -> Uint8s | None:
    buckets = -(-values.size // bucket)
    made, body = blank(code, values.size, varint(bucket), 4 * buckets + values.size)
    scales = np.empty(buckets, np.float32)
    scratch = Scratch(values.dtype, bucket)
    q = body[4 * buckets :].view(np.int8)
    if not _quantise(
        mode, values, before, after, scratch.values, scratch.bits, scratch.magnitude, scratch.round, bucket, scales, q
    ):
        return None
    body[: 4 * buckets] = scales.view(np.uint8)
    return made


@compiled
def _quantise(
    mode: int,
    x: Array,
    before: Array,
    after: Array,
    t: Array,
    bits: Words,
    magnitude: np.unsignedinteger[Any],
    rounder: np.floating[Any],
    bucket: int,
    scales: Float32s,
    q: Int8s,
) -> bool:
    """Returns False if an element is not finite, or beyond float32."""
    top_bits = np.empty(1, bits.dtype)
    top_value = top_bits.view(t.dtype)
    for b in range(scales.size):
        low = b * bucket
        n = min(bucket, x.size - low)
        xs, qs = x[low : low + n], q[low : low + n]
        if mode == 1:
            es = before[low : low + n]
            for i in range(n):
                t[i] = xs[i] + es[i]
        elif mode == 2:
            es = before[low : low + n]
            for i in range(n):
                t[i] = xs[i] - es[i]
        else:
            for i in range(n):
                t[i] = xs[i]
        top = magnitude ^ magnitude
        for i in range(n):
            top = max(top, bits[i] & magnitude)
        top_bits[0] = top
        if not top_value[0] <= np.float32(3e38):
            return False
        scale = np.float32(top_value[0]) / np.float32(127)
        if scale < SCALE_MIN:
            scale = np.float32(0)
        scales[b] = scale
        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
        for i in range(n):
            qs[i] = np.int8(np.int32((t[i] * inverse + rounder) - rounder))
        if mode == 1:
            rest = after[low : low + n]
            for i in range(n):
                rest[i] = t[i] - np.float32(qs[i]) * scale
        elif mode == 2:
            had = after[low : low + n]
            for i in range(n):
                had[i] += np.float32(qs[i]) * scale
    return True


@compiled
def _dequantise(q: Int8s, scales: Float32s, bucket: int, add: bool, out: Array) -> None:
    for b in range(scales.size):
        low = b * bucket
        n = min(bucket, out.size - low)
        scale = scales[b]
        qs, ys = q[low : low + n], out[low : low + n]
        if add:
            for i in range(n):
                ys[i] += np.float32(qs[i]) * scale
        else:
            for i in range(n):
                ys[i] = np.float32(qs[i]) * scale
