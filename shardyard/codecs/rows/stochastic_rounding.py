"""Rounds gradients of rows at random, so that the mean of the result is the gradient.

bf16: up with the probability of what is cut off (stochastic rounding; Gupta et al., Deep Learning with Limited
Numerical Precision, ICML 2015). int8: of a row with the largest magnitude m, to a neighbouring multiple of m / 127, as
code QSGD does (Alistarh et al., NeurIPS 2017). Random numbers depend on a key, the row's id and the element's number.
So a row is rounded to the same bits when it is computed again, or sent together with other rows.

Bounds: bf16 |x - y| < 2**-7 |x| + 2**-133; int8 |x - y| <= 1.0001 m / 127; the mean of y is x, but
for 2**-22 m of float32's own rounding. Must not know: what the key means.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from shardyard.codecs.dense.floats import Uint16s
from shardyard.codecs.dense.int8 import SCALE_MIN, Int8s
from shardyard.codecs.format.compiled import Float32s, Int64s, Uint8s
from shardyard.codecs.format.form import CodeId, blank, varint
from shardyard.domain.compiling import compiled
from shardyard.domain.tables.splitmix_loops import drawn, mixed

Uint32s = npt.NDArray[np.uint32]

_BF16_MAX: Final = np.uint32(0x7F7F0000)
"""The bits of the largest magnitude of bfloat16."""
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_S16, _S32, _S40 = np.uint64(16), np.uint64(32), np.uint64(40)
_LOW: Final = np.uint64(0xFFFF)


def encode_bf16(rows: Float32s, ids: Int64s, key: int) -> Uint8s | None:
    """The code of `rows`, shape (n, dim), contiguous. `key`: 64 bits. None if an element is not finite, or beyond
    bfloat16."""
    halves = np.empty(rows.shape, np.uint16)
    if not _round_bf16(rows.view(np.uint32), ids, np.uint64(key), halves):
        return None
    made, body = blank(CodeId.BF16, rows.size, b"", halves.nbytes)
    body[:] = halves.reshape(-1).view(np.uint8)
    return made


def encode_int8(rows: Float32s, ids: Int64s, key: int) -> Uint8s | None:
    """The same in int8. None if an element is not finite, or at least 3e38."""
    n, dim = rows.shape
    made, body = blank(CodeId.INT8, rows.size, varint(dim), 4 * n + rows.size)
    scales = np.empty(n, np.float32)
    if not _round_int8(rows, ids, np.uint64(key), scales, body[4 * n :].view(np.int8).reshape(n, dim)):
        return None
    body[: 4 * n] = scales.view(np.uint8)
    return made


@compiled
def _round_bf16(bits: Uint32s, ids: Int64s, key: np.uint64, out: Uint16s) -> bool:
    for i in range(ids.size):
        start = mixed(np.uint64(ids[i]) ^ key)
        word = start
        for d in range(bits.shape[1]):
            b = bits[i, d]
            if (b & _MAGNITUDE) > _BF16_MAX:
                return False
            # each word has four draws
            word = drawn(start, d // 4) if d % 4 == 0 else word >> _S16
            out[i, d] = np.uint16((np.uint64(b) + (word & _LOW)) >> _S16)
    return True


@compiled
def _round_int8(rows: Float32s, ids: Int64s, key: np.uint64, scales: Float32s, out: Int8s) -> bool:
    for i in range(ids.size):
        row, q = rows[i], out[i]
        top = np.float32(0)
        for d in range(row.size):
            magnitude = abs(row[d])
            # NaN is not below any number
            if not magnitude <= np.float32(3e38):
                return False
            top = max(top, magnitude)
        # a little larger, so that no rounding puts an element beyond the last level
        scale = top / np.float32(127) * np.float32(1 + 2.0**-21)
        if scale < SCALE_MIN:
            scale = np.float32(0)
        scales[i] = scale
        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
        start = mixed(np.uint64(ids[i]) ^ key)
        word = start
        for d in range(row.size):
            # each word has two draws of 24 bits
            word = drawn(start, d // 2) if d % 2 == 0 else word << _S32
            u = np.float32(word >> _S40) * np.float32(2.0**-24)
            level = row[d] * inverse
            below = np.floor(level)
            q[d] = np.int8(below + np.float32(1) if u < level - below else below)
    return True
