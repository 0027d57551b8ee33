"""Stops a job when a metric gets no better. Must not know: how a job is stopped."""

from __future__ import annotations

import logging
import math
from typing import Literal, Protocol

from shardyard.domain.errors import InvalidRequest
from shardyard_worker.session.metrics import Metrics

log = logging.getLogger("shardyard.worker")


class StoppableJob(Protocol):
    """The part of `Job` that this module needs."""

    @property
    def step(self) -> int: ...

    @property
    def stopping(self) -> object | None: ...

    def stop(self, reason: str = "") -> None: ...


class EarlyStopping:
    """Stops the job when a metric that this worker logs has not improved `patience` times in a row, or is not finite.

    `monitor`: the metric's name in `job.log`. `min_delta`: an improvement must be larger than this; at least 0, in the
    metric's unit. `mode`: "min" if lower is better, "max" if higher is. Raises InvalidRequest for other values.

    >>> import shardyard as sy
    >>> with sy.connect() as job:
    ...     stopping = job.on_log(sy.EarlyStopping("validation_loss", patience=2))
    ...     for loss in (0.5, 0.4, 0.4, 0.6):
    ...         job.log(validation_loss=loss)
    ...     job.stopping.reason
    'validation_loss has not got better than 0.4, of step 0'
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
        """The job's step at which the best value was logged."""
        self.waited = 0
        """How many values in a row were no better."""

    def __call__(self, job: StoppableJob, metrics: Metrics) -> None:
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
