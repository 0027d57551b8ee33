"""One bit for each element, its sign, and one scale for each bucket: code ONEBIT.

Seide, Fu, Droppo, Li, Yu: *1-Bit Stochastic Gradient Descent*, Interspeech 2014, as it is shown to converge in
Karimireddy, Rebjock, Stich, Jaggi: *Error Feedback Fixes SignSGD*, ICML 2019: y = scale * sign(x), where scale is the
mean of |x| over the bucket, and what is left out is added to the next gradient. Departure: one scale a bucket instead
of one (Karimireddy) or two (Seide) a layer or column. A zero is sent with the sign of its bit.

Bound: over a bucket of d elements |x - y|**2 = |x|**2 - |x|_1**2 / d, at most (1 - 1/d) |x|**2 in 2-norms.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardyard.codecs.format.compiled import Array, Float32s, Scratch, Uint8s, Words
from shardyard.codecs.format.form import CodeId, Reader, blank, varint
from shardyard.domain.compiling import compiled
from shardyard.domain.errors import MalformedPayload
from shardyard.domain.limits import BLOCK_ELEMENTS_MAX


def encode_feedback(gradient: Array, before: Array, after: Array, bucket: int) -> Uint8s | None:
    """The code of gradient + before. Puts what it leaves out into `after`. All have shape (n,) and one dtype; `bucket`
    is a multiple of 8. None if the mean of a bucket is not finite, or beyond float32; then the content of `after` is
    undefined."""
    buckets = -(-gradient.size // bucket)
    made, body = blank(CodeId.ONEBIT, gradient.size, varint(bucket), 4 * buckets + -(-gradient.size // 8))
    scales = np.empty(buckets, np.float32)
    scratch = Scratch(gradient.dtype, bucket)
    if not _signs(
        gradient, before, after, scratch.values, scratch.bits, scratch.magnitude, bucket, scales, body[4 * buckets :]
    ):
        return None
    body[: 4 * buckets] = scales.view(np.uint8)
    return made


def decode(reader: Reader, out: Array) -> None:
    bucket = reader.varint("bucket", BLOCK_ELEMENTS_MAX, minimum=1)
    if bucket % 8:
        raise MalformedPayload(f"a ONEBIT code has a bucket of {bucket}; expected a multiple of 8")
    scales = reader.float32s("scales", -(-out.size // bucket))
    _spread(reader.rest("signs", -(-out.size // 8)), scales, bucket, out)


@compiled
def _signs(
    g: Array,
    before: Array,
    after: Array,
    t: Array,
    bits: Words,
    magnitude: np.unsignedinteger[Any],
    bucket: int,
    scales: Float32s,
    packed: Uint8s,
) -> bool:
    flags = np.zeros(bucket, np.uint8)
    eights = flags.view(np.uint64)
    sums = np.empty(bucket, t.dtype)
    for b in range(scales.size):
        low = b * bucket
        n = min(bucket, g.size - low)
        gs, es, rest = g[low : low + n], before[low : low + n], after[low : low + n]
        for i in range(n):
            t[i] = gs[i] + es[i]
        for i in range(n):
            sums[i] = abs(t[i])
        m = n
        while m > 1:  # adds the upper half to the lower one: a fixed order, without a long chain of additions
            half = (m + 1) // 2
            upper = sums[half:m]
            for i in range(upper.size):
                sums[i] += upper[i]
            m = half
        scale = np.float32(sums[0] / n)
        if not scale <= np.float32(3e38):
            return False
        scales[b] = scale
        for i in range(n):
            flags[i] = bits[i] <= magnitude
        flags[n:] = 0
        out = packed[low // 8 : low // 8 + (n + 7) // 8]
        for j in range(out.size):  # gathers the lowest bits of eight bytes, the first byte's into bit 0
            out[j] = np.uint8((eights[j] * np.uint64(0x0102040810204080)) >> np.uint64(56))
        for i in range(n):
            rest[i] = t[i] - (scale if bits[i] <= magnitude else -scale)
    return True


@compiled
def _spread(packed: Uint8s, scales: Float32s, bucket: int, out: Array) -> None:
    for b in range(scales.size):
        low = b * bucket
        n = min(bucket, out.size - low)
        scale = scales[b]
        ys = out[low : low + n]
        signs = packed[low // 8 : low // 8 + (n + 7) // 8]
        for i in range(n):
            ys[i] = scale if (signs[i >> 3] >> np.uint8(i & 7)) & np.uint8(1) else -scale
