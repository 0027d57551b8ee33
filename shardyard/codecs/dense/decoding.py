"""From a code of any codec to elements.

Owns: which file reads which id. Invariants: `decode` fills the whole array or raises; every length is checked against
the bytes and the array before memory is allocated; whatever the bytes are, nothing outside of the array is written. A
refused code may leave the array half-filled. Must not know: settings, senders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy.typing as npt

from shardyard.codecs.dense import floats, int8, onebit, powersgd, qsgd, randomk, topk
from shardyard.codecs.format import zstd
from shardyard.codecs.format.compiled import Array
from shardyard.codecs.format.form import Buffer, CodeId, Reader
from shardyard.domain.errors import MalformedPayload

_DECODERS: Final[Mapping[CodeId, Callable[[Reader, Array], None]]] = {
    CodeId.BF16: floats.decode_bf16,
    CodeId.FP16: floats.decode_fp16,
    CodeId.INT8: int8.decode,
    CodeId.QSGD: qsgd.decode,
    CodeId.ONEBIT: onebit.decode,
    CodeId.TOPK: topk.decode,
    CodeId.RANDOMK: randomk.decode,
    CodeId.POWERSGD: powersgd.decode,
}


def decode(code: Buffer, out: npt.NDArray[Any]) -> None:
    """Fills `out` with the elements of a code.

    `out`: shape (n,), contiguous, float32 or float64; for a RAW code, any dtype, which its elements must have. Raises
    MalformedPayload for bytes that are no code for this array, also for a DELTA code, and TooLarge.
    """
    reader = _open(code, out)
    if reader.id is CodeId.DELTA:
        raise MalformedPayload("a DELTA code came without values to add it to")
    _fill(reader, out)


def apply(code: Buffer, values: npt.NDArray[Any]) -> None:
    """Like `decode`, but adds the elements of a DELTA code to `values`. For the receiver of a pull."""
    reader = _open(code, values)
    if reader.id is CodeId.DELTA:
        floats.check_floating(values, reader)
        int8.decode(reader, values, add=True)
    else:
        _fill(reader, values)


def _open(code: Buffer, out: npt.NDArray[Any]) -> Reader:
    assert out.ndim == 1
    assert out.flags.c_contiguous
    reader = Reader(code, out.size)
    return Reader(zstd.unpack(reader), out.size) if reader.id is CodeId.ZSTD else reader


def _fill(reader: Reader, out: npt.NDArray[Any]) -> None:
    if reader.id is CodeId.RAW:
        floats.decode_raw(reader, out)
    else:
        floats.check_floating(out, reader)
        _DECODERS[reader.id](reader, out)
