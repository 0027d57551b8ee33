"""Codes: their bytes, their sizes, what they refuse, and that all can be compiled beforehand."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard

from shardyard.codecs import warmup
from shardyard.codecs.dense.decoding import apply, decode
from shardyard.codecs.dense.encoding import encode, encode_feedback, encode_low_rank, first_factor
from shardyard.codecs.dense.powersgd import grid_of
from shardyard.codecs.format.form import CodeId, Reader, varint
from shardyard.codecs.pulls import DeltaSender, encode_values
from shardyard.codecs.warmup import warm_codecs, warm_decoders
from shardyard.domain.compression import (
    FORMS,
    NONE,
    PUSH_KINDS,
    CodecSpec,
    parse_codec,
    sent_count,
)
from shardyard.domain.errors import MalformedPayload, TooLarge
from shardyard.domain.limits import BLOCK_ELEMENTS_MAX

GOLDEN = Path(__file__).parents[3] / "golden"
VECTORS: dict[str, dict[str, str]] = json.loads((GOLDEN / "codecs.json").read_text())

PUSHED = [
    parse_codec(text)
    for text in (
        "none",
        "bf16",
        "fp16",
        "int8",
        "int8:64+zstd",
        "qsgd",
        "qsgd:1:64+zstd",
        "onebit",
        "topk:0.01",
        "topk:0.01:fp16",
        "topk:0.01:int8",
        "randomk:0.05",
        "randomk:0.05:unbiased",
        "powersgd:2",
    )
]
by_text = pytest.mark.parametrize("codec", PUSHED, ids=str)
with_feedback = pytest.mark.parametrize("codec", [codec for codec in PUSHED if codec.has_feedback], ids=str)
dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])


def test_every_kind_that_is_pushed_is_in_the_list() -> None:
    assert {codec.kind for codec in PUSHED} == set(PUSH_KINDS)


def gradients(n: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Heavy-tailed, as gradients are."""
    rng = np.random.default_rng(seed)
    return (1e-3 * rng.standard_normal(n) * np.exp(rng.standard_normal(n))).astype(dtype)


def decoded(code: memoryview | bytes, like: np.ndarray) -> np.ndarray:
    out = np.full_like(like, 77)
    decode(code, out)
    return out


# --- golden vectors


def load_maker():
    spec = importlib.util.spec_from_file_location("golden_make_codecs", GOLDEN / "make_codecs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = load_maker()


def floats_of(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), "<f4").copy()


def test_every_kind_has_a_golden_vector() -> None:
    assert {parse_codec(text).kind for text in VECTORS} == set(FORMS)
    assert {bytes.fromhex(vector["code"])[0] for vector in VECTORS.values()} == set(CodeId)
    assert set(VECTORS) == set(MAKER.CODECS)


@pytest.mark.parametrize("text", VECTORS)
def test_sender_writes_the_golden_bytes(text: str) -> None:
    codec = parse_codec(text)
    made, _ = MAKER.make(codec, floats_of(VECTORS[text]["elements"]))
    if not codec.zstd:
        assert made.hex() == VECTORS[text]["code"]
    else:
        assert made[0] == CodeId.ZSTD


@pytest.mark.parametrize("text", VECTORS)
def test_receiver_reads_the_golden_bytes(text: str) -> None:
    vector = VECTORS[text]
    out = floats_of(vector["elements"])
    apply(bytes.fromhex(vector["code"]), out)
    assert out.tobytes().hex() == vector["decoded"]


# --- sizes


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("none", 0.9999),
        ("bf16", 1.9999),
        ("fp16", 1.9999),
        ("int8", 3.98),
        ("int8+zstd", 6.0),
        ("qsgd", 6.3),
        ("onebit", 31.0),
        ("topk:0.001", 690),
        ("topk:0.001:int8", 1_500),
        ("randomk:0.001", 950),
        ("powersgd:2", 250),
    ],
)
def test_a_million_elements_shrink_by(text: str, least: float) -> None:
    values = gradients(1 << 20)
    assert values.nbytes / len(encode(parse_codec(text), values)) >= least


def test_indices_cost_less_than_12_bits_at_a_thousandth() -> None:
    values = gradients(1 << 20)
    assert len(encode(parse_codec("topk:0.001"), values)) - 4 * sent_count(1 << 20, 0.001) < 1_049 * 12 / 8


# --- what no codec can carry


@by_text
@dtypes
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 3, 2_999])
def test_block_that_is_not_finite_travels_whole(codec: CodecSpec, dtype: str, bad: float, place: int) -> None:
    values = gradients(3_000, dtype)
    values[place] = bad
    np.testing.assert_array_equal(decoded(encode(codec, values), values), values)


