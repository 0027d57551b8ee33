"""What a script is told of its job, by functions of its own (docs/training.md).

Owns: the functions, and what they were told already. Invariant: they are called in the thread that trains, between two
steps, in the order in which they were given; what one of them raises is the script's to catch. Must not know: how the
news came here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from shardyard.domain.consistency import Stop
from shardyard_worker.session.session import CheckpointTaken

if TYPE_CHECKING:
    from shardyard_worker.job.job import Job

Metrics = Mapping[str, float | torch.Tensor]
OnStep = Callable[["Job"], object]
OnLog = Callable[["Job", Metrics], object]
OnCheckpoint = Callable[["Job", CheckpointTaken], object]
OnStop = Callable[["Job", Stop], object]


class Callbacks:
    """Of one job. `checkpoint`: the newest that it had before this worker came."""

    def __init__(self, job: Job, checkpoint: CheckpointTaken | None) -> None:
        self._job = job
        self._checkpoint = 0 if checkpoint is None else checkpoint.number
        self._stopped = False
        self.on_step: list[OnStep] = []
        self.on_log: list[OnLog] = []
        self.on_checkpoint: list[OnCheckpoint] = []
        self.on_stop: list[OnStop] = []

    def stepped(self) -> None:
        for tell in self.on_step:
            tell(self._job)

    def logged(self, metrics: Metrics) -> None:
        for tell in self.on_log:
            tell(self._job, metrics)

    def look(self, checkpoint: CheckpointTaken | None, stop: Stop | None) -> None:
        """`checkpoint`: the newest; `stop`: set once this worker has no more steps to compute."""
        if checkpoint is not None and checkpoint.number > self._checkpoint:
            self._checkpoint = checkpoint.number
            for tell in self.on_checkpoint:
                tell(self._job, checkpoint)
        if stop is not None and not self._stopped:
            self._stopped = True
            for told in self.on_stop:
                told(self._job, stop)
