"""A job that stops when a metric gets no better. Must not know: how a job is stopped, who else logs."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Literal

from shardyard.domain.errors import InvalidRequest
from shardyard_worker.job.callbacks import Metrics

if TYPE_CHECKING:
    from shardyard_worker.job.job import Job

log = logging.getLogger("shardyard.worker")


class EarlyStopping:
    """Calls `job.stop` when a metric that this worker logs has not got better `patience` times in a row, or is not
    finite: `job.on_log(EarlyStopping("validation_loss", patience=5))`.

    `min_delta`: by how much it must be better to count, at least 0. `mode`: whether less ("min") or more ("max") is
    better. Raises InvalidRequest.
    """

    def __init__(
        self, monitor: str, *, patience: int = 3, min_delta: float = 0.0, mode: Literal["min", "max"] = "min"
    ) -> None:
        if patience < 1 or not 0 <= min_delta < math.inf:
            got = f"patience {patience}, min_delta {min_delta}"
            raise InvalidRequest(f"{got}; expected at least 1, and a number from 0")
        if mode not in ("min", "max"):
            raise InvalidRequest(f"mode {mode!r}; expected min or max")
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.mode = mode
        self.best: float | None = None
        """The best value so far."""
        self.best_step = 0
        """The job's step at which it was logged."""
        self.waited = 0
        """How many values in a row were no better."""

    def __call__(self, job: Job, metrics: Metrics) -> None:
        if self.monitor not in metrics or job.stopping is not None:
            return
        value = float(metrics[self.monitor])
        if not math.isfinite(value):
            job.stop(f"{self.monitor} is {value} at step {job.step}")
        elif self._is_better(value):
            self.best, self.best_step, self.waited = value, job.step, 0
        else:
            self.waited += 1
            if self.waited >= self.patience:
                job.stop(f"{self.monitor} has not got better than {self.best:.6g}, of step {self.best_step}")

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return True
        gained = self.best - value if self.mode == "min" else value - self.best
        return gained > self.min_delta
