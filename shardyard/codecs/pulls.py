"""Codes of values from a server to one worker.

The sender keeps a shadow of each block: the values that the worker has. Invariant: after a code, the worker's values
equal the shadow bit by bit, and the next code has the difference to the shadow. So errors do not add up: after any
number of codes, the worker's values differ from the server's by the bound of one code at most. Must not know: versions,
streams.
"""

from __future__ import annotations

from collections.abc import Hashable

from shardyard.codecs.dense import encoding, floats, int8
from shardyard.codecs.format.compiled import Array
from shardyard.domain.compression import CodecSpec


class DeltaSender:
    """Sends "delta" codes to one receiver, which calls `decoding.apply` for every code, in order.

    If a code did not arrive, the shadow is wrong: call `forget`, and the next code has the whole values. Only one
    thread at a time may use it.
    """

    def __init__(self, codec: CodecSpec) -> None:
        assert codec.kind == "delta", codec
        self._codec = codec
        self._shadows: dict[Hashable, Array] = {}

    def code(self, block: Hashable, values: Array) -> memoryview:
        """The code that changes the receiver's values of `block` to `values`, shape (n,), contiguous, float32 or
        float64.

        The first code is exact, and so is one with an element that is not finite. Others are exact to 1.0001 * m / 254,
        where m is the largest change in a bucket."""
        shadow = self._shadows.get(block)
        if shadow is not None and shadow.size == values.size and shadow.dtype == values.dtype:
            made = int8.encode_delta(values, shadow, self._codec.bucket)
            if made is not None:
                return encoding.sealed(self._codec, made, values)
        self._shadows[block] = values.copy()
        return floats.encode_raw(values).data

    def forget(self, block: Hashable = None) -> None:
        """Forgets what the receiver has of one block, or of all (None)."""
        if block is None:
            self._shadows.clear()
        else:
            self._shadows.pop(block, None)


def encode_values(codec: CodecSpec, values: Array) -> memoryview:
    """The code of the values of one block, without a shadow: none, bf16, fp16 or int8."""
    assert codec.kind in ("none", "bf16", "fp16", "int8"), codec
    if codec.kind != "int8":
        return encoding.encode(codec, values)
    return encoding.sealed(codec, int8.encode(values, codec.bucket) if values.size else None, values)
