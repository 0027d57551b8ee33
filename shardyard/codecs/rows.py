"""Rows of a table, or gradients for them, in one of three codes: float32 as they are, bf16, or int8 with a scale a row.

Owns: which codes rows travel in. The codes are those of blocks (`floats`, `int8` with a bucket of one row), so a
receiver needs no settings. Invariant: memory is asked for when it has been held against the bytes at hand, of which
each of these codes has at least one an element. Must not know: ids, what is done with rows that are not finite.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np

from shardyard.codecs import floats, int8
from shardyard.codecs.compiled import Float32s
from shardyard.codecs.decoding import decode
from shardyard.codecs.form import Buffer, CodeId
from shardyard.ground.errors import MalformedPayload


class RowCode(enum.StrEnum):
    """As settings write it."""

    FLOAT32 = "float32"
    BF16 = "bf16"
    INT8 = "int8"


_CODES: Final = frozenset({CodeId.RAW, CodeId.BF16, CodeId.INT8})


def encode_rows(rows: Float32s, code: RowCode) -> memoryview:
    """The code of `rows`, shape (n, dim), contiguous; RAW where one of them cannot be said otherwise: it is not finite,
    or beyond what the code holds. The bounds are those of `floats` and `int8`, for each row by itself."""
    values = rows.reshape(-1)
    made = None
    if code is RowCode.BF16:
        made = floats.encode_bf16(values)
    elif code is RowCode.INT8 and values.size:
        made = int8.encode(values, rows.shape[1])
    return (floats.encode_raw(values) if made is None else made).data


def decode_rows(code: Buffer, rows: int, dim: int) -> Float32s:
    """Shape (rows, dim), dim at least 1. The caller has held both numbers against its limits. Raises MalformedPayload
    for what is no code of so many rows, TooLarge."""
    if len(code) <= rows * dim:
        raise MalformedPayload(f"a code of {rows} rows of {dim} elements in {len(code)} bytes; each element has one")
    if code[0] not in _CODES:
        raise MalformedPayload(f"a code of rows that begins with {code[0]}; expected one of {sorted(_CODES)}")
    values = np.empty(rows * dim, np.float32)
    decode(code, values)
    return values.reshape(rows, dim)
