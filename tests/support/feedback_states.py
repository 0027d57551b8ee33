"""Error feedback of a few variables, on the host and on a device that is the CPU, and pushes of seeded gradients."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import numpy as np
import torch

from shardyard.codecs.dense.decoding import decode
from shardyard.config.settings import CompressionSettings
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard_worker.compression.error_feedback import ErrorFeedback
from shardyard_worker.exchange.buffers.device_copies import DeviceCopies

VARIABLES = (
    VariableSpec("fc1.weight", DType.FLOAT32, (80, 60)),
    VariableSpec("fc1.bias", DType.FLOAT32, (80,)),
    VariableSpec("fc2.weight", DType.FLOAT64, (40, 80)),
    VariableSpec("count", DType.INT64, (), VariableKind.BUFFER),
    VariableSpec("none", DType.FLOAT32, (0, 5)),
)
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
KEPT: tuple[tuple[str, dict[str, float]], ...] = (
    ("none", {}),
    ("bf16", {}),
    ("fp16", {}),
    ("qsgd:1+zstd", {}),
    ("randomk:0.05:unbiased", {}),
    ("int8:64+zstd", {}),
    ("onebit:64", {}),
    ("topk:0.05:int8", {}),
    ("topk:0.01", {"momentum": 0.9, "warmup_steps": 4}),
    ("topk:0.01:fp16", {"momentum": 0.9, "clip": 1.0}),
    ("randomk:0.05", {}),
    ("fc1*=powersgd:2 *=int8", {}),
)


def layout(pieces: int = 2, optimizer: OptimizerSpec = SGD) -> JobLayout:
    """Each variable that is not small has `pieces` blocks, over two partitions. Positions do not matter here."""
    blocks: list[list[Block]] = [[], []]
    for index, spec in enumerate(VARIABLES):
        cuts = np.linspace(0, spec.elements, (pieces if spec.elements > 100 else 1) + 1).astype(int).tolist()
        for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
            blocks[number % 2].append(Block(index, start, stop - start, 0))
    partitions = tuple(PartitionLayout(PartitionId(i), 0, tuple(each)) for i, each in enumerate(blocks))
    return JobLayout(VARIABLES, optimizer, partitions)


class PlainLane:
    """A lane of a device that does its work at once."""

    def follow(self) -> None: ...

    def launch(self, work: Callable[[], None]) -> None:
        work()

    def inside(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def keep(self, tensor: torch.Tensor) -> None: ...

    def mark(self) -> PlainLane:
        return self

    def lead(self, event: PlainLane) -> None: ...

    def synchronize(self) -> None: ...


class PlainEngine:
    """Uses the CPU as a device."""

    def lane(self) -> PlainLane:
        return PlainLane()

    def host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


def on_host(
    push: str, optimizer: OptimizerSpec = SGD, pieces: int = 2, worker: int = 1, **more: object
) -> ErrorFeedback:
    return ErrorFeedback(CompressionSettings(push=push, **more), layout(pieces, optimizer), seed=3, worker=worker)


def on_device(
    push: str, optimizer: OptimizerSpec = SGD, pieces: int = 2, worker: int = 1, **more: object
) -> ErrorFeedback:
    return ErrorFeedback(
        CompressionSettings(push=push, **more),
        layout(pieces, optimizer),
        seed=3,
        worker=worker,
        devices=[torch.device("cpu")] * len(VARIABLES),
        copies=DeviceCopies(lambda _: PlainEngine()),
    )


def gradients(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    values = [rng.standard_normal(spec.elements) * np.exp(rng.standard_normal(spec.elements)) for spec in VARIABLES]
    return [np.array(each).astype(spec.dtype.value) for each, spec in zip(values, VARIABLES, strict=True)]


def push(state: ErrorFeedback, given: list[np.ndarray], pieces: int = 2) -> tuple[list[np.ndarray], list[bytes]]:
    """The gradients that the servers decode from a push, and its codes."""
    received = [np.zeros_like(each) for each in given]
    blocks = [block for partition in layout(pieces).partitions for block in partition.blocks]
    codes = state.encode([(block, piece(block, given)) for block in blocks])
    for block, code in zip(blocks, codes, strict=True):
        decode(code, received[block.variable][block.offset : block.offset + block.length])
    return received, [bytes(code) for code in codes]


def piece(block: Block, given: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(given[block.variable].reshape(-1)[block.offset : block.offset + block.length])


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)
