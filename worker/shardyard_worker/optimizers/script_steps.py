"""Steps that a script's own optimizer takes where the job's should take them.

Owns: the two mistakes that training without a job does not know: `job.prepare` is missing, or its result is not used.
Both would train in this process only, and nobody would see it. Invariant: no hook stays after the job. Must not know:
how a job's optimizer takes a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from shardyard.domain.errors import InvalidRequest
from shardyard_worker.optimizers.server_optimizer import ServerOptimizer

log = logging.getLogger("shardyard.worker")

_PREPARE = (
    "call model, optimizer = job.prepare(model, optimizer) before the first batch, and train with what it returns"
)


class UnpreparedSteps:
    """Counts the steps of all optimizers in this process, until the job has variables."""

    def __init__(self) -> None:
        self.count = 0
        self._hook = register_optimizer_step_post_hook(self._note)

    def close(self) -> None:
        """Counts no more. A second call does nothing."""
        self._hook.remove()

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if isinstance(optimizer, ServerOptimizer):  # of another job in this process
            return
        self.count += 1
        if self.count == 1:
            log.warning(
                "an optimizer takes a step before job.prepare: it trains in this process only, and pushes nothing; %s",
                _PREPARE,
            )

    def check(self, job: str) -> None:
        """A script leaves the job before it had variables. Raises InvalidRequest if it has trained."""
        if self.count:
            raise InvalidRequest(
                f"{self.count:,} optimizer steps in this process, and no job.prepare: nothing was trained in job"
                f" {job!r}",
                why="no gradient was pushed, so each worker has trained a model of its own",
                todo=_PREPARE,
            )
        log.warning("leaves job %r without job.prepare or job.register: nothing was trained in it", job)


def refuse_steps(optimizer: torch.optim.Optimizer, *, unless: Callable[[], bool] = lambda: False) -> RemovableHandle:
    """From now on the optimizer's own `step` raises InvalidRequest. `unless`: whether the job takes that step."""

    def refuse(*_: Any) -> None:
        if not unless():
            raise InvalidRequest(
                f"step() of the {type(optimizer).__name__} that was given to job.prepare",
                why="it would change this process's parameters only, and push nothing",
                todo="use the optimizer that job.prepare returned: model, optimizer = job.prepare(model, optimizer)",
            )

    # a scheduler that is built on it would warn that it is called before the optimizer's first step
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return optimizer.register_step_pre_hook(refuse)
