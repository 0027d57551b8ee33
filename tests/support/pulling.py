"""A loader that pulls lists of indices ahead, as torch's DataLoader does with processes, but without any."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator

import torch


def delivered(sampler: Iterable[list[int]], ahead: int) -> Iterator[torch.Tensor]:
    """Yields the lists, as int64 tensors of shape (n,). Before it yields the first it has pulled `ahead` lists, and
    before each one more."""
    pulls, asked = iter(sampler), deque[list[int]]()

    def ask() -> None:
        with contextlib.suppress(StopIteration):
            asked.append(next(pulls))

    for _ in range(ahead):
        ask()
    while True:
        if ahead:
            if not asked:
                return
            indices = asked.popleft()
            ask()
        else:
            ask()
            if not asked:
                return
            indices = asked.popleft()
        yield torch.tensor(indices)
