"""Compiles loops before they are needed, so that the first push does not wait for the compiler.

Has one small code of each kind that has a loop, as bytes, so that a receiver does not compile the loops of senders.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from shardyard.codecs import pulls
from shardyard.codecs.dense import encoding
from shardyard.codecs.dense.decoding import apply
from shardyard.codecs.format.form import CodeId
from shardyard.domain.compression import CodecSpec

_ELEMENTS: Final = 8
_CODES: Final = tuple(
    bytes((code, _ELEMENTS, *header)) + bytes(zeros)
    for code, header, zeros in (
        (CodeId.BF16, (), 16),
        (CodeId.FP16, (128,), 16),
        (CodeId.INT8, (8,), 12),
        (CodeId.QSGD, (8, 1), 6),
        (CodeId.ONEBIT, (8,), 5),
        (CodeId.TOPK, (1, 0, 0, 1), 5),
        (CodeId.RANDOMK, (1,), 12),
        (CodeId.POWERSGD, (8, 0, 1), 36),
        (CodeId.DELTA, (8,), 12),
    )
)
_SENT_ELEMENTS: Final = 4_096
"""Enough that each codec makes a code of its own, and none falls back to RAW."""


def warm_decoders(dtypes: Iterable[npt.DTypeLike] = ("float32", "float64")) -> None:
    """Compiles the loops of a receiver, which may get any code."""
    for dtype in dtypes:
        for code in _CODES:
            apply(code, np.zeros(_ELEMENTS, dtype))


def warm_codecs(codecs: Iterable[CodecSpec], dtypes: Iterable[npt.DTypeLike] = ("float32",)) -> None:
    """Compiles the loops of a sender that knows its codecs."""
    kinds = sorted(set(codecs), key=str)
    for dtype in dtypes:
        values = np.ones(_SENT_ELEMENTS, dtype)
        for codec in kinds:
            if codec.kind == "delta":
                sender = pulls.DeltaSender(codec)
                sender.code(0, values)
                sender.code(0, values)
            else:
                encoding.encode(codec, values)
