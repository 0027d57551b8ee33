"""What holds for codes of ids and rows, whatever they are: they come back, and odd bytes are refused."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardyard.codecs.format.form import varint
from shardyard.codecs.rows.row_ids import decode_ids, decode_runs, encode_ids, encode_runs
from shardyard.codecs.rows.row_values import decode_raw_runs, decode_rows, encode_rows
from shardyard.domain.errors import MalformedPayload, TooLarge
from shardyard.domain.pulls import RowCode
from shardyard.domain.tables.row_ids import partition_of
from shardyard.domain.tables.row_routing import first_misplaced

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


@settings(max_examples=400, deadline=None)
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
@example(RowCode.INT8, 34, 1, 738411, -30)  # a row of 1.05e-35 was sent as zeros
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


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.sampled_from([0, 1, 3]), st.integers(0, 20), st.integers(1, 20))
def test_any_bytes_are_refused_or_fill_the_rows(rest: bytes, kind: int, n: int, dim: int) -> None:
    with contextlib.suppress(MalformedPayload, TooLarge):
        assert decode_rows(bytes((kind,)) + varint(n * dim) + rest, n, dim).shape == (n, dim)


# ---- several codes in one pass


def together(codes: list[bytes], before: bytes = b"") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bytes, and where each code begins and ends."""
    ends = np.cumsum([len(before), *map(len, codes)], dtype=np.int64)
    return np.frombuffer(before + b"".join(codes), np.uint8), ends[:-1].copy(), ends[1:].copy()


@settings(max_examples=300, deadline=None)
@given(st.lists(ANY_IDS, max_size=6), st.binary(max_size=3))
def test_codes_of_several_runs_are_those_of_each(given_ids: list[set[int]], before: bytes) -> None:
    runs = [np.array(sorted(ids), np.int64) for ids in given_ids]
    ends = np.cumsum([0, *(run.size for run in runs)])
    whole = np.concatenate([np.empty(0, np.int64), *runs])
    codes = encode_runs(whole, list(itertools.pairwise(ends.tolist())))
    assert [bytes(code) for code in codes] == [bytes(encode_ids(run)) for run in runs]
    data, begins, stops = together([bytes(code) for code in codes], before)
    found = decode_runs(data, begins, stops, np.array([run.size for run in runs], np.int64))
    assert found is not None
    np.testing.assert_array_equal(found, whole)


def one_by_one(codes: list[bytes], counts: list[int]) -> np.ndarray | None:
    found = [np.empty(0, np.int64)]
    for code, count in zip(codes, counts, strict=True):
        try:
            ids = decode_ids(code, count)
        except (MalformedPayload, TooLarge):
            return None
        if ids.size != count:
            return None
        found.append(ids)
    return np.concatenate(found)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.one_of(spoilt(), COUNTED), st.integers(-1, 1)), min_size=1, max_size=4))
def test_any_bytes_of_several_codes_are_what_each_is_by_itself(given_codes: list[tuple[bytes, int]]) -> None:
    codes = [code for code, _ in given_codes]
    counts = []
    for code, wrong_by in given_codes:
        try:
            counts.append(max(0, decode_ids(code, IDS_MAX).size + wrong_by * (len(codes) > 2)))
        except (MalformedPayload, TooLarge):
            counts.append(min(code[1] if len(code) > 1 else 0, 100))
    data, begins, ends = together(codes)
    found, expected = decode_runs(data, begins, ends, np.array(counts, np.int64)), one_by_one(codes, counts)
    if expected is None:
        assert found is None
    else:
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.integers(1, 40),
    st.sampled_from(["", "inf", "nan", "bf16", "head", "short", "long", "many"]),
    st.data(),
)
def test_rows_of_several_codes_are_what_each_is_by_itself(
    counts: list[int], dim: int, spoils: str, data: st.DataObject
) -> None:
    rng = np.random.default_rng(0)
    runs = [rng.standard_normal((n, dim)).astype(np.float32) for n in counts]
    at = data.draw(st.integers(0, len(runs) - 1))
    if spoils in ("inf", "nan") and runs[at].size:
        runs[at].flat[data.draw(st.integers(0, runs[at].size - 1))] = float(spoils)
    codes = [bytes(encode_rows(run, RowCode.FLOAT32)) for run in runs]
    match spoils:
        case "bf16":
            codes[at] = bytes(encode_rows(runs[at], RowCode.BF16))
        case "head":
            codes[at] = codes[at][:1] + bytes([codes[at][1] ^ 1]) + codes[at][2:]
        case "short":
            codes[at] = codes[at][:-1]
        case "long":
            codes[at] += b"\0"
        case "many":
            counts[at] += 1
    whole, begins, ends = together(codes, b"odd")
    found = decode_raw_runs(whole, begins, ends, np.array(counts, np.int64), dim)
    if spoils and (runs[at].size or spoils not in ("inf", "nan")):
        assert found is None
    else:
        assert found is not None
        np.testing.assert_array_equal(found, np.concatenate(runs))


@settings(max_examples=300, deadline=None)
@given(ANY_IDS, st.integers(1, 9), st.data())
def test_an_id_out_of_place_is_found_among_those_of_all_partitions(
    given_ids: set[int], partitions: int, data: st.DataObject
) -> None:
    ids = np.array(sorted(given_ids), np.int64)
    owners = partition_of(ids, partitions)
    order = np.argsort(owners, kind="stable")
    named = np.arange(partitions, dtype=np.int64)
    counts = np.bincount(owners, minlength=partitions).astype(np.int64)
    assert first_misplaced(ids[order], counts, named, partitions) is None
    several = np.flatnonzero(counts > 1)
    if several.size:
        at = data.draw(st.integers(1, int(counts[several[0]]) - 1)) + int(counts[: several[0]].sum())
        twice = ids[order].copy()
        twice[at] = twice[at - 1]
        assert first_misplaced(twice, counts, named, partitions) == at
    if ids.size and partitions > 1:
        wrong = data.draw(st.integers(0, partitions - 1))
        named[wrong] = (named[wrong] + 1) % partitions
        begin = int(counts[:wrong].sum())
        assert first_misplaced(ids[order], counts, named, partitions) == (begin if counts[wrong] else None)
