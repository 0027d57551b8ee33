"""Learning rates as a function of the job's step (docs/ledger.md, rule B5).

A worker that computes two logical ranks of a step calls `scheduler.step()` twice in it; one that joins late has never
called it. Prepared by the job, a scheduler stands where the job stands whenever gradients are pushed, however often it
is called.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shardyard.ground.errors import InvalidRequest, UnsupportedOptimizer


class JobScheduler:
    """Wraps a `torch.optim.lr_scheduler` object that is stepped once a step of the job."""

    def __init__(self, scheduler: LRScheduler, optimizer: torch.optim.Optimizer, step: Callable[[], int]) -> None:
        """Raises UnsupportedOptimizer, InvalidRequest. `optimizer`: the one whose rates it must set."""
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UnsupportedOptimizer(
                "ReduceLROnPlateau cannot be a function of the job's step, since it looks at a metric",
                todo="use a scheduler without a metric, or set group['lr'] on all workers alike",
            )
        if scheduler.optimizer is not optimizer:
            raise InvalidRequest(
                f"{type(scheduler).__name__} was built on another optimizer than the one to prepare",
                why="it would set rates that nobody uses",
                todo="build the scheduler on the optimizer that is given to job.prepare with it",
            )
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._first = copy.deepcopy(scheduler.state_dict()), copy.deepcopy(_rates(optimizer))
        self._step = step
        self._at = 0
        self.follow()

    def step(self) -> None:
        """Takes the rates of the job's step. Calling it more than once a step changes nothing."""
        self.follow()

    def follow(self) -> None:
        """Brings the rates to the job's step, which may be an earlier one: a job can go back to a checkpoint."""
        if self._at > self._step():
            state, rates = copy.deepcopy(self._first)
            self._scheduler.load_state_dict(state)
            for group, first in zip(self._optimizer.param_groups, rates, strict=True):
                group.update(first)
            self._at = 0
        with warnings.catch_warnings():
            # the optimizer that steps is not the one that the scheduler was built on
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*optimizer.step.*")
            while self._at < self._step():
                self._scheduler.step()
                self._at += 1

    def get_last_lr(self) -> list[Any]:
        return list(self._scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        return dict(self._scheduler.state_dict())


def _rates(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What schedulers change, of each parameter group."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
