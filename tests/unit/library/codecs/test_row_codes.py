"""Codes of ids and rows: their bytes, what they cost, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from shardyard.codecs.format.form import CodeId, varint
from shardyard.codecs.rows.row_ids import decode_ids, encode_ids
from shardyard.codecs.rows.row_values import decode_rows, encode_gradients, encode_rows, first_code
from shardyard.domain.errors import MalformedPayload, TooLarge
from shardyard.domain.pulls import RowCode

LAST, FIRST = (1 << 63) - 1, -(1 << 63)
GOLDEN = {
    (): "0100",
    (7,): "01010700000000000000",
    (-3, 0, 1, 300): "0104fdffffffffffffff090200a804",
    (FIRST, LAST): "01020000000000000080" + "40" + "feffffffffffffff",
    tuple(range(5, 71)): "014205000000000000000000",
}


def ids_of(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


@pytest.mark.parametrize("ids", GOLDEN, ids=lambda ids: f"{len(ids)} ids")
def test_ids_have_these_bytes(ids: tuple[int, ...]) -> None:
    assert encode_ids(ids_of(*ids)).hex() == GOLDEN[ids]
    found = decode_ids(bytes.fromhex(GOLDEN[ids]), 100)
    assert (found.dtype, found.tolist()) == (np.int64, list(ids))


@pytest.mark.parametrize(
    ("ids", "bytes_each_max"),
    [
        (np.arange(4_096), 0.02),
        (np.unique(np.random.default_rng(0).integers(0, 1_000_000, 4_096)), 1.4),
        (np.unique(np.random.default_rng(0).integers(FIRST, LAST, 4_096)), 7.1),
    ],
)
def test_ids_cost_the_bits_of_their_gaps(ids: np.ndarray, bytes_each_max: float) -> None:
    assert len(encode_ids(ids)) <= bytes_each_max * ids.size


@pytest.mark.parametrize("ids", [(1, 1), (2, 1), (LAST, FIRST)])
def test_ids_that_do_not_ascend_are_no_list_of_distinct_ones(ids: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="do not ascend"):
        encode_ids(ids_of(*ids))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("", "has no bytes"),
        ("0200", "begins with 2"),
        ("01", "no end within 5 bytes"),
        ("01ffffffffff00", "no end within 5 bytes"),
        ("010000", "1 bytes too many"),
        ("010107000000000000", "8 or more"),
        ("0102070000000000000009", "ends before its last gap"),
        ("01020700000000000000" + "41" + "00" * 9, "more than 64 bits"),
        ("0102feffffffffffff7f0101", "beyond the largest id"),
        ("01020000000000000080" + "40" + "ff" * 8, "beyond the largest id"),
        ("01020700000000000000" + "0106", "other bits than zeros"),
        ("01020700000000000000" + "010100", "1 bytes too many"),
        ("0142" + "0500000000000000" + "00", "10 or more"),
        ("0142" + "0500000000000000" + "0100", "ends before its last gap"),
        ("0142" + "0500000000000000" + "01" + "00" * 8, "ends before its last gap"),
    ],
)
def test_code_that_breaks_a_rule_is_refused(code: str, said: str) -> None:
    with pytest.raises(MalformedPayload, match=said):
        decode_ids(bytes.fromhex(code), 100)


def test_more_ids_than_the_caller_takes_are_refused() -> None:
    code = encode_ids(np.arange(100))
    assert decode_ids(code, 100).size == 100
    with pytest.raises(TooLarge, match="100 ids; expected at most 99"):
        decode_ids(code, 99)


# ---- rows

ROWS = np.random.default_rng(1).standard_normal((5, 24)).astype(np.float32) * np.float32([[1], [1e-3], [1e3], [1], [0]])


def test_rows_of_float32_are_exact() -> None:
    code = encode_rows(ROWS, RowCode.FLOAT32)
    assert (code[0], len(code)) == (CodeId.RAW, 2 + ROWS.nbytes)
    assert decode_rows(code, 5, 24).tobytes() == ROWS.tobytes()


def test_rows_of_bf16_are_within_the_bound_in_half_the_bytes() -> None:
    code = encode_rows(ROWS, RowCode.BF16)
    assert (code[0], len(code)) == (CodeId.BF16, 2 + ROWS.nbytes // 2)
    assert (np.abs(decode_rows(code, 5, 24) - ROWS) <= 2.0**-8 * np.abs(ROWS)).all()


def test_rows_of_int8_have_a_scale_each() -> None:
    code = encode_rows(ROWS, RowCode.INT8)
    assert (code[0], len(code)) == (CodeId.INT8, 3 + 5 * (24 + 4))
    bound = 1.0001 * np.abs(ROWS).max(axis=1, keepdims=True) / 254
    assert (np.abs(decode_rows(code, 5, 24) - ROWS) <= bound).all()


@pytest.mark.parametrize("form", RowCode)
def test_rows_that_are_not_finite_arrive_as_they_are(form: RowCode) -> None:
    rows = ROWS.copy()
    rows[2, 3] = np.nan
    rows[4, 1] = np.inf
    assert decode_rows(encode_rows(rows, form), 5, 24).tobytes() == rows.tobytes()


@pytest.mark.parametrize("form", RowCode)
@pytest.mark.parametrize(("rows", "dim"), [(4, 24), (6, 24), (5, 23), (24, 6), (0, 24)])
def test_rows_of_other_numbers_are_refused(form: RowCode, rows: int, dim: int) -> None:
    code = encode_rows(ROWS, form)
    with pytest.raises(MalformedPayload):
        decode_rows(code, rows, dim)


@pytest.mark.parametrize("kind", sorted(set(CodeId) - {CodeId.RAW, CodeId.BF16, CodeId.INT8}))
def test_rows_in_any_other_code_are_refused(kind: CodeId) -> None:
    with pytest.raises(MalformedPayload, match=f"begins with {int(kind)}"):
        decode_rows(bytes((kind,)) + varint(8) + bytes(64), 1, 8)


# ---- gradients, rounded at random

IDS = np.array([-(2**63), -1, 0, 7, 2**63 - 1])
STEPS = {RowCode.BF16: 2.0**-7 * np.abs(ROWS), RowCode.INT8: 1.0001 * np.abs(ROWS).max(axis=1, keepdims=True) / 127}
"""The most by which an element may be another one."""


def rounded(rows: np.ndarray, form: RowCode, key: int = 1, ids: np.ndarray = IDS) -> np.ndarray:
    return decode_rows(encode_gradients(rows, ids, form, key), *rows.shape)


def test_gradients_of_float32_are_exact() -> None:
    assert bytes(encode_gradients(ROWS, IDS, RowCode.FLOAT32, 1)) == bytes(encode_rows(ROWS, RowCode.FLOAT32))


@pytest.mark.parametrize("form", STEPS)
def test_gradients_are_within_a_step_in_as_many_bytes(form: RowCode) -> None:
    code = encode_gradients(ROWS, IDS, form, 1)
    assert len(code) == len(encode_rows(ROWS, form))
    assert code[0] == encode_rows(ROWS, form)[0]
    found = decode_rows(code, 5, 24)
    assert (np.abs(found - ROWS) <= STEPS[form]).all()
    assert not (found[4] != 0).any()
    assert (np.abs(found - ROWS) > STEPS[form] / 2).any(), "not to the nearest"


@pytest.mark.parametrize("form", STEPS)
def test_the_mean_of_what_arrives_is_the_gradient(form: RowCode) -> None:
    keys = 4_000
    mean = np.mean([rounded(ROWS, form, key).astype(np.float64) for key in range(keys)], axis=0)
    # of draws within one step a standard deviation is half of it at most
    assert (np.abs(mean - ROWS) <= 5 * STEPS[form] / 2 / keys**0.5 + 2.0**-22 * np.abs(ROWS).max()).all()


@pytest.mark.parametrize("form", STEPS)
def test_what_is_drawn_depends_on_key_id_and_place_alone(form: RowCode) -> None:
    every = rounded(ROWS, form)
    assert (rounded(ROWS, form) == every).all()
    assert (rounded(ROWS[1:4:2].copy(), form, ids=IDS[1:4:2]) == every[1:4:2]).all()
    assert (rounded(ROWS, form, key=2) != every).any()
    assert (rounded(ROWS, form, ids=IDS + 1) != every).any()
    same = np.full((5, 24), 1 / 3, np.float32)
    same[:, 0] = 1
    alike = rounded(same, form)
    assert len(np.unique(alike[0, 1:])) > 1
    assert (alike[0] != alike[1]).any()


def test_what_bf16_has_arrives_as_it_is() -> None:
    exact = decode_rows(encode_rows(ROWS, RowCode.BF16), 5, 24)
    assert (rounded(exact, RowCode.BF16) == exact).all()


GRADIENT_CODES = {RowCode.BF16: "010480bf013f81be003e", RowCode.INT8: "0304040802013c8140e00f"}


@pytest.mark.parametrize("form", STEPS)
def test_gradients_have_these_bytes(form: RowCode) -> None:
    row = np.float32([[-1.0, 0.503, -0.2511, 0.1251]])
    assert bytes(encode_gradients(row, IDS[3:4], form, 9)).hex() == GRADIENT_CODES[form]


@pytest.mark.parametrize("form", RowCode)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38])
def test_gradients_that_a_code_cannot_say_arrive_as_they_are(form: RowCode, value: float) -> None:
    rows = ROWS.copy()
    rows[2, 3] = value
    assert rounded(rows, form).tobytes() == rows.tobytes()


@pytest.mark.parametrize("form", RowCode)
def test_no_gradients_travel_too(form: RowCode) -> None:
    assert rounded(np.empty((0, 24), np.float32), form, ids=IDS[:0]).shape == (0, 24)


# ---- codes that follow one another


@pytest.mark.parametrize("form", RowCode)
@pytest.mark.parametrize("after", [b"", b"M", bytes(99)])
def test_the_first_of_several_codes_is_as_long_as_it_says(form: RowCode, after: bytes) -> None:
    code = bytes(encode_rows(ROWS, form))
    assert bytes(first_code(memoryview(code + after), 5, 24)) == code


@pytest.mark.parametrize("form", RowCode)
def test_a_first_code_that_ends_early_is_refused(form: RowCode) -> None:
    code = memoryview(bytes(encode_rows(ROWS, form)))
    for length in (0, 1, 2, len(code) - 1):
        with pytest.raises(MalformedPayload):
            first_code(code[:length], 5, 24)
    with pytest.raises(MalformedPayload, match="the block has"):
        first_code(code, 4, 24)
    with pytest.raises(MalformedPayload, match="begins with"):
        first_code(memoryview(bytes((CodeId.FP16,)) + bytes(code[1:])), 5, 24)
