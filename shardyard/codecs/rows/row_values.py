"""Codes of rows of a table, or of their gradients: float32, bf16, or int8 with a scale for each row.

The codes are those of blocks (`floats`, and `int8` with a bucket of one row), so a receiver needs no settings.
Invariant: memory is allocated after its size was checked against the bytes; each of these codes has at least one byte
for each element. Must not know: what happens to rows that are not finite.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from shardyard.codecs.dense import floats, int8
from shardyard.codecs.dense.decoding import decode
from shardyard.codecs.format.compiled import Float32s, Int64s, Uint8s, read_only
from shardyard.codecs.format.finiteness import first_not_finite
from shardyard.codecs.format.form import Buffer, CodeId, Reader
from shardyard.codecs.format.varints import read_varint
from shardyard.codecs.rows import stochastic_rounding
from shardyard.domain.compiling import compiled
from shardyard.domain.errors import MalformedPayload
from shardyard.domain.limits import BLOCK_ELEMENTS_MAX
from shardyard.domain.pulls import RowCode

_RAW: Final = int(CodeId.RAW)
_CODES: Final = frozenset({CodeId.RAW, CodeId.BF16, CodeId.INT8})


def encode_rows(rows: Float32s, code: RowCode) -> memoryview:
    """The code of `rows`, shape (n, dim), contiguous, rounded to the nearest. The code is RAW if an element is not
    finite, or beyond the range of the code. The bounds are those of `floats` and `int8`, for each row by itself."""
    values = rows.reshape(-1)
    made = None
    if code is RowCode.BF16:
        made = floats.encode_bf16(values)
    elif code is RowCode.INT8 and values.size:
        made = int8.encode(values, rows.shape[1])
    return (floats.encode_raw(values) if made is None else made).data


def encode_gradients(rows: Float32s, ids: Int64s, code: RowCode, key: int) -> memoryview:
    """The code of gradients of the rows `ids`, shape (n,), rounded at random, so that the mean of the result is the
    gradient. The bounds are those of `stochastic_rounding`, which also says what depends on `key` (64 bits)."""
    made = None
    if code is RowCode.BF16:
        made = stochastic_rounding.encode_bf16(rows, ids, key)
    elif code is RowCode.INT8 and rows.size:
        made = stochastic_rounding.encode_int8(rows, ids, key)
    return (floats.encode_raw(rows.reshape(-1)) if made is None else made).data


def decode_rows(code: Buffer, rows: int, dim: int) -> Float32s:
    """The rows of a code, shape (rows, dim), dim at least 1. The caller has checked both numbers against its limits.
    Raises MalformedPayload for bytes that are not a code of so many rows, TooLarge."""
    if len(code) <= rows * dim:
        raise MalformedPayload(
            f"a code of {rows} rows of {dim} elements has {len(code)} bytes; expected at least one for each element"
        )
    if code[0] not in _CODES:
        raise MalformedPayload(f"a code of rows begins with {code[0]}; expected one of {sorted(_CODES)}")
    values = np.empty(rows * dim, np.float32)
    decode(code, values)
    return values.reshape(rows, dim)


def decode_raw_runs(codes: Uint8s, begins: Int64s, ends: Int64s, counts: Int64s, dim: int) -> Float32s | None:
    """The rows of several RAW codes, one after the other, shape (sum(counts), dim). Code k is codes[begins[k]:ends[k]]
    and has counts[k] rows. None if one of them is not a RAW code of so many rows, or has an element that is not finite;
    `decode_rows` for each says which one and why."""
    codes = read_only(codes)
    places = np.empty(begins.size, np.int64)
    if not _find_raw(codes, begins, ends, counts, dim, places):
        return None
    rows = np.empty((int(counts.sum()), dim), np.float32)
    into, at = rows.reshape(-1).view(np.uint8), 0
    for begin, end in zip(places.tolist(), ends.tolist(), strict=True):
        into[at : at + end - begin] = codes[begin:end]
        at += end - begin
    finite = first_not_finite([rows.ctypes.data], [rows.size], "float32") is None
    return rows if finite else None


def first_code(codes: memoryview, rows: int, dim: int) -> memoryview:
    """The first of several codes in a row. It has `rows` rows. Raises MalformedPayload, TooLarge."""
    elements = rows * dim
    reader = Reader(codes, elements)
    match reader.id:
        case CodeId.RAW:
            body = 4 * elements
        case CodeId.BF16:
            body = 2 * elements
        case CodeId.INT8:
            bucket = reader.varint("bucket", BLOCK_ELEMENTS_MAX, minimum=1)
            body = elements + 4 * -(-elements // bucket)
        case _:
            raise MalformedPayload(f"a code of rows begins with {reader.id}; expected one of {sorted(_CODES)}")
    if reader.left < body:
        raise MalformedPayload(
            f"a {reader.id.name} code of {rows} rows of {dim} elements has {reader.left} of {body} bytes"
        )
    return codes[: len(codes) - reader.left + body]


@compiled
def _find_raw(codes: Uint8s, begins: Int64s, ends: Int64s, counts: Int64s, dim: int, places: Int64s) -> bool:
    """Fills `places` with where the elements of each code begin. Returns False if a code is not such a code."""
    for k in range(begins.size):
        if not (0 <= begins[k] < ends[k] <= codes.size) or codes[begins[k]] != _RAW:
            return False
        elements, at = read_varint(codes, begins[k] + 1, ends[k])
        if elements != counts[k] * dim or elements > BLOCK_ELEMENTS_MAX or ends[k] - at != 4 * elements:
            return False
        places[k] = at
    return True
