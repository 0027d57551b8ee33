"""Functions of the script that are called between two steps (docs/guides/stopping.md).

Owns: the functions, and the events they have already been called for. Invariant: the thread that trains calls them
between two steps, in the order in which they were registered; what one of them raises reaches the script. Must not
know: what a job is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from shardyard.domain.consistency import Stop
from shardyard_worker.session.metrics import Metrics
from shardyard_worker.session.session import CheckpointTaken

J = TypeVar("J")


class Callbacks(Generic[J]):
    """`job`: the first argument of each function. `checkpoint`: the job's newest one when this worker joined."""

    def __init__(self, job: J, checkpoint: CheckpointTaken | None) -> None:
        self._job = job
        self._checkpoint = 0 if checkpoint is None else checkpoint.number
        self._stopped = False
        self.on_step: list[Callable[[J], object]] = []
        self.on_log: list[Callable[[J, Metrics], object]] = []
        self.on_checkpoint: list[Callable[[J, CheckpointTaken], object]] = []
        self.on_stop: list[Callable[[J, Stop], object]] = []

    def after_step(self) -> None:
        for callback in self.on_step:
            callback(self._job)

    def after_log(self, metrics: Metrics) -> None:
        for callback in self.on_log:
            callback(self._job, metrics)

    def between_steps(self, checkpoint: CheckpointTaken | None, stop: Stop | None) -> None:
        """`checkpoint`: the job's newest one. `stop`: given once this worker has no more steps to compute."""
        if checkpoint is not None and checkpoint.number > self._checkpoint:
            self._checkpoint = checkpoint.number
            for on_checkpoint in self.on_checkpoint:
                on_checkpoint(self._job, checkpoint)
        if stop is not None and not self._stopped:
            self._stopped = True
            for on_stop in self.on_stop:
                on_stop(self._job, stop)
