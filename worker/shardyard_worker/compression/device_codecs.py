"""Encoders in torch operations: tensors on a GPU are encoded there, and only the code is copied to the host.

Owns: one encoder for each codec, in torch operations on the tensor's own device. Codes have the format of
shardyard.codecs. For the same elements BF16, FP16, INT8, QSGD, ONEBIT, TOPK and RANDOMK give the same bits as that
package's encoders, on a CPU and on a GPU. So no operation here fuses a product and a sum, divides by a host number
(CUDA multiplies by its inverse), or sums floats in an order of its own. POWERSGD sums in torch's order: its error bound
is the same, its last bits differ.

An encoder is a generator. It launches work, yields the tensors that it needs on the host, receives their elements, and
returns the code. `run` runs many of them together, so a push of any number of blocks waits for the device at most three
times. Must not know: the state between pushes (block_state), streams (device_copies).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from shardyard.codecs.dense.int8 import SCALE_MIN
from shardyard.codecs.dense.powersgd import Grid
from shardyard.codecs.dense.topk import RICE_MAX, SAMPLE_DEVIATIONS, SAMPLE_HITS, SAMPLE_MIN, VALUE_KINDS
from shardyard.codecs.format import zstd
from shardyard.codecs.format.compiled import Uint8s
from shardyard.codecs.format.form import CodeId, uint64, varint, whole
from shardyard.domain.compression import CodecSpec, sent_count

Tensor = torch.Tensor
Array = npt.NDArray[Any]
R = TypeVar("R")
Encoding = Generator[Sequence[Tensor], Sequence[Array], R]
"""Yields tensors on a device, and receives their elements as arrays of shape (elements,), in the same order."""
Fetch = Callable[[Sequence[Tensor]], list[Array]]
"""Waits until tensors are computed. Returns arrays of shape (elements,) and the same dtypes (bool: uint8)."""
Made = tuple[memoryview, Tensor]
"""A code, and its residual."""

_LIMIT: Final = float(np.float32(3e38))
"""A block is sent RAW if a magnitude is larger than this, or an element is not finite."""
_MAGNITUDE_MAX: Final = float(np.uint32(0x7F7F7FFF).view(np.float32))
"""The largest float32 that bfloat16 does not round to infinity."""
_SCALE_MIN: Final = float(SCALE_MIN)
_EXPONENT_MIN: Final = -110
_EXPONENT_BIAS: Final = 128
_TOP_OF_HALF: Final = 15
_DEPENDENT: Final = 1e-5
_LOW: Final = 0xFFFFFFFF


def run(encodings: Sequence[Encoding[R]], fetch: Fetch) -> list[R]:
    """Returns the results of the encodings, in order. Tensors that several yield in one round are fetched together."""
    results: dict[int, R] = {}
    wanted: dict[int, Sequence[Tensor]] = {}

    def resume(number: int, given: Sequence[Array] | None) -> None:
        try:
            wanted[number] = next(encodings[number]) if given is None else encodings[number].send(given)
        except StopIteration as stop:
            results[number] = stop.value

    for number in range(len(encodings)):
        resume(number, None)
    while wanted:
        now, wanted = wanted, {}
        found = iter(fetch([tensor for tensors in now.values() for tensor in tensors]))
        for number, tensors in now.items():
            resume(number, [next(found) for _ in tensors])
    return [results[number] for number in range(len(encodings))]


# ---- one code for each codec


def encode(codec: CodecSpec, values: Tensor, key: int = 0) -> Encoding[memoryview]:
    """The code of `values`, shape (n,), float32 or float64 (any dtype for "none"), of a codec without feedback. `key`
    (64 bits) is the seed of codecs that draw."""
    assert not codec.has_feedback, codec
    code: Uint8s | None = None
    if values.numel():
        match codec.kind:
            case "bf16":
                code = yield from _bf16(values)
            case "fp16":
                code = yield from _fp16(values)
            case "qsgd":
                code = yield from _qsgd(values, codec.levels, codec.bucket, key)
            case "randomk":
                code = yield from _random_unbiased(values, sent_count(values.numel(), codec.density), key)
            case _:
                assert codec.kind == "none", codec
    if code is None:
        return (yield from raw(values))
    return _sealed(codec, code, values.numel())


def encode_feedback(codec: CodecSpec, gradient: Tensor, before: Tensor, key: int = 0) -> Encoding[Made]:
    """The code of gradient + before, and the residual. The decoded code plus the residual is gradient + before.

    All have shape (n,), contiguous, one dtype, float32 or float64. For the codecs "int8" and "onebit", and "randomk"
    with feedback.
    """
    total = gradient + before
    made: tuple[Uint8s, Tensor] | None = None
    if total.numel():
        match codec.kind:
            case "int8":
                made = yield from _int8(total, codec.bucket)
            case "onebit":
                made = yield from _onebit(total, codec.bucket)
            case _:
                assert codec.kind == "randomk", codec
                made = yield from _random(total, sent_count(total.numel(), codec.density), key)
    if made is None:
        return (yield from raw(total)), torch.zeros_like(total)
    return _sealed(codec, made[0], total.numel()), made[1]


def raw(values: Tensor) -> Encoding[memoryview]:
    """The elements as they are, of any dtype, shape (n,)."""
    (elements,) = yield (values,)
    return whole(CodeId.RAW, values.numel(), b"", elements).data


def _sealed(codec: CodecSpec, code: Uint8s, elements: int) -> memoryview:
    return (zstd.pack(code, elements) if codec.zstd else code).data


def _bf16(values: Tensor) -> Encoding[Uint8s | None]:
    bits = values.float().view(torch.int32)
    halves = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    fine, body = yield _largest(values) <= _MAGNITUDE_MAX, _low_bytes(halves, 2)
    return whole(CodeId.BF16, values.numel(), b"", body) if fine[0] else None


def _fp16(values: Tensor) -> Encoding[Uint8s | None]:
    largest = _largest(values)
    halves, exponent = _halves(values.float(), largest)
    fine, power, body = yield largest <= _MAGNITUDE_MAX, exponent, halves
    return whole(CodeId.FP16, values.numel(), bytes((int(power[0]),)), body) if fine[0] else None


def _int8(total: Tensor, bucket: int) -> Encoding[tuple[Uint8s, Tensor] | None]:
    n = total.numel()
    rows = _rows(total, bucket)
    top = _largest_of_rows(rows)
    scales = _divided(top.float(), 127)
    scales = torch.where(scales < _SCALE_MIN, 0, scales)
    q = (rows * _inverse(scales).to(total.dtype)[:, None]).round().to(torch.int8)
    after = (rows - (q.float() * scales[:, None]).to(total.dtype)).view(-1)[:n]
    fine, body, steps = yield (top <= _LIMIT).all(), q.view(-1)[:n], scales
    return (whole(CodeId.INT8, n, varint(bucket), steps, body), after) if fine[0] else None


def _onebit(total: Tensor, bucket: int) -> Encoding[tuple[Uint8s, Tensor] | None]:
    n = total.numel()
    full = n - n % bucket
    means = [_means(part) for part in (total[:full].view(-1, bucket), total[full:].view(1, -1)) if part.numel()]
    scales = torch.cat(means)
    positive = ~torch.signbit(total)
    spread = scales[:, None].expand(-1, bucket).reshape(-1)[:n].to(total.dtype)
    after = total - torch.where(positive, spread, -spread)
    fine, steps, body = yield (scales <= _LIMIT).all(), scales, _bytes_of_bits(positive)
    return (whole(CodeId.ONEBIT, n, varint(bucket), steps, body), after) if fine[0] else None


def _means(rows: Tensor) -> Tensor:
    """The mean magnitude of each row in float32, shape (rows,). A sum adds one half of the row to the other, again and
    again."""
    sums, m = rows.abs(), rows.shape[1]
    while m > 1:
        half = (m + 1) // 2
        sums[:, : m - half] += sums[:, half:m]
        m = half
    return _divided(sums[:, 0].double(), rows.shape[1]).float()


def _qsgd(values: Tensor, levels: int, bucket: int, key: int) -> Encoding[Uint8s | None]:
    n = values.numel()
    rows = _rows(values, bucket)
    top = _largest_of_rows(rows)
    scales = _divided(top.float(), levels) * (1 + 2.0**-21)
    scales = torch.where(scales < _SCALE_MIN, 0, scales)
    scaled = (rows * _inverse(scales).to(values.dtype)[:, None]).view(-1)[:n]
    noise = _noise(torch.arange(n, device=values.device), key & _LOW, key >> 32 & _LOW)
    dither = (noise >> 8).float() * 2.0**-24
    numbers = (scaled + dither + float(levels)).to(torch.int32).to(torch.uint8)
    width = (2 * levels).bit_length()
    bits = (numbers[:, None] >> torch.arange(width, dtype=torch.uint8, device=values.device)) & 1
    fine, steps, body = yield (top <= _LIMIT).all(), scales, _bytes_of_bits(bits.view(-1))
    return whole(CodeId.QSGD, n, varint(bucket) + bytes((levels,)), steps, body) if fine[0] else None


def _noise(numbers: Tensor, low: int, high: int) -> Tensor:
    """shardyard.codecs.dense.qsgd's hash of 32 bits, in int64."""
    x = (numbers * 0x9E3779B1 + low) & _LOW
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW
    x = x ^ (x >> 15) ^ high
    x = (x * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def _random(total: Tensor, count: int, seed: int) -> Encoding[tuple[Uint8s, Tensor] | None]:
    at, _ = _strata(seed, count, total.numel(), total.device)
    sent = total[at].float()
    after = total.index_copy(0, at, total[at] - sent.to(total.dtype))
    fine, body = yield _largest(total) <= _LIMIT, sent
    return (_random_code(total.numel(), seed, body), after) if fine[0] else None


def _random_unbiased(values: Tensor, count: int, seed: int) -> Encoding[Uint8s | None]:
    at, sizes = _strata(seed, count, values.numel(), values.device)
    sent = (values[at] * sizes.float().to(values.dtype)).float()
    fine, body = yield (_largest(values) <= _LIMIT) & torch.isfinite(sent).all(), sent
    return _random_code(values.numel(), seed, body) if fine[0] else None


def _random_code(elements: int, seed: int, sent: Array) -> Uint8s:
    return whole(CodeId.RANDOMK, elements, varint(sent.size) + uint64(seed), sent)


def _strata(seed: int, count: int, elements: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """As shardyard.codecs.format.compiled.stratum, for all parts together: an index drawn from each, and their
    sizes."""
    numbers = torch.arange(count, device=device)
    lows = torch.div(numbers * elements, count, rounding_mode="floor")
    sizes = torch.div((numbers + 1) * elements, count, rounding_mode="floor") - lows
    z = _signed(seed) + (numbers + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    draws = _shifted(z ^ _shifted(z, 31), 32)
    return lows + _shifted(draws * sizes, 32), sizes


def _signed(word: int) -> int:
    """The int64 that has the same 64 bits."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(words: Tensor, by: int) -> Tensor:
    """Shifts to the right, and fills with zeros."""
    return (words >> by) & ((1 << (64 - by)) - 1)


# ---- top-k


def encode_largest(
    gradient: Tensor,
    before: tuple[Tensor | None, Tensor],
    count: int,
    key: int,
    values: str,
    factor: float = 1.0,
    momentum: float = 0.0,
) -> Encoding[tuple[memoryview, tuple[Tensor | None, Tensor]]]:
    """Deep Gradient Compression: u = momentum u + factor gradient, v = v + u. Returns the code of the `count` largest
    elements of v, and u and v afterwards. `before` is (u, v); without a u there is error feedback alone.

    Shape (n,), contiguous, one dtype, float32 or float64; 1 <= count <= n, except for n = 0. `key` (64 bits) chooses
    the sample that gives the threshold. If an element is not finite, the momentum starts again.
    """
    u, v = before
    scaled = gradient * factor
    if u is not None:
        u = u * momentum + scaled
        v = v + u
    else:
        v = v + scaled
    n = v.numel()
    at: Tensor | None = None
    if n:
        threshold = _threshold(v, count, key)
        fine, above, nonzero = yield _largest(v) <= _LIMIT, _reaches(v, threshold).sum(), (v != 0).sum()
        if fine[0]:
            at = _where_largest(v, threshold, count, above=int(above[0]), nonzero=int(nonzero[0]))
    if at is None:
        code = yield from raw(v)
        return code, (None if u is None else torch.zeros_like(u), torch.zeros_like(v))
    sent = v[at]
    body, header, received = _sent(sent, values)
    v.index_copy_(0, at, sent - received)
    if u is not None:
        u.index_fill_(0, at, 0)
    rice = _rice_parameter(n, at.numel())
    indices, indices_bytes = _rice(at, rice, n)
    tail, length, gaps, elements = yield header, indices_bytes, indices, body
    head = varint(at.numel()) + bytes((rice, VALUE_KINDS.index(values))) + tail.tobytes()
    used = gaps[: int(length[0])]
    return whole(CodeId.TOPK, n, head + varint(used.size), used, elements).data, (u, v)


def _threshold(v: Tensor, count: int, key: int) -> Tensor:
    """A magnitude, shape (), that very likely at least `count` elements reach, and not many more."""
    n = v.numel()
    samples = min(n, max(SAMPLE_MIN, math.ceil(SAMPLE_HITS * n / count)))
    drawn = v.abs() if samples == n else v[_strata(key, samples, n, v.device)[0]].abs()
    expected = count * samples / n
    rank = min(samples, math.ceil(expected + (0 if samples == n else SAMPLE_DEVIATIONS * math.sqrt(expected))))
    return drawn.sort().values[samples - rank]


def _reaches(v: Tensor, threshold: Tensor) -> Tensor:
    """Which magnitudes reach the threshold; zeros never do."""
    return (v.abs() >= threshold) & (v != 0)


def _where_largest(v: Tensor, threshold: Tensor, count: int, *, above: int, nonzero: int) -> Tensor:
    """Indices, ascending, of the `count` largest magnitudes. Of equal ones the first are chosen. Zeros are left out."""
    sizes = v.abs()
    if nonzero <= count:
        return _true_at(sizes > 0, nonzero)
    among = _true_at(_reaches(v, threshold), above) if above >= count else None
    candidates = sizes if among is None else sizes[among]
    least = candidates.sort().values[candidates.numel() - count]
    more, equal = candidates > least, candidates == least
    chosen = more | (equal & (equal.cumsum(0) <= count - more.sum()))
    at = _true_at(chosen, count)
    return at if among is None else among[at]


def _true_at(mask: Tensor, count: int) -> Tensor:
    """Indices, ascending, int64, at which a mask is true. The caller knows that there are `count`: to count them would
    wait for the device."""
    return torch.searchsorted(mask.cumsum(0), torch.arange(1, count + 1, device=mask.device))


def _sent(sent: Tensor, values: str) -> tuple[Tensor, Tensor, Tensor]:
    """The values in the code, the header before them, and the values as the receiver decodes them."""
    nothing = torch.empty(0, dtype=torch.uint8, device=sent.device)
    if values == "fp16":
        single = sent.float()
        halves, exponent = _halves(single, _largest(single))
        return halves, exponent, (halves.float() * _power_of_two(exponent.int() - _EXPONENT_BIAS)).to(sent.dtype)
    if values == "int8":
        top = _largest(sent).float()
        scale = _divided(top, 127)
        q = (sent / torch.where(scale > 0, scale, 1).to(sent.dtype)).round().to(torch.int8)
        return q, scale, (q.float() * scale).to(sent.dtype)
    single = sent.float()
    return single, nothing, single.to(sent.dtype)


def _rice_parameter(elements: int, count: int) -> int:
    return min(RICE_MAX, max(0, int(math.log2(elements / count * math.log(2)) + 0.5))) if count else 0


def _rice(at: Tensor, rice: int, elements: int) -> tuple[Tensor, Tensor]:
    """The Rice code of the gaps between ascending indices, uint8, with unused bytes at its end; and how many bytes are
    used."""
    if not at.numel():
        return torch.empty(0, dtype=torch.uint8, device=at.device), at.new_zeros(1)
    gaps = torch.diff(at, prepend=at.new_full((1,), -1)) - 1
    ones = gaps >> rice
    ends = (ones + (1 + rice)).cumsum(0)
    room = at.numel() * (rice + 1) + (elements >> rice)
    places = torch.arange(room, device=at.device)
    number = torch.searchsorted(ends, places, right=True).clamp_max(at.numel() - 1)  # the gap that a bit codes
    beyond = places - (ends[number] - (1 + rice))  # 0 at the zero that ends the ones
    remainder = (gaps[number] >> (beyond - 1).clamp(0, max(0, rice - 1))) & 1
    bits = torch.where(beyond < 0, 1, torch.where(beyond == 0, 0, remainder)) * (places < ends[-1])
    return _bytes_of_bits(bits), (ends[-1:] + 7) >> 3


# ---- PowerSGD


def encode_low_rank(
    gradient: Tensor, before: Tensor, grid: Grid, factor: Tensor
) -> Encoding[tuple[memoryview, Tensor, Tensor, Array | None]]:
    """PowerSGD's code of gradient + before, the residual, and the next push's factor, on the device and as an array.
    The array is None if the factor has not changed.

    Gradient and residual have shape (n,), contiguous, one dtype, float32 or float64; `factor` has shape (rank,
    columns), float32, without rows of zeros. The code is RAW if the factors are not smaller than the block.
    """
    total = gradient + before
    n, rank, columns = total.numel(), factor.shape[0], grid.columns
    if grid.factor_elements(n, rank) * 4 < n * total.element_size():
        rows = grid.rows(n)
        padded = total.new_zeros(rows * columns)
        padded[grid.lead : grid.lead + n] = total
        matrix = padded.view(rows, columns)
        p = (matrix @ factor.to(total.dtype).T).float()
        fine = torch.isfinite(p).all()
        p = _orthogonalised(p)
        q = (p.to(total.dtype).T @ matrix).float()
        for k in range(rank):  # in the receiver's order; torch may choose a lower precision for matrix products
            matrix -= (p[:, k : k + 1] * q[k]).to(total.dtype)
        after = padded[grid.lead : grid.lead + n].clone()
        ok, left, right = yield fine & torch.isfinite(q).all(), p, q
        if ok[0]:
            header = varint(columns) + varint(grid.lead) + bytes((rank,))
            code = whole(CodeId.POWERSGD, n, header, left, right)
            return code.data, after, q, right.reshape(rank, columns).copy()
    return (yield from raw(total)), torch.zeros_like(total), factor, None


def _orthogonalised(p: Tensor) -> Tensor:
    """Gram-Schmidt in float64, twice for each column. A column that depends on earlier ones becomes zeros."""
    columns = p.double()
    for k in range(p.shape[1]):
        column = columns[:, k]
        length = (column * column).sum()
        for _ in range(2 if k else 0):
            column = column - columns[:, :k] @ (columns[:, :k].T @ column)
        left = (column * column).sum()
        keeps = (left > length * _DEPENDENT**2) & (left > 1e-70)
        columns[:, k] = column * torch.where(keeps, 1 / left.sqrt(), 0)
    return columns.float()


# ---- pieces


def _divided(values: Tensor, by: int) -> Tensor:
    """Divides by a tensor. CUDA would multiply by the inverse of a host number, which gives other last bits."""
    return values / torch.full_like(values, by)


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, torch.ones_like(scales) / scales, 0)


def _largest(values: Tensor) -> Tensor:
    """The largest magnitude, shape (1,), in the dtype of `values`. NaN if an element is NaN; 0 without elements."""
    return values.abs().amax().view(1) if values.numel() else values.new_zeros(1)


def _largest_of_rows(rows: Tensor) -> Tensor:
    return torch.maximum(rows.amax(1), -rows.amin(1))


def _rows(values: Tensor, bucket: int) -> Tensor:
    """Shape (buckets, bucket), filled up with zeros."""
    short = -values.numel() % bucket
    return (torch.cat((values, values.new_zeros(short))) if short else values).view(-1, bucket)


def _halves(values: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Finite float32 as float16 times 2**(exponent - 128), and the exponent, uint8, shape (1,)."""
    exponent = (torch.frexp(largest).exponent - _TOP_OF_HALF).clamp_min(_EXPONENT_MIN)
    return (values * _power_of_two(-exponent)).to(torch.float16), (exponent + _EXPONENT_BIAS).to(torch.uint8)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent in float32, exact, for int32 exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


def _low_bytes(words: Tensor, count: int) -> Tensor:
    """The lowest bytes of each int32, little-endian, uint8 of shape (n * count,)."""
    return words.view(torch.uint8).view(-1, 4)[:, :count].reshape(-1)


def _bytes_of_bits(bits: Tensor) -> Tensor:
    """Packs eight bits into a byte, lowest first. The last byte is filled up with zeros."""
    short = -bits.numel() % 8
    eights = torch.cat((bits.to(torch.uint8), torch.zeros(short, dtype=torch.uint8, device=bits.device))).view(-1, 8)
    return (eights << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)
