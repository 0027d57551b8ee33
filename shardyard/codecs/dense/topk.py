"""The largest elements and where they are: code TOPK.

Lin, Han, Mao, Wang, Dally: *Deep Gradient Compression*, ICLR 2018. The sender keeps a momentum u and a velocity v:
u = momentum * u + g, v = v + u; the largest of v are sent, and there both become zero (momentum correction, momentum
factor masking). With momentum 0 that is error feedback. The threshold is estimated from a sample and set low, and of
what is above it the largest are taken exactly (the paper's hierarchical selection), so a code carries exactly as many
elements as were asked for, fewer only where the rest is zero; if the estimate was too high, all are looked at.

Indices travel as the gaps between them in a Rice code (Rice, *Some Practical Universal Noiseless Coding Techniques*,
JPL 1979), about 1.4 bytes each at a density of 0.1%. Values travel as float32, as halves with one exponent (see
`floats`), or in 8 bits with one scale (see `int8`); what that rounds off stays in v.

Bound: each y is x or 0 (fp32 values of float32 elements), and what is left out is, in 2-norms, at most
(1 - k/n) |x|**2.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardyard.codecs.dense import floats
from shardyard.codecs.format.compiled import Array, Float32s, Int64s, Scratch, Uint8s, Words, empty_like_pair, stratum
from shardyard.codecs.format.form import CodeId, Reader, float32, varint, whole
from shardyard.domain.compiling import compiled
from shardyard.domain.errors import MalformedPayload

SAMPLE_MIN: Final = 16_384
SAMPLE_HITS: Final = 16
"""Elements of the sample that are expected to be among the largest, at least."""
SAMPLE_DEVIATIONS: Final = 5
"""How many standard deviations the threshold is set lower, so that enough elements are above it."""
RICE_MAX: Final = 31
VALUE_KINDS: Final = ("fp32", "fp16", "int8")
"""The kinds of values, by their number in the code."""

Int32s = npt.NDArray[np.int32]


def encode_feedback(
    gradient: Array, before: Array, after: Array, count: int, key: int, values: str = "fp32", factor: float = 1.0
) -> Uint8s | None:
    """The code of the `count` largest elements of before + factor * gradient. Puts what it leaves out into `after`.

    Arrays have shape (n,) and one dtype; 1 <= count <= n. `key` (64 bits) chooses the sample. None if an element is not
    finite, or beyond float32; then the content of `after` is undefined.
    """
    none = empty_like_pair(gradient)
    return encode_momentum(gradient, (none, before), (none, after), count, key, values, factor, 0.0)


def encode_momentum(
    gradient: Array,
    before: tuple[Array, Array],
    after: tuple[Array, Array],
    count: int,
    key: int,
    values: str,
    factor: float,
    momentum: float,
) -> Uint8s | None:
    """The same with momentum correction. `before` and `after` are (momentum, velocity). An empty momentum means
    none."""
    (u_in, v_in), (u_out, v_out) = before, after
    dtype = gradient.dtype.type
    scalars = (dtype(factor), dtype(momentum))
    scratch = Scratch(gradient.dtype, 1)
    threshold = _threshold(gradient, u_in, v_in, scalars, count, key, scratch)
    found = np.empty(min(gradient.size, 4 * count + 1_024), np.int32)
    bits = v_out.view(scratch.bits.dtype)
    above = _accumulate(gradient, u_in, v_in, u_out, v_out, bits, *scalars, scratch.magnitude, threshold, found)
    at = found[:above] if count <= above <= found.size else None
    at = _largest(bits, at, count, scratch)
    if at is None:
        return None
    sent = v_out[at]
    code, received = _code(gradient.size, at, sent, values)
    v_out[at] = sent - received
    if u_out.size:
        u_out[at] = 0
    return code


def decode(reader: Reader, out: Array) -> None:
    count = reader.varint("count", out.size)
    rice = reader.byte("Rice parameter", RICE_MAX)
    values = VALUE_KINDS[reader.byte("kind of values", len(VALUE_KINDS) - 1)]
    scale = 1.0
    if values == "fp16":
        scale = float(reader.byte("exponent"))
    elif values == "int8":
        scale = reader.float32("scale")
    index_bytes = reader.varint("length of indices", reader.left)
    if count > 8 * index_bytes:
        raise MalformedPayload(f"a TOPK code of {count} elements has {index_bytes} bytes of indices")
    packed = reader.take("indices", index_bytes)
    at = np.empty(count, np.int64)
    if not _unrice(packed, rice, out.size, at):
        raise MalformedPayload(
            f"the {index_bytes} bytes of indices of a TOPK code are not {count} indices below {out.size}"
        )
    width = {"fp32": 4, "fp16": 2, "int8": 1}[values]
    body = reader.rest("values", width * count)
    out[:] = 0
    out[at] = _values(body, values, scale)


def _threshold(
    gradient: Array,
    u_in: Array,
    v_in: Array,
    scalars: tuple[Any, Any],
    count: int,
    key: int,
    scratch: Scratch,
) -> np.unsignedinteger[Any]:
    """The bits of a magnitude that a few more than `count` elements very likely reach. At least 1, so that zeros never
    reach it."""
    n = gradient.size
    samples = min(n, max(SAMPLE_MIN, math.ceil(SAMPLE_HITS * n / count)))
    drawn = np.empty(samples, gradient.dtype)
    _sample(gradient, u_in, v_in, *scalars, np.uint64(key), drawn)
    bits = drawn.view(scratch.bits.dtype) & scratch.magnitude
    expected = count * samples / n
    rank = min(samples, math.ceil(expected + (0 if samples == n else SAMPLE_DEVIATIONS * math.sqrt(expected))))
    reached = np.partition(bits, samples - rank)[samples - rank]
    one = bits.dtype.type(1)
    threshold: np.unsignedinteger[Any] = max(reached, one)
    return threshold


def _largest(bits: Words, among: Int32s | None, count: int, scratch: Scratch) -> Int32s | None:
    """The indices of the `count` largest magnitudes, ascending, without those of zeros. None if one is not finite, or
    beyond float32."""
    candidates = (bits if among is None else bits[among]) & scratch.magnitude
    scratch.bits[0] = candidates.max()
    if not scratch.values[0] <= np.float32(3e38):
        return None
    kept = candidates.size - count
    least = np.partition(candidates, kept)[kept] if kept > 0 else candidates.dtype.type(0)
    chosen = np.empty(min(count, candidates.size), np.int32)
    chosen = chosen[: _choose(candidates, least, chosen)]
    return chosen if among is None else among[chosen]


def _code(elements: int, at: Int32s, sent: Array, values: str) -> tuple[Uint8s, Array]:
    """The code, and the values as the receiver decodes them."""
    rice = _rice_parameter(elements, at.size)
    room = at.size * (rice + 1) + (elements >> rice)
    packed = np.zeros((room + 7) // 8 + 8, np.uint8)
    packed = packed[: _rice(at, rice, packed)]
    header = varint(at.size) + bytes((rice, VALUE_KINDS.index(values)))
    scale = 1.0
    if values == "fp16":
        halves, exponent = floats.to_halves(sent.astype(np.float32))
        header, body, scale = header + bytes((exponent,)), halves.view(np.uint8), float(exponent)
    elif values == "int8":
        single = np.float32(np.abs(sent).max(initial=0)) / np.float32(127)
        q = np.rint(sent / single) if single > 0 else np.zeros_like(sent)
        header, body, scale = header + float32(float(single)), q.astype(np.int8).view(np.uint8), float(single)
    else:
        body = sent.astype(np.float32).view(np.uint8)
    code = whole(CodeId.TOPK, elements, header + varint(packed.size), packed, body)
    return code, _values(body, values, scale).astype(sent.dtype)


def _values(body: Uint8s, values: str, scale: float) -> Float32s:
    if values == "fp16":
        received = np.empty(body.size // 2, np.float32)
        floats.from_halves(body.copy().view(np.uint16), int(scale), received)
        return received
    if values == "int8":
        with np.errstate(all="ignore"):
            return body.view(np.int8).astype(np.float32) * np.float32(scale)
    return body.copy().view(np.float32)


def _rice_parameter(elements: int, count: int) -> int:
    """The best parameter for geometrically distributed gaps with the mean elements / count."""
    return min(RICE_MAX, max(0, int(math.log2(elements / count * math.log(2)) + 0.5))) if count else 0


@compiled
def _sample(
    g: Array,
    u_in: Array,
    v_in: Array,
    factor: np.floating[Any],
    momentum: np.floating[Any],
    key: np.uint64,
    out: Array,
) -> None:
    for j in range(out.size):
        i, _ = stratum(key, j, out.size, g.size)
        u = factor * g[i]
        if u_in.size:
            u += momentum * u_in[i]
        out[j] = v_in[i] + u


@compiled
def _accumulate(
    g: Array,
    u_in: Array,
    v_in: Array,
    u_out: Array,
    v_out: Array,
    bits: Words,
    factor: np.floating[Any],
    momentum: np.floating[Any],
    magnitude: np.unsignedinteger[Any],
    threshold: np.unsignedinteger[Any],
    found: Int32s,
) -> int:
    """In one pass, computes momentum and velocity, and finds the indices of the elements that reach the threshold (NaN
    and infinity do). Stores as many as fit into `found`, and returns how many there are."""
    count = 0
    chunk = 256
    for start in range(0, g.size, chunk):
        stop = min(g.size, start + chunk)
        gs, vi, vo, bs = g[start:stop], v_in[start:stop], v_out[start:stop], bits[start:stop]
        if u_in.size:
            ui, uo = u_in[start:stop], u_out[start:stop]
            for i in range(gs.size):
                uo[i] = momentum * ui[i] + factor * gs[i]
            for i in range(gs.size):
                vo[i] = vi[i] + uo[i]
        else:
            for i in range(gs.size):
                vo[i] = vi[i] + factor * gs[i]
        hits = np.int32(0)
        for i in range(gs.size):
            hits += np.int32((bs[i] & magnitude) >= threshold)
        if hits:
            for i in range(gs.size):
                if (bs[i] & magnitude) >= threshold:
                    if count < found.size:
                        found[count] = start + i
                    count += 1
    return count


@compiled
def _choose(candidates: Words, least: np.unsignedinteger[Any], chosen: Int32s) -> int:
    """Finds the positions of all elements above `least`, and of the first ones equal to it while there is room. Zeros
    are left out."""
    above = 0
    for i in range(candidates.size):
        above += candidates[i] > least
    equal = chosen.size - above if least else 0
    count = 0
    for i in range(candidates.size):
        if candidates[i] > least or (equal > 0 and candidates[i] == least):
            if candidates[i] == least:
                equal -= 1
            chosen[count] = i
            count += 1
    return count


@compiled
def _rice(at: Int32s, rice: int, out: Uint8s) -> int:
    """Writes each gap as (gap >> rice) ones, a zero, and its lowest `rice` bits, lowest bit first. Returns the bytes
    used. `out` is zeros, with room."""
    place = 0
    after = 0
    for i in range(at.size):
        gap = at[i] - after
        after = at[i] + 1
        for _ in range(gap >> rice):
            out[place >> 3] |= np.uint8(1 << (place & 7))
            place += 1
        place += 1
        for k in range(rice):
            out[place >> 3] |= np.uint8(((gap >> k) & 1) << (place & 7))
            place += 1
    return (place + 7) >> 3


@compiled
def _unrice(packed: Uint8s, rice: int, elements: int, at: Int64s) -> bool:
    """Fills `at` with ascending indices below `elements`. Returns False if the bytes are anything else."""
    places = 8 * packed.size
    place = 0
    index = -1
    for i in range(at.size):
        gap = 0
        while place < places and (packed[place >> 3] >> np.uint8(place & 7)) & np.uint8(1):
            gap += 1 << rice
            place += 1
            if gap > elements:
                return False
        place += 1
        if place + rice > places:
            return False
        for k in range(rice):
            gap |= int((packed[place >> 3] >> np.uint8(place & 7)) & np.uint8(1)) << k
            place += 1
        index += gap + 1
        if index >= elements:
            return False
        at[i] = index
    return (place + 7) >> 3 == packed.size
