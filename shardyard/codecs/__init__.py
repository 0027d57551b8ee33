"""Gradient and value compression: from a block's elements to a code, and back. docs/reference/codes.md has the form.

In: a contiguous array of shape (n,), float32 or float64, or the ids and rows of tables. Out: bytes that describe
themselves, so that a receiver needs no settings. Numpy and numba only; what a worker keeps between pushes is in
shardyard_worker.compression. From top to bottom:

- `warmup`: compiles loops before they are needed. `pulls`: values from a server to one worker.
- `rows`: codes of ids and rows.
- `dense`: codes of blocks, one file for each family. Read `dense/encoding.py` and `dense/decoding.py` first.
- `format`: the form that all codes share.
"""

from shardyard.codecs.dense.decoding import apply, decode
from shardyard.codecs.dense.encoding import encode, encode_feedback, encode_low_rank, first_factor
from shardyard.codecs.dense.powersgd import Grid, grid_of
from shardyard.codecs.format.form import Buffer, CodeId
from shardyard.codecs.pulls import DeltaSender, encode_values
from shardyard.codecs.rows.row_ids import decode_ids, encode_ids
from shardyard.codecs.rows.row_values import decode_rows, encode_gradients, encode_rows, first_code
from shardyard.codecs.warmup import warm_codecs, warm_decoders
from shardyard.domain.compression import NONE, CodecSpec, Rules, parse_codec, parse_pull_rules, parse_push_rules
from shardyard.domain.pulls import RowCode

__all__ = [
    "NONE",
    "Buffer",
    "CodeId",
    "CodecSpec",
    "DeltaSender",
    "Grid",
    "RowCode",
    "Rules",
    "apply",
    "decode",
    "decode_ids",
    "decode_rows",
    "encode",
    "encode_feedback",
    "encode_gradients",
    "encode_ids",
    "encode_low_rank",
    "encode_rows",
    "encode_values",
    "first_code",
    "first_factor",
    "grid_of",
    "parse_codec",
    "parse_pull_rules",
    "parse_push_rules",
    "warm_codecs",
    "warm_decoders",
]
