"""The codes of values, from a server to one worker.

Owns: the shadow, what that worker has of each block. Invariant: a code brings the worker to the shadow, bit for bit,
and the next one is of the difference to it, so errors do not add up: after any number of codes the worker is as far
from the values as one code's bound. Must not know: versions, streams.
"""

from __future__ import annotations

from collections.abc import Hashable

from shardyard.codecs.dense import encoding, floats, int8
from shardyard.codecs.format.compiled import Array
from shardyard.domain.compression import CodecSpec


class DeltaSender:
    """The sender's side of "delta" towards one receiver, which calls `decoding.apply` on every code, in order.

    A code that did not arrive makes the shadow wrong: `forget` it, and the next code is whole. One thread at a time.
    """

    def __init__(self, codec: CodecSpec) -> None:
        assert codec.kind == "delta", codec
        self._codec = codec
        self._shadows: dict[Hashable, Array] = {}

    def code(self, block: Hashable, values: Array) -> memoryview:
        """The code that brings the receiver of `block` to `values`, shape (n,), contiguous, float32 or float64: exactly
        the first time and where an element is not finite, else to within 1.0001 * m / 254 where m is the largest
        change in a bucket."""
        shadow = self._shadows.get(block)
        if shadow is not None and shadow.size == values.size and shadow.dtype == values.dtype:
            made = int8.encode_delta(values, shadow, self._codec.bucket)
            if made is not None:
                return encoding.sealed(self._codec, made, values)
        self._shadows[block] = values.copy()
        return floats.encode_raw(values).data

    def forget(self, block: Hashable = None) -> None:
        """The receiver's state of one block, or of all (None), is unknown from here on."""
        if block is None:
            self._shadows.clear()
        else:
            self._shadows.pop(block, None)


def encode_values(codec: CodecSpec, values: Array) -> memoryview:
    """The code of one block's values for a pull without memory: none, bf16, fp16 or int8."""
    assert codec.kind in ("none", "bf16", "fp16", "int8"), codec
    if codec.kind != "int8":
        return encoding.encode(codec, values)
    return encoding.sealed(codec, int8.encode(values, codec.bucket) if values.size else None, values)
