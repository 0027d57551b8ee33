"""All randomness of a training process, from the job's seed and the name of the work (docs/internals/ledger.md, rule
B5)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
import torch

GeneratorStates = tuple[torch.Tensor, Any, Any]
"""States of the CPU's generators: torch's, numpy's, random's."""


@dataclass(frozen=True)
class PackedStates:
    """These states without tensors: each tensor that a loader process sends costs a file in shared memory."""

    of_torch: bytes
    of_numpy: Any
    of_random: Any

    @classmethod
    def of(cls, states: GeneratorStates) -> Self:
        of_torch, of_numpy, of_random = states
        return cls(of_torch.numpy().tobytes(), of_numpy, of_random)

    def unpacked(self) -> GeneratorStates:
        return torch.frombuffer(bytearray(self.of_torch), dtype=torch.uint8), self.of_numpy, self.of_random


def seed_everything(*key: int, devices: bool = True) -> None:
    """Seeds torch (all `devices`, or the CPU alone), numpy's legacy generator and random with numbers drawn from the
    key."""
    words = np.random.SeedSequence(list(key)).generate_state(3, np.uint64)
    seed = int(words[0] >> np.uint64(1))
    if devices and _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    np.random.seed(int(words[1] & np.uint64(0xFFFFFFFF)))
    random.seed(int(words[2]))


@cache
def _has_accelerator() -> bool:
    """Without an accelerator torch would keep each seed for one that may come, with three stack traces for each
    batch."""
    return torch.accelerator.is_available()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restores the CPU's generators after the block."""
    before = states()
    try:
        yield
    finally:
        restore(before)


def states() -> GeneratorStates:
    """The current states of the CPU's generators."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def is_same(one: GeneratorStates, other: GeneratorStates) -> bool:
    """Whether the generators stand alike."""
    of_numpy = all(np.array_equal(left, right) for left, right in zip(one[1], other[1], strict=True))
    return of_numpy and one[2] == other[2] and torch.equal(one[0], other[0])


def restore(states: GeneratorStates) -> None:
    """Sets the CPU's generators to these states."""
    of_torch, of_numpy, of_random = states
    torch.set_rng_state(of_torch)
    np.random.set_state(of_numpy)
    random.setstate(of_random)
