"""Workers slowed on purpose: how long a step of a worker sleeps, as a function of the seed, the worker and the step.

Two cores give no real parallelism. With sleeps of tens of milliseconds, a step's time is almost only its sleep, and the
comparison shows which worker waits for which. Must not know: what a step computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Slow = Literal["nobody", "last", "turns", "chance", "one"]


@dataclass(frozen=True, slots=True)
class Delays:
    """Each step sleeps `step_s`; one that is slow, `factor` times that. `slow`: all steps of the last of `workers`
    (last); of each step one worker's, by turns (turns); a `share` of each worker's, by chance (chance); or that of one
    worker in a `share` of the steps (one)."""

    step_s: float
    workers: int
    slow: Slow = "nobody"
    factor: float = 1.0
    share: float = 0.0

    def sleep_s(self, seed: int, worker: int, step: int) -> float:
        return self.step_s * (self.factor if self._is_slow(seed, worker, step) else 1.0)

    def _is_slow(self, seed: int, worker: int, step: int) -> bool:
        match self.slow:
            case "nobody":
                return False
            case "last":
                return worker == self.workers - 1
            case "turns":
                return step % self.workers == worker
            case "chance":
                return float(np.random.default_rng((seed, step, worker)).random()) < self.share
            case "one":
                random = np.random.default_rng((seed, step))
                return bool(random.random() < self.share and random.integers(self.workers) == worker)
