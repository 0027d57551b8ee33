"""A pipeline of two stages, the same for both sides: the models of `training`, whole batches in every process, and the
schedule. Must not know: how a side runs the schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from harness.workloads.training import BATCH, Task, make_data

MICROBATCHES = 4
SCHEDULE = "1F1B"
CUT = 2
"""The second stage begins at this module of the model."""


class PipelineLoop:
    """`step(inputs, labels)` takes a step; it returns the loss, and NaN in a process that does not know it."""

    def __init__(self, task: Task, step: Callable[[torch.Tensor, torch.Tensor], float]) -> None:
        self._inputs, self._labels = make_data(task, 0, 1)
        self._step = step
        self._steps = 0

    def handlers(self) -> dict[str, Callable[..., Mapping[str, Any]]]:
        return {"train": self.train}

    def train(self, steps: int) -> dict[str, Any]:
        losses = []
        begin = time.perf_counter()
        for _ in range(steps):
            offset = self._steps * BATCH % (len(self._inputs) - BATCH + 1)
            self._steps += 1
            losses.append(self._step(self._inputs[offset : offset + BATCH], self._labels[offset : offset + BATCH]))
        return {"steps": steps, "seconds": time.perf_counter() - begin, "losses": losses}