@with_feedback
@dtypes
def test_nothing_is_left_out_of_a_block_that_is_not_finite(codec: CodecSpec, dtype: str) -> None:
    values, before = gradients(3_000, dtype), gradients(3_000, dtype, 1)
    values[7] = np.nan
    after = np.full_like(values, 5)
    code = encode_feedback(codec, values, before, after)
    np.testing.assert_array_equal(decoded(code, values), values + before)
    assert not after.any()


@by_text
def test_float64_beyond_float32_travels_whole(codec: CodecSpec) -> None:
    values = gradients(3_000, "float64") * 1e300
    np.testing.assert_array_equal(decoded(encode(codec, values), values), values)


@by_text
@dtypes
@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 9, 1_023, 1_025])
def test_every_length_has_a_code(codec: CodecSpec, dtype: str, n: int) -> None:
    values = gradients(n, dtype)
    out = decoded(encode(codec, values), values)
    assert np.isfinite(out).all()
    if n == 0:
        assert len(encode(codec, values)) == 2


@by_text
def test_zeros_stay_zeros(codec: CodecSpec) -> None:
    values = np.zeros(3_000, np.float32)
    assert not decoded(encode(codec, values), values).any()


@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 1e-38, 1e-36])
@by_text
def test_tiny_elements_come_out_tiny(codec: CodecSpec, tiny: float) -> None:
    values = np.full(3_000, tiny, np.float32)
    assert np.abs(decoded(encode(codec, values), values)).max() <= 21 * np.float32(tiny)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool", "float64"])
def test_elements_of_any_dtype_travel_raw(dtype: str) -> None:
    values = np.arange(5).astype(dtype)
    code = encode(NONE, values)
    np.testing.assert_array_equal(decoded(code, values), values)


def test_halves_are_those_of_numpy() -> None:
    """Rounded to nearest even, subnormal ones too, at an exponent of 0."""
    values = np.concatenate((gradients(4_000) * np.float32(1e3), gradients(4_000) * np.float32(1e-3)))
    values[0] = 2.0**14  # makes the exponent 0
    values = np.clip(values, -(2.0**14), 2.0**14)
    code = encode(parse_codec("fp16"), values)
    assert bytes(code)[3] == 128
    np.testing.assert_array_equal(np.frombuffer(code, "<f2", offset=4), values.astype(np.float16))
    np.testing.assert_array_equal(decoded(code, values), values.astype(np.float16).astype(np.float32))


def test_halves_of_others_are_read_as_ieee_has_them() -> None:
    every = np.arange(65_536, dtype=np.uint16)
    code = bytes((CodeId.FP16,)) + varint(65_536) + bytes((128,)) + every.tobytes()
    expected = every.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(decoded(code, expected), expected)


# --- top-k


@pytest.mark.parametrize("n", [1_000, 20_000, 300_000])
@pytest.mark.parametrize("density", [0.0005, 0.001, 0.01, 0.25, 0.5])
def test_topk_sends_exactly_the_largest(n: int, density: float) -> None:
    values = gradients(n)
    out = decoded(encode(CodecSpec("topk", density=density, values="fp32"), values), values)
    count = sent_count(n, density)
    kept = np.flatnonzero(out)
    assert kept.size == count
    np.testing.assert_array_equal(out[kept], values[kept])
    assert np.abs(values[kept]).min() >= np.partition(np.abs(values), n - count)[n - count]


@pytest.mark.parametrize(
    "values",
    [
        np.ones(50_000),
        np.repeat([1.0, 0.0], 25_000),
        np.concatenate((np.full(40, 9.0), np.zeros(50_000))),
        np.concatenate((np.linspace(1, 2, 500), np.full(50_000, 1e-20))),
    ],
    ids=["all equal", "half zero", "fewer than asked", "all in one place"],
)
def test_topk_of_hard_samples_is_exact(values: np.ndarray) -> None:
    values = values.astype(np.float32)
    out = decoded(encode(parse_codec("topk:0.01"), values), values)
    assert np.count_nonzero(out) == min(sent_count(values.size, 0.01), np.count_nonzero(values))
    kept = out != 0
    assert np.abs(values[kept]).min() >= np.abs(values[~kept]).max()


# --- PowerSGD's matrices


def test_block_of_whole_rows_has_the_columns_of_its_variable() -> None:
    grid = grid_of((1_000, 300), 600, 60_000, 2)
    assert (grid.columns, grid.lead, grid.rows(60_000)) == (300, 0, 200)


def test_block_begins_in_the_middle_of_a_row() -> None:
    grid = grid_of((1_000, 10, 30), 650, 60_000, 2)
    assert (grid.columns, grid.lead, grid.rows(60_000)) == (300, 50, 201)


