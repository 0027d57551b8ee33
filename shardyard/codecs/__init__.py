"""Gradient and value compression: from a block's elements to a code, and back. docs/compression.md has the form.

A block is a contiguous array of shape (n,), float32 or float64. A code describes itself, so a receiver needs no
settings. The ids and rows of embedding tables have codes too (`ids`, `rows`). Numpy and numba only; what a worker keeps
between pushes is shardyard_worker.feedback's.
"""

from shardyard.codecs.decoding import apply, decode
from shardyard.codecs.encoding import encode, encode_feedback, encode_low_rank, first_factor
from shardyard.codecs.form import Buffer, CodeId
from shardyard.codecs.ids import decode_ids, encode_ids
from shardyard.codecs.powersgd import Grid, grid_of
from shardyard.codecs.pulls import DeltaSender, encode_values
from shardyard.codecs.rows import decode_rows, encode_gradients, encode_rows, first_code
from shardyard.codecs.warming import warm_codecs, warm_decoders
from shardyard.ground.compression import (
    NONE,
    CodecSpec,
    Rules,
    parse_codec,
    parse_pull_rules,
    parse_push_rules,
)
from shardyard.ground.types import RowCode

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
