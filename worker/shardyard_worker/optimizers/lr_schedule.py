"""Learning rates as a function of the job's step (docs/internals/ledger.md, rule B5).

A worker that computes two logical ranks of a step calls `scheduler.step()` twice in it, and one that joins late has
not called it before. So the job sets a prepared scheduler to the job's step whenever gradients are pushed, however
often the script has called it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shardyard.domain.errors import InvalidRequest, UnsupportedOptimizer


@dataclass(frozen=True)
class _SchedulerState:
    """The scheduler's state after `at` steps, and what it has set in each parameter group."""

    at: int
    state: dict[str, Any]
    rates: list[dict[str, Any]]


class JobScheduler:
    """Wraps a `torch.optim.lr_scheduler` object that takes one step for each step of the job."""

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
        self._step = step
        self._at = 0
        self._first = self._kept = self._state()
        self.follow()

    def step(self) -> None:
        """Sets the rates of the job's step. Calling it more than once a step changes nothing."""
        self.follow()

    def follow(self) -> None:
        """Sets the rates of the job's step, which is lower than before if the job went back to a checkpoint."""
        if self._at > self._step():
            before = copy.deepcopy(self._kept if self._kept.at <= self._step() else self._first)
            self._scheduler.load_state_dict(before.state)
            for group, rates in zip(self._optimizer.param_groups, before.rates, strict=True):
                group.update(rates)
            self._at = before.at
        with warnings.catch_warnings():
            # torch warns because the stepping optimizer is not the one that the scheduler was built on
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*optimizer.step.*")
            while self._at < self._step():
                self._scheduler.step()
                self._at += 1

    def keep(self) -> None:
        """Saves the current state, to which it can go back several times: another logical rank begins here too."""
        if self._kept.at != self._at:
            self._kept = self._state()

    def _state(self) -> _SchedulerState:
        rates = copy.deepcopy(_rates(self._optimizer))
        return _SchedulerState(self._at, copy.deepcopy(self._scheduler.state_dict()), rates)

    def get_last_lr(self) -> list[Any]:
        return list(self._scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        return dict(self._scheduler.state_dict())


def _rates(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The values of each parameter group that schedulers change."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
