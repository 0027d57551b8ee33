"""One codec on 16 MiB of float32: the time of encoding and decoding, the bytes, and a check of the decoded values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from harness.measuring.pairs import Figures
from shardyard.codecs.dense.decoding import apply, decode
from shardyard.codecs.pulls import DeltaSender, encode_values
from shardyard.config.settings import PARTITIONS_AUTO, CompressionSettings
from shardyard.domain.compression import CodecSpec, parse_codec
from shardyard.domain.layout.layouts import Block, JobLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.placement.placement import fitting_block_bytes, plan
from shardyard_worker.compression.error_feedback import ErrorFeedback

Array = npt.NDArray[np.float32]
SHAPE = (2048, 2048)
WARM_ROUNDS = 2
CHANGE = 1e-3
"""By how much of a gradient values change from one pull to the next."""


class WrongValues(Exception):
    """The decoded values differ from the encoded ones by more than the codec's bound."""


def measure_push(text: str, rounds: int) -> list[Figures]:
    """Sends gradients through a worker's feedback and a server's decoder, block by block, others each round."""
    layout = _layout()
    feedback = ErrorFeedback(CompressionSettings(push=text), layout, seed=1, worker=1)
    codec = parse_codec(text)
    blocks = list(_blocks(layout))
    out, received, given = np.empty(_elements(), np.float32), np.zeros(_elements()), np.zeros(_elements())
    found = []
    for number, gradient in enumerate(_gradients(WARM_ROUNDS + rounds)):
        pieces = [(block, torch.from_numpy(gradient[_span(block)])) for block in blocks]
        begin = time.perf_counter()
        codes = feedback.encode(pieces)
        middle = time.perf_counter()
        for block, code in zip(blocks, codes, strict=True):
            decode(code, out[_span(block)])
        end = time.perf_counter()
        feedback.commit()
        given += gradient
        received += out
        if not codec.has_feedback:
            _check_near(text, codec, gradient, out)
        if number >= WARM_ROUNDS:
            found.append(_figures(codes, middle - begin, end - middle))
    if codec.has_feedback:
        _check(text, float(np.abs(given - received - feedback.residuals()[0]).max()), 1e-4 * float(np.abs(given).max()))
    return found


def measure_pull(text: str, rounds: int) -> list[Figures]:
    """Sends values that change little between rounds through a server's encoder and a worker's decoder."""
    layout, codec = _layout(), parse_codec(text)
    blocks = list(_blocks(layout))
    sender = DeltaSender(codec) if codec.kind == "delta" else None
    encode: Callable[[Block, Array], memoryview] = (
        (lambda _, values: encode_values(codec, values)) if sender is None else (lambda b, v: sender.code(b.offset, v))
    )
    values, had = next(_gradients(1)), np.zeros(_elements(), np.float32)
    found = []
    for number, gradient in enumerate(_gradients(WARM_ROUNDS + rounds)):
        values = values - np.float32(CHANGE) * gradient
        begin = time.perf_counter()
        codes = [encode(block, values[_span(block)]) for block in blocks]
        middle = time.perf_counter()
        for block, code in zip(blocks, codes, strict=True):
            apply(code, had[_span(block)])
        end = time.perf_counter()
        _check_near(text, codec, values, had)
        if number >= WARM_ROUNDS:
            found.append(_figures(codes, middle - begin, end - middle))
    return found


def _figures(codes: list[memoryview], encode_s: float, decode_s: float) -> Figures:
    total = sum(len(code) for code in codes)
    return {
        "encode_ms": 1e3 * encode_s,
        "decode_ms": 1e3 * decode_s,
        "bytes": float(total),
        "times_smaller": 4 * _elements() / total,
    }


def _check_near(text: str, codec: CodecSpec, given: Array, found: Array) -> None:
    """The bounds are those of docs/guides/compression.md, over the largest element instead of each bucket's."""
    largest = float(np.abs(given).max())
    off = float(np.abs(given - found).max())
    match codec.kind:
        case "none":
            _check(text, off, 0.0)
        case "bf16" | "fp16":
            _check(text, off, 2**-8 * largest)
        case "int8" | "delta":
            _check(text, off, largest / 250)
        case "qsgd":
            _check(text, off, 1.0001 * largest / codec.levels)


def _check(text: str, off: float, allowed: float) -> None:
    if not off <= allowed:
        raise WrongValues(f"{text}: what was decoded is off by {off:.3g}, expected at most {allowed:.3g}")


def _layout() -> JobLayout:
    """The coordinator's default layout."""
    variables = [VariableSpec("layer.weight", DType.FLOAT32, SHAPE)]
    block_bytes = fitting_block_bytes(variables, partitions=PARTITIONS_AUTO)
    optimizer = OptimizerSpec("sgd", (make_group("sgd", {"lr": 0.1}),))
    return plan(variables, optimizer, partitions=PARTITIONS_AUTO, block_bytes=block_bytes)


def _blocks(layout: JobLayout) -> Iterator[Block]:
    for partition in layout.partitions:
        yield from partition.blocks


def _span(block: Block) -> slice:
    return slice(block.offset, block.offset + block.length)


def _elements() -> int:
    return SHAPE[0] * SHAPE[1]


def _gradients(count: int) -> Iterator[Array]:
    """normal * exp(normal): few large elements, many small ones."""
    random = np.random.default_rng(1)
    for _ in range(count):
        normal = random.standard_normal(_elements(), np.float32)
        yield np.float32(1e-3) * normal * np.exp(random.standard_normal(_elements(), np.float32))
