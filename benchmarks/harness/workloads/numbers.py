"""The check of moved numbers: gradients whose SGD is exact in float32, so one lost or doubled push shows.

Gradients and first values are small multiples of 2**-10 and the learning rate is 1/8, so each product and sum is exact
in float32, in any order of the pushes and whether or not the processor fuses multiply and add. The gradients of a cycle
nearly cancel, so the values stay small in a run of any length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LR = 0.125
GRID = 1024
SOURCES = 3
CYCLES_MAX = 1_000_000
"""After so many cycles the values would leave the range in which they are exact (2**11 at a grid of 2**-13)."""

Array = npt.NDArray[np.float32]


class WrongNumbers(Exception):
    """The parameters are not what the pushed gradients make of them."""


def first_values(tensors: int, elements: int) -> list[Array]:
    random = np.random.default_rng(1)
    return [_on_grid(random.integers(-GRID, GRID, elements, dtype=np.int32)) for _ in range(tensors)]


def gradients(tensors: int, elements: int) -> list[list[Array]]:
    """SOURCES different gradients for each tensor; their sum is -1, 0 or 1 of 2**-10 in each element."""
    random = np.random.default_rng(2)
    made: list[list[Array]] = [[] for _ in range(SOURCES)]
    for _ in range(tensors):
        free = [random.integers(-GRID, GRID, elements, dtype=np.int32) for _ in range(SOURCES - 1)]
        last = random.integers(-1, 2, elements, dtype=np.int32) - np.sum(free, axis=0, dtype=np.int32)
        for source, values in zip(made, (*free, last), strict=True):
            source.append(_on_grid(values))
    return made


def expected(first: Array, sources: Sequence[Array], counts: Sequence[int]) -> Array:
    """The values after `counts[k]` pushes of `sources[k]`, in any order."""
    if max(counts) > CYCLES_MAX:
        raise ValueError(f"{max(counts)} pushes of one gradient; exact up to {CYCLES_MAX}")
    total = first.astype(np.float64)
    for source, count in zip(sources, counts, strict=True):
        total -= (LR * count) * source.astype(np.float64)
    return total.astype(np.float32)


def check(name: str, found: Array, wanted: Array) -> None:
    """Raises WrongNumbers unless all bits are as expected."""
    wrong = np.flatnonzero(found != wanted)
    if found.shape != wanted.shape or len(wrong):
        first = int(wrong[0]) if len(wrong) else 0
        raise WrongNumbers(
            f"{name}: {len(wrong)} of {wanted.size} values are wrong; "
            f"element {first} is {found.flat[first]!r}, expected {wanted.flat[first]!r}"
        )


def _on_grid(values: npt.NDArray[np.int32]) -> Array:
    return (values / GRID).astype(np.float32)
