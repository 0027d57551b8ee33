"""What holds for every codec and whatever elements: bounds, means, sums, and bytes that nobody meant as a code."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardyard.codecs.dense.decoding import apply, decode
from shardyard.codecs.dense.encoding import encode, encode_feedback, encode_low_rank, first_factor
from shardyard.codecs.dense.powersgd import Grid
from shardyard.codecs.format.form import CodeId, varint
from shardyard.domain.compression import CodecSpec, parse_codec, sent_count
from shardyard.domain.errors import MalformedPayload, TooLarge

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "codecs.json").read_text())
VECTORS = [bytes.fromhex(vector["code"]) for vector in GOLDEN.values()]

BUCKETS = st.sampled_from([16, 64, 1_024])
DENSITIES = st.sampled_from([0.001, 0.01, 0.1, 0.5])
STATELESS = st.one_of(
    st.sampled_from([parse_codec(text) for text in ("none", "bf16", "fp16", "bf16+zstd")]),
    st.builds(lambda levels, bucket: CodecSpec("qsgd", levels=levels, bucket=bucket), st.integers(1, 127), BUCKETS),
    st.builds(lambda density: CodecSpec("randomk", density=density, unbiased=True), DENSITIES),
)
FEEDBACK = st.one_of(
    st.builds(lambda bucket, zstd: CodecSpec("int8", bucket=bucket, zstd=zstd), BUCKETS, st.booleans()),
    st.builds(lambda bucket: CodecSpec("onebit", bucket=bucket), BUCKETS),
    st.builds(
        lambda density, values: CodecSpec("topk", density=density, values=values),
        DENSITIES,
        st.sampled_from(["fp32", "fp16", "int8"]),
    ),
    st.builds(lambda density: CodecSpec("randomk", density=density), DENSITIES),
    st.builds(lambda rank: CodecSpec("powersgd", rank=rank), st.integers(1, 4)),
)


@st.composite
def blocks(draw: st.DrawFn, least: int = 0) -> np.ndarray:
    """Heavy-tailed elements of any scale, some of them zero, float32 or float64."""
    n = draw(st.integers(least, 3_000))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    scale = 10.0 ** draw(st.integers(-30, 30))
    values = scale * rng.standard_normal(n) * np.exp(draw(st.sampled_from([0.0, 1.0, 3.0])) * rng.standard_normal(n))
    values[rng.random(n) < draw(st.sampled_from([0.0, 0.5, 0.99]))] = 0
    return values.astype(draw(st.sampled_from(["float32", "float64"])))


def decoded(code: memoryview, like: np.ndarray) -> np.ndarray:
    out = np.full_like(like, 77)
    decode(code, out)
    return out


def by_bucket(values: np.ndarray, bucket: int) -> np.ndarray:
    """The largest magnitude of its bucket, for each element."""
    starts = np.arange(0, values.size, bucket)
    return np.repeat(np.maximum.reduceat(np.abs(values), starts), bucket)[: values.size]


# --- bounds, as the modules and docs/guides/compression.md state them


def check_bound(codec: CodecSpec, x: np.ndarray, y: np.ndarray) -> None:
    off, size = np.abs(x - y), np.abs(x)
    match codec.kind:
        case "none":
            assert not off.any()
        case "bf16":
            assert (off <= (2.0**-8 + 2.0**-24) * size + 2.0**-133).all()
        case "fp16":
            assert (off <= (2.0**-11 + 2.0**-24) * size + 2.0**-39 * size.max() + 2.0**-149).all()
        case "int8":
            assert (off <= 1.0001 * by_bucket(x, codec.bucket) / 254 + 1e-35).all()
        case "qsgd":
            assert (off <= 1.0001 * by_bucket(x, codec.bucket) / codec.levels + 1e-35).all()
        case "onebit":
            for start in range(0, x.size, codec.bucket):
                part, rest = x[start : start + codec.bucket], (x - y)[start : start + codec.bucket]
                whole = np.sum(part.astype(float) ** 2)
                expected = whole - np.abs(part.astype(float)).sum() ** 2 / part.size
                assert np.sum(rest.astype(float) ** 2) <= expected + 1e-5 * whole + 1e-70
        case "topk":
            sent = y != 0
            if codec.values == "fp32" and x.dtype == np.float32:
                assert (off[sent] == 0).all()
            rounded = {"fp32": 2.0**-23, "fp16": 2.0**-10, "int8": 1 / 250}[codec.values]
            assert (off[sent] <= rounded * size.max() + 1e-37).all()
            largest = float(size.max()) or 1.0
            left = math.fsum(((x - y) / largest).astype(float) ** 2)
            part = 1 - sent_count(x.size, codec.density) / x.size
            assert left <= part * math.fsum((x / largest).astype(float) ** 2) * (1 + 1e-6) + x.size * rounded**2
        case "randomk" if not codec.unbiased:
            assert ((off <= 2.0**-23 * size + 2.0**-140) | (y == 0)).all()
            assert np.count_nonzero(y) <= sent_count(x.size, codec.density)
        case "randomk":
            pass  # elements that are sent are scaled up: no bound holds for one block
        case "powersgd":
            assert np.linalg.norm((x - y).astype(float)) <= (1 + 1e-4) * np.linalg.norm(x.astype(float)) + 1e-35
        case _:
            raise AssertionError(f"no bound is known for {codec}")


@settings(max_examples=300, deadline=None)
@given(st.one_of(STATELESS, FEEDBACK), blocks(least=1), st.integers(0, (1 << 64) - 1))
def test_what_comes_out_is_within_the_bound(codec: CodecSpec, x: np.ndarray, key: int) -> None:
    check_bound(codec, x, decoded(encode(codec, x, key), x))


@settings(max_examples=60, deadline=None)
@given(blocks(least=200), st.integers(1, 4), st.integers(1, 60), st.data())
def test_projection_never_lengthens_whatever_the_grid(
    x: np.ndarray, rank: int, columns: int, data: st.DataObject
) -> None:
    grid = Grid(columns, data.draw(st.integers(0, columns - 1)))
    assume(4 * grid.factor_elements(x.size, rank) < x.nbytes)
    rest = np.empty_like(x)
    code, _ = encode_low_rank(x, np.zeros_like(x), rest, grid, first_factor(rank, columns, 3))
    y = decoded(code, x)
    check_bound(CodecSpec("powersgd", rank=rank), x, y)
    np.testing.assert_allclose(y.astype(float) + rest, x, atol=1e-5 * np.abs(x).max() + 1e-37)


# --- means


def check_mean(codec: CodecSpec, x: np.ndarray, draws: int = 10_000) -> None:
    """The mean of all draws is x, to within its confidence interval: 5 standard errors for each of the elements, whose
    chance is below 1e-4 for all of them together, and the seed is fixed."""
    total, squares, out = np.zeros(x.size), np.zeros(x.size), np.empty_like(x)
    rng = np.random.default_rng(1)
    for key in rng.integers(0, 1 << 63, draws):
        decode(encode(codec, x, int(key)), out)
        total += out
        squares += out.astype(float) ** 2
    mean = total / draws
    error = np.sqrt(np.maximum(squares / draws - mean**2, 0) / draws)
    assert (np.abs(mean - x) <= 5 * error + 1e-6 * np.abs(x).max()).all()
    assert error.max() > 0, "nothing was drawn"


@pytest.mark.parametrize(
    "text", ["qsgd:1:16", "qsgd:4:16", "qsgd:15:64", "qsgd:127:64", "randomk:0.05:unbiased", "randomk:0.3:unbiased"]
)
def test_mean_of_ten_thousand_draws_is_what_was_sent(text: str) -> None:
    x = np.random.default_rng(0).standard_normal(101).astype(np.float32)
    check_mean(parse_codec(text), x)


def test_each_element_is_drawn_as_often() -> None:
    x, out = np.ones(103, np.float32), np.empty(103, np.float32)
    counts = np.zeros(103)
    for key in range(5_000):
        decode(encode(parse_codec("randomk:0.05"), x, key), out)
        counts += out
    expected = 5_000 * 5 / 103
    assert np.abs(counts - expected).max() < 6 * math.sqrt(expected)


# --- sums


@settings(max_examples=120, deadline=None)
@given(FEEDBACK, st.integers(1, 2_000), st.sampled_from(["float32", "float64"]), st.integers(0, 1 << 32))
def test_what_was_decoded_and_what_is_left_add_up_to_all_gradients(
    codec: CodecSpec, n: int, dtype: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    residual, spare, out = np.zeros(n, dtype), np.empty(n, dtype), np.empty(n, dtype)
    sent, given_, largest = np.zeros(n), np.zeros(n), 0.0
    for step in range(8):
        gradient = (rng.standard_normal(n) * np.exp(rng.standard_normal(n))).astype(dtype)
        decode(encode_feedback(codec, gradient, residual, spare, seed + step), out)
        residual, spare = spare, residual
        sent += out
        given_ += gradient
        largest = max(largest, float(np.abs(out).max()), float(np.abs(residual).max()))
    rounding = 3e-6 * largest if dtype == "float32" or codec.kind == "powersgd" else 1e-13 * largest
    assert np.abs(sent + residual - given_).max() <= 8 * rounding


# --- bytes that nobody meant as a code

ODD_BYTES = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda kind, n, rest: bytes((kind,)) + varint(n) + rest,
        st.sampled_from(list(CodeId)),
        st.integers(0, 300),
        st.binary(max_size=2_000),
    ),
)


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """A code with bytes changed, cut out or put in."""
    code = bytearray(draw(st.sampled_from(VECTORS)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(code) - 1))
        match draw(st.integers(0, 3)):
            case 0:
                code[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                code[at] = draw(st.integers(0, 255))
            case 2:
                del code[at : at + draw(st.integers(1, 8))]
                if not code:
                    return b""
            case _:
                code[at:at] = draw(st.binary(min_size=1, max_size=8))
    return bytes(code)


def check_refused_or_filled(code: bytes, n: int, dtype: str) -> None:
    """Whatever comes in, nothing but the two errors comes out, and nothing beside the array is touched."""
    guarded = np.ones(n + 64, dtype)
    before = guarded.tobytes()
    with contextlib.suppress(MalformedPayload, TooLarge):
        apply(code, guarded[32 : 32 + n])
    edge = 32 * guarded.itemsize
    assert guarded.tobytes()[:edge] == before[:edge]
    assert guarded.tobytes()[-edge:] == before[-edge:]


@settings(max_examples=300, deadline=None)
@given(ODD_BYTES, st.integers(0, 300), st.sampled_from(["float32", "float64", "int64", "bool"]))
def test_any_bytes_are_refused_or_fill_the_array(code: bytes, n: int, dtype: str) -> None:
    check_refused_or_filled(code, n, dtype)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 8), st.integers(0, 9), st.binary(min_size=1, max_size=8), st.integers(1, 300))
def test_any_indices_are_refused_or_within_the_array(count: int, rice: int, indices: bytes, n: int) -> None:
    head = bytes((CodeId.TOPK,)) + varint(n) + varint(count) + bytes((rice, 0)) + varint(len(indices))
    check_refused_or_filled(head + indices + bytes(4 * count), n, "float32")


@settings(max_examples=600, deadline=None)
@given(spoilt(), st.sampled_from([100, 100, 100, 800, 99]), st.sampled_from(["float32", "float32", "float64"]))
def test_spoilt_codes_are_refused_or_fill_the_array(code: bytes, n: int, dtype: str) -> None:
    check_refused_or_filled(code, n, dtype)
