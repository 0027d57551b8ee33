"""What holds for codes of ids and rows, whatever they are: they come back, and odd bytes are refused."""

from __future__ import annotations

import contextlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.codecs import RowCode, decode_ids, decode_rows, encode_ids, encode_rows
from shardyard.codecs.form import varint
from shardyard.ground.errors import MalformedPayload, TooLarge

IDS_MAX = 10_000
ANY_IDS = st.one_of(
    st.sets(st.integers(-(1 << 63), (1 << 63) - 1), max_size=200),
    st.sets(st.integers(0, 1_000), max_size=400),
    st.builds(lambda low, n: range(low, low + n), st.integers(-(1 << 62), 1 << 62), st.integers(0, 500)),
    st.sets(st.builds(lambda bits, low: (1 << bits) + low, st.integers(0, 61), st.integers(0, 9)), max_size=300),
)


@settings(max_examples=500, deadline=None)
@given(ANY_IDS)
def test_ids_come_back_in_at_most_eight_bytes_and_a_bit_each(given_ids: set[int]) -> None:
    ids = np.array(sorted(given_ids), np.int64)
    code = encode_ids(ids)
    np.testing.assert_array_equal(decode_ids(code, ids.size), ids)
    assert len(code) <= 6 + 8 * ids.size + -(-ids.size // 64)


COUNTED = st.builds(lambda n, rest: b"\1" + varint(n) + rest, st.integers(0, 300), st.binary())


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    code = bytearray(encode_ids(np.array(sorted(draw(ANY_IDS)), np.int64)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(code) - 1))
        match draw(st.integers(0, 2)):
            case 0:
                code[at] = draw(st.integers(0, 255))
            case 1:
                del code[at : at + draw(st.integers(1, 8))]
            case _:
                code[at:at] = draw(st.binary(min_size=1, max_size=8))
        if not code:
            return b""
    return bytes(code)


@settings(max_examples=2_000, deadline=None)
@given(
    st.one_of(
        spoilt(),
        st.binary(max_size=100),
        st.builds(lambda n, b: b"\1" + varint(n) + b, st.integers(0, 300), st.binary()),
    )
)
def test_any_bytes_are_refused_or_ids_that_ascend(code: bytes) -> None:
    with contextlib.suppress(MalformedPayload, TooLarge):
        ids = decode_ids(code, IDS_MAX)
        assert ids.size <= IDS_MAX
        assert (ids[1:] > ids[:-1]).all()


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(RowCode), st.integers(0, 40), st.integers(1, 40), st.integers(0, 1 << 32), st.integers(-30, 30))
def test_rows_come_back_within_the_bound_of_their_code(code: RowCode, n: int, dim: int, seed: int, scale: int) -> None:
    rng = np.random.default_rng(seed)
    rows = (10.0**scale * rng.standard_normal((n, dim)) * np.exp(4 * rng.standard_normal((n, 1)))).astype(np.float32)
    found = decode_rows(encode_rows(rows, code), n, dim)
    largest = np.abs(rows).max(axis=1, keepdims=True)
    bound = {
        RowCode.FLOAT32: np.zeros_like(rows),
        RowCode.BF16: 2.0**-8 * np.abs(rows) + 2.0**-133,
        RowCode.INT8: 1.0001 * largest / 254 + 1e-35 + np.zeros_like(rows),
    }[code]
    assert (np.abs(found - rows) <= bound).all()


@settings(max_examples=1_000, deadline=None)
@given(st.binary(max_size=400), st.sampled_from([0, 1, 3]), st.integers(0, 20), st.integers(1, 20))
def test_any_bytes_are_refused_or_fill_the_rows(rest: bytes, kind: int, n: int, dim: int) -> None:
    with contextlib.suppress(MalformedPayload, TooLarge):
        assert decode_rows(bytes((kind,)) + varint(n * dim) + rest, n, dim).shape == (n, dim)
