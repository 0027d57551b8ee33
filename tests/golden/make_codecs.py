"""The golden vectors of compression: elements, the code of each codec for them, and what a receiver makes of it.

`.venv/bin/python tests/golden/make_codecs.py` prints them as JSON; with `--write` it writes tests/golden/codecs.json.
Do that only for a change of the form that is meant. Elements are little-endian float32 as hexadecimal. A receiver is
held against `decoded`, a sender against `code` (but for zstd, whose bytes are its library's). DELTA is added to
`elements`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from shardyard.codecs.dense.decoding import apply
from shardyard.codecs.dense.encoding import encode
from shardyard.codecs.pulls import DeltaSender
from shardyard.domain.compression import CodecSpec, parse_codec

FILE = Path(__file__).with_name("codecs.json")
KEY = 0x0123456789ABCDEF
CODECS = (
    "none",
    "bf16",
    "fp16",
    "int8:32",
    "int8:32+zstd",
    "qsgd:15:32",
    "qsgd:1:64",
    "onebit:32",
    "topk:0.05",
    "topk:0.05:fp16",
    "topk:0.05:int8",
    "randomk:0.05",
    "randomk:0.05:unbiased",
    "powersgd:2",
    "delta:32",
)


def elements() -> np.ndarray:
    """100 numbers that any language can make: (7 i mod 31 - 15) * 2**(i mod 5 - 6), but a zero and a large one."""
    values = [(7 * i % 31 - 15) * 2.0 ** (i % 5 - 6) for i in range(100)]
    values[3], values[41] = 0.0, 12.75
    return np.array(values, np.float32)


def make(codec: CodecSpec, values: np.ndarray) -> tuple[bytes, np.ndarray]:
    out = values.copy()
    if codec.kind == "delta":
        sender = DeltaSender(codec)
        sender.code(0, values)
        code = sender.code(0, values * np.float32(1.25))
    else:
        code = encode(codec, values, KEY)
    apply(code, out)
    return bytes(code), out


def vectors() -> dict[str, dict[str, str]]:
    """By the codec's text."""
    values = elements()
    made = {}
    for text in CODECS:
        codec = parse_codec(text)
        given = np.tile(values, 8) if codec.zstd else values  # a short code is not packed
        code, out = make(codec, given)
        made[text] = {"elements": given.tobytes().hex(), "code": code.hex(), "decoded": out.tobytes().hex()}
    return made


def main() -> None:
    text = json.dumps(vectors(), indent=1) + "\n"
    if "--write" in sys.argv[1:]:
        FILE.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
