"""A sum that a communication hook of DistributedDataParallel makes, as an operation of torch's process groups.

Must not know: groups, which hooks there are.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

_POLL_S: Final = 0.0005
_LONGEST: Final = datetime.timedelta(minutes=2)
"""Longer than the backend lets a collective last."""


class HookBucket:
    """What a hook sums, in place: a flat tensor. torch's GradBucket cannot be made here. `index`, `is_last`: among the
    buckets of a step. `gradients`: those in the tensor."""

    def __init__(
        self, tensor: torch.Tensor, gradients: Sequence[torch.Tensor] = (), index: int = 0, *, is_last: bool = False
    ) -> None:
        self._tensor = tensor
        self._gradients = gradients
        self._index = index
        self._is_last = is_last

    def buffer(self) -> torch.Tensor:
        return self._tensor

    def gradients(self) -> list[torch.Tensor]:
        return list(self._gradients)

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last


Hook = Callable[[Any, HookBucket], torch.futures.Future[Any]]
"""Of a process group and a bucket."""


class HookedSum:
    """The sum of a bucket over the members of a process group, under way."""

    def __init__(self, hook: Hook, group: Any, bucket: HookBucket) -> None:
        self._future = hook(group, bucket)
        self._mean: torch.Tensor | None = bucket.buffer()
        """What the hook makes of the tensor; None: the tensor is the sum already."""
        self._size = group.size()

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self, timeout: datetime.timedelta = _LONGEST) -> None:
        """Raises RuntimeError if that takes longer, or if the hook's collective has failed."""
        give_up = time.monotonic() + timeout.total_seconds()
        while not self._future.done():
            if time.monotonic() > give_up:
                raise RuntimeError("not yet")
            time.sleep(_POLL_S)
        self._future.value()  # raises what the collective has raised
        mean, self._mean = self._mean, None
        if mean is not None:
            mean.mul_(self._size)
