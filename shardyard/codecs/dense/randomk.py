"""Elements that are chosen at random: code RANDOMK. It carries a seed and values, but no indices.

Wangni, Wang, Liu, Zhang: *Gradient Sparsification for Communication-Efficient Distributed Optimization*, NeurIPS 2018,
and Stich, Cordonnier, Jaggi: *Sparsified SGD with Memory*, NeurIPS 2018 (with feedback). [0, n) is cut into k parts
that differ by one element at most, and one element of each part is drawn. With feedback it is sent as it is; without,
times the size of its part, so that the mean of y is x. Departure: drawing by parts instead of from all elements, which
leaves the mean as it is, does not raise the variance, and needs no table of what was drawn.

Bound: each y is x or 0 (unbiased: size * x or 0); with feedback the mean of what is left out is (1 - k/n) |x|**2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardyard.codecs.format.compiled import CHUNK, Array, Float32s, Scratch, Uint8s, Words, empty_like_pair, stratum
from shardyard.codecs.format.form import CodeId, Reader, uint64, varint, whole
from shardyard.domain.compiling import compiled


def encode_feedback(gradient: Array, before: Array, after: Array, count: int, seed: int) -> Uint8s | None:
    """The code of `count` elements of gradient + before. Puts what it leaves out into `after`. All have shape (n,) and
    one dtype; 1 <= count <= n; `seed` has 64 bits. None if an element is not finite, or beyond float32; then the
    content of `after` is undefined."""
    scratch = Scratch(gradient.dtype, 1)
    bits = after.view(scratch.bits.dtype)
    scratch.bits[0] = _add(gradient, before, after, bits, scratch.magnitude)
    if not scratch.values[0] <= np.float32(3e38):
        return None
    sent = np.empty(count, np.float32)
    _take(after, np.uint64(seed), sent)
    return _code(gradient.size, seed, sent)


def encode_unbiased(values: Array, count: int, seed: int) -> Uint8s | None:
    """The code of `count` elements of `values`, scaled up. None if one of these is not finite in float32, or if any
    element is not finite."""
    none = empty_like_pair(values)
    scratch = Scratch(values.dtype, 1)
    scratch.bits[0] = _add(values, none, none, values.view(scratch.bits.dtype), scratch.magnitude)
    sent = np.empty(count, np.float32)
    _scaled(values, np.uint64(seed), sent)
    if not scratch.values[0] <= np.float32(3e38) or not np.isfinite(sent).all():
        return None
    return _code(values.size, seed, sent)


def decode(reader: Reader, out: Array) -> None:
    count = reader.varint("count", out.size)
    seed = reader.uint64("seed")
    sent = reader.float32s("values", count)
    reader.end()
    out[:] = 0
    _put(sent, np.uint64(seed), out)


def _code(elements: int, seed: int, sent: Float32s) -> Uint8s:
    return whole(CodeId.RANDOMK, elements, varint(sent.size) + uint64(seed), sent)


@compiled
def _add(
    g: Array, before: Array, after: Array, bits: Words, magnitude: np.unsignedinteger[Any]
) -> np.unsignedinteger[Any]:
    """Computes after = g + before, if there is an `after`. Returns the largest magnitude in `bits`."""
    top = magnitude ^ magnitude
    for start in range(0, g.size, CHUNK):
        gs, bs = g[start : start + CHUNK], bits[start : start + CHUNK]
        if after.size:
            es, rest = before[start : start + CHUNK], after[start : start + CHUNK]
            for i in range(gs.size):
                rest[i] = gs[i] + es[i]
        for i in range(gs.size):
            top = max(top, bs[i] & magnitude)
    return top


@compiled
def _take(rest: Array, seed: np.uint64, sent: Float32s) -> None:
    for j in range(sent.size):
        i, _ = stratum(seed, j, sent.size, rest.size)
        sent[j] = rest[i]
        rest[i] -= sent[j]


@compiled
def _scaled(values: Array, seed: np.uint64, sent: Float32s) -> None:
    for j in range(sent.size):
        i, size = stratum(seed, j, sent.size, values.size)
        sent[j] = values[i] * np.float32(size)


@compiled
def _put(sent: Float32s, seed: np.uint64, out: Array) -> None:
    for j in range(sent.size):
        i, _ = stratum(seed, j, sent.size, out.size)
        out[i] = sent[j]
