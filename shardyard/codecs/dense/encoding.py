"""From elements to a code, for each codec, with or without a residual of what the code leaves out.

Owns: which file makes which codec, and the rule for elements that no codec can carry: a block with an element that is
not finite, or at least 3e38, is sent RAW, so that the receiver gets what the sender had. Must not know: what residuals
belong to, when they are saved (shardyard_worker.compression.error_feedback).
"""

from __future__ import annotations

import numpy as np

from shardyard.codecs.dense import floats, int8, onebit, powersgd, qsgd, randomk, topk
from shardyard.codecs.format import zstd
from shardyard.codecs.format.compiled import Array, Float32s, Uint8s
from shardyard.domain.compression import CodecSpec, sent_count


def encode(codec: CodecSpec, values: Array, key: int = 0) -> memoryview:
    """The code of `values`, shape (n,), contiguous, float32 or float64. What it leaves out is not kept.

    `key`: 64 bits, the seed of codecs that draw random numbers, and of PowerSGD's first factor. Returns a view of
    bytes.
    """
    if codec.has_feedback:
        return encode_feedback(codec, values, np.zeros_like(values), np.empty_like(values), key)
    return sealed(codec, _stateless(codec, values, key) if values.size else None, values)


def encode_feedback(codec: CodecSpec, gradient: Array, before: Array, after: Array, key: int = 0) -> memoryview:
    """The code of gradient + before. Puts what it leaves out into `after`: the decoded elements and `after` add up to
    gradient + before.

    All have shape (n,), are contiguous, and have one dtype; `after` overlaps neither of the others. The codec has error
    feedback. PowerSGD starts from a new factor each time (`encode_low_rank` continues with the last one).
    """
    assert codec.has_feedback, codec
    if codec.kind == "powersgd":
        grid = powersgd.grid_of((), 0, gradient.size, codec.rank)
        return encode_low_rank(gradient, before, after, grid, first_factor(codec.rank, grid.columns, key))[0]
    code: Uint8s | None = None
    if gradient.size:
        count = sent_count(gradient.size, codec.density)
        match codec.kind:
            case "int8":
                code = int8.encode_feedback(gradient, before, after, codec.bucket)
            case "onebit":
                code = onebit.encode_feedback(gradient, before, after, codec.bucket)
            case "topk":
                code = topk.encode_feedback(gradient, before, after, count, key, codec.values)
            case "randomk":
                code = randomk.encode_feedback(gradient, before, after, count, key)
            case _:
                raise AssertionError(codec)
    return sealed(codec, code, gradient, before, after)


def encode_low_rank(
    gradient: Array, before: Array, after: Array, grid: powersgd.Grid, factor: Float32s
) -> tuple[memoryview, Float32s]:
    """PowerSGD's code of gradient + before, and the factor to start from next time. Puts what the code leaves out into
    `after`.

    The code is RAW if the factors, of shape (rank, columns), are not smaller than the block.
    """
    made = None
    if grid.factor_elements(gradient.size, factor.shape[0]) * 4 < gradient.nbytes:
        made = powersgd.encode_feedback(gradient, before, after, grid, factor)
    if made is None:
        return raw_sum(gradient, before, after), factor
    return made[0].data, made[1]


def first_factor(rank: int, columns: int, key: int) -> Float32s:
    """PowerSGD's first right factor, shape (rank, columns): standard normal numbers from PCG64 seeded with `key`."""
    return np.random.Generator(np.random.PCG64(key)).standard_normal((rank, columns), np.float32)


def sealed(
    codec: CodecSpec, code: Uint8s | None, gradient: Array, before: Array | None = None, after: Array | None = None
) -> memoryview:
    """The finished code, in a zstd frame if the codec says so. If there is no code, a RAW code of everything."""
    if code is not None:
        return (zstd.pack(code, gradient.size) if codec.zstd else code).data
    if before is None or after is None:
        return floats.encode_raw(gradient).data
    return raw_sum(gradient, before, after)


def raw_sum(gradient: Array, before: Array, after: Array) -> memoryview:
    """A RAW code of gradient + before. Nothing is left out."""
    with np.errstate(all="ignore"):
        np.add(gradient, before, out=after)
    code = floats.encode_raw(after)
    after[:] = 0
    return code.data


def _stateless(codec: CodecSpec, values: Array, key: int) -> Uint8s | None:
    match codec.kind:
        case "bf16":
            return floats.encode_bf16(values)
        case "fp16":
            return floats.encode_fp16(values)
        case "qsgd":
            return qsgd.encode(values, codec.levels, codec.bucket, key)
        case "randomk":
            return randomk.encode_unbiased(values, sent_count(values.size, codec.density), key)
        case _:
            assert codec.kind == "none", codec
            return floats.encode_raw(values)