@pytest.mark.parametrize("shape", [(2, 1_000_000), (1_000_000, 1), (5,), ()])
def test_block_without_useful_rows_becomes_a_square(shape: tuple[int, ...]) -> None:
    grid = grid_of(shape, 0, 10_000, 2)
    assert (grid.columns, grid.lead) == (100, 0)


@pytest.mark.parametrize(("lead", "length"), [(0, 60_000), (50, 60_000), (299, 59_999)])
def test_matrix_of_low_rank_comes_back(lead: int, length: int) -> None:
    """The parts of rows at its begin and end are directions of their own."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((205, 2)) @ rng.standard_normal((2, 300))
    values = matrix.astype(np.float32).reshape(-1)[lead : lead + length].copy()
    grid = grid_of((1_000, 300), lead, length, 5)
    zeros, rest = np.zeros_like(values), np.empty_like(values)
    code, factor = encode_low_rank(values, zeros, rest, grid, first_factor(5, 300, 7))
    np.testing.assert_allclose(decoded(code, values), values, atol=1e-4)
    assert np.abs(rest).max() < 1e-4
    if lead == 0:
        assert np.count_nonzero(factor.any(axis=1)) == 2, "there are no more directions"


# --- deltas


def test_delta_brings_the_receiver_to_the_shadow_without_drift() -> None:
    rng = np.random.default_rng(0)
    sender, values = DeltaSender(parse_codec("delta:128")), gradients(5_000) * np.float32(100)
    received = np.zeros_like(values)
    apply(sender.code("w", values), received)
    np.testing.assert_array_equal(received, values)
    for _ in range(200):
        change = 1e-3 * rng.standard_normal(values.size).astype(np.float32)
        behind = np.abs(values + change - received).max()
        values = values + change
        code = sender.code("w", values)
        apply(code, received)
        assert np.abs(values - received).max() <= 1.0001 * behind / 254 + 2.0**-24 * np.abs(values).max()
    assert len(code) < values.nbytes / 3.7


def test_delta_starts_anew_after_forgetting_and_for_what_is_not_finite() -> None:
    sender, values = DeltaSender(parse_codec("delta")), gradients(500)
    bad = values.copy()
    bad[3] = np.inf
    for given, forget in ((values, False), (bad, False), (bad, False), (values, False), (values, True)):
        if forget:
            sender.forget()
        code = bytes(sender.code(0, given))
        assert code[0] == CodeId.RAW
        np.testing.assert_array_equal(decoded(code, given), given)
    assert bytes(sender.code(0, values))[0] == CodeId.DELTA


def test_delta_is_no_gradient() -> None:
    sender, values = DeltaSender(parse_codec("delta+zstd")), gradients(500)
    sender.code(0, values)
    with pytest.raises(MalformedPayload, match="without values to add it to"):
        decode(sender.code(0, values), values)


@pytest.mark.parametrize("text", ["none", "bf16", "fp16", "int8", "int8+zstd", "bf16+zstd"])
def test_values_of_a_pull_come_back_nearly(text: str) -> None:
    values = gradients(5_000)
    out = decoded(encode_values(parse_codec(text), values), values)
    assert np.abs(out - values).max() <= np.abs(values).max() / 250


# --- what is refused


def malformed(code: bytes, n: int = 100, dtype: str = "float32") -> str:
    with pytest.raises(MalformedPayload) as caught:
        decode(code, np.zeros(n, dtype))
    return caught.value.what


def code_of(kind: CodeId, *parts: bytes, n: int = 100) -> bytes:
    return bytes((kind,)) + varint(n) + b"".join(parts)


def test_code_for_another_length_is_refused() -> None:
    for vector in VECTORS.values():
        code = bytes.fromhex(vector["code"])
        n = len(vector["elements"]) // 8
        with pytest.raises(MalformedPayload, match=f"code has {n} elements; the block has {n + 1}"):
            decode(code, np.zeros(n + 1, np.float32))


@pytest.mark.parametrize("text", VECTORS)
def test_code_cut_anywhere_or_with_more_behind_it_is_refused(text: str) -> None:
    vector = VECTORS[text]
    code = bytes.fromhex(vector["code"])
    out = floats_of(vector["elements"])
    for end in range(len(code)):
        with pytest.raises(MalformedPayload):
            apply(code[:end], out)
    with pytest.raises(MalformedPayload):
        apply(code + b"\0", out)


@pytest.mark.parametrize("kind", [kind for kind in CodeId if kind is not CodeId.RAW])
@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
def test_only_raw_fills_what_is_no_float(kind: CodeId, dtype: str) -> None:
    codes = [bytes.fromhex(vector["code"]) for vector in VECTORS.values()]
    code = next(code for code in codes if code[0] == kind)
    n = 800 if kind is CodeId.ZSTD else 100
    expected = "without values to add it to" if kind is CodeId.DELTA else "travel only as RAW"
    assert expected in malformed(code, n, dtype)


def test_raw_must_have_the_width_of_the_elements() -> None:
    code = bytes(encode(NONE, np.zeros(100, np.float64)))
    assert "expected 400" in malformed(code)


def test_unknown_id_and_overlong_number_are_refused() -> None:
    assert "which is no codec" in malformed(b"\xc8\x64")
    assert "more than 5 bytes" in malformed(b"\x00\xff\xff\xff\xff\xff\x01")
    assert "no bytes" in malformed(b"")


def test_indices_beyond_the_block_are_refused() -> None:
    ones = bytes((0, 0, 3)) + b"\xff\xff\xff" + bytes(4)
    assert "indices" in malformed(code_of(CodeId.TOPK, varint(1), ones))
    far = bytes((7, 0, 2)) + b"\x01\x00" + bytes(4)  # 1 << 7
    assert "indices" in malformed(code_of(CodeId.TOPK, varint(1), far))
    assert "indices" in malformed(code_of(CodeId.TOPK, varint(100), bytes((0, 0, 1)) + b"\0" + bytes(400)))
    last = bytes((7, 0, 1)) + bytes((99 << 1,)) + struct.pack("<f", 2.5)
    out = np.ones(100, np.float32)
    decode(code_of(CodeId.TOPK, varint(1), last), out)
    assert out[99] == 2.5
    assert not out[:99].any()


@pytest.mark.parametrize(
    "code",
    [
        code_of(CodeId.INT8, varint(0)),
        code_of(CodeId.ONEBIT, varint(12), bytes(4 * 9 + 13)),
        code_of(CodeId.QSGD, varint(128), bytes((0,)), bytes(4 + 100)),
        code_of(CodeId.QSGD, varint(128), bytes((128,)), bytes(4 + 100)),
        code_of(CodeId.POWERSGD, varint(0), varint(0), bytes((1,))),
        code_of(CodeId.POWERSGD, varint(10), varint(10), bytes((1,)), bytes(84)),
        code_of(CodeId.POWERSGD, varint(10), varint(0), bytes((65,)), bytes(65 * 80)),
        code_of(CodeId.POWERSGD, varint(BLOCK_ELEMENTS_MAX), varint(0), bytes((64,)), bytes(100)),
        code_of(CodeId.TOPK, varint(101)),
        code_of(CodeId.RANDOMK, varint(101), bytes(8 + 404)),
    ],
    ids=lambda code: CodeId(code[0]).name,
)
def test_parameters_out_of_bounds_are_refused(code: bytes) -> None:
    malformed(code)


def frame(content: bytes, **more: object) -> bytes:
    return zstandard.ZstdCompressor(**more).compress(content)  # type: ignore[arg-type]


def test_frames_that_would_burst_are_refused_before_they_are_read() -> None:
    bomb = frame(bytes(1 << 30))
    assert len(bomb) < 100_000
    assert "the length of a ZSTD code" in malformed(code_of(CodeId.ZSTD, varint(1 << 30), bomb))
    assert "its frame 1073741824" in malformed(code_of(CodeId.ZSTD, varint(800), bomb))
    without_size = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(800))
    assert "announces" in malformed(code_of(CodeId.ZSTD, varint(800), without_size))


def test_frames_within_frames_broken_and_joined_ones_are_refused() -> None:
    inner = bytes.fromhex(VECTORS["none"]["code"])
    good = code_of(CodeId.ZSTD, varint(len(inner)), frame(inner))
    decode(good, np.zeros(100, np.float32))
    assert "another ZSTD code in it" in malformed(code_of(CodeId.ZSTD, varint(len(good)), frame(good)))
    malformed(good + frame(inner))
    malformed(good[:-1])
    malformed(code_of(CodeId.ZSTD, varint(len(inner)), b"not a frame at all"))


def test_block_beyond_the_limit_is_refused() -> None:
    with pytest.raises(TooLarge, match="at most 1073741824"):
        Reader(b"\0\0", BLOCK_ELEMENTS_MAX + 1)


# ---- warming


def test_warming_takes_every_codec() -> None:
    assert {code[0] for code in warmup._CODES} == set(CodeId) - {CodeId.RAW, CodeId.ZSTD}
    warm_decoders()
    warm_codecs([*PUSHED, parse_codec("delta")])
