"""`job.train_step`: forward, loss, backward and optimizer step of one batch.

Owns: the passes that were added up since the last step. Must not know: what `optimizer.step()` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardyard.domain.errors import InvalidRequest
from shardyard_worker.consistency.groups.computed_together import RunsTogether
from shardyard_worker.consistency.groups.pushed_async import PushedAsync
from shardyard_worker.consistency.groups.sharded import ShardedStrategy
from shardyard_worker.job.prepare import JobOptimizer
from shardyard_worker.job.training_loop import TrainingLoop
from shardyard_worker.optimizers.lr_schedule import JobScheduler
from shardyard_worker.optimizers.server_optimizer import ServerOptimizer
from shardyard_worker.pipeline.schedules import check_loss
from shardyard_worker.replicas.spread_model import Loss
from shardyard_worker.session.interrupts import INTERRUPTS


def check_loss_function(loss: Loss | None) -> None:
    """Raises InvalidRequest."""
    if loss is not None and not callable(loss):
        raise InvalidRequest(
            f"job.prepare(..., loss={type(loss).__name__})",
            why="the loss is a function of the model's output and the target",
            todo="give for example loss=torch.nn.functional.cross_entropy",
        )


class TrainStep:
    """For the model and the optimizer of `job.prepare`. `loss` None: the script did not give one."""

    def __init__(
        self,
        loop: TrainingLoop,
        model: torch.nn.Module,
        optimizer: JobOptimizer,
        schedule: JobScheduler | None,
        loss: Loss | None,
    ) -> None:
        self._loop = loop
        self._model = model
        self._optimizer = optimizer
        self._schedule = schedule
        self._loss = loss
        self._passes = 0
        """Backward passes since the last step."""
        self._is_checked = False

    def take(self, batch: Sequence[Any], *, is_due: bool, accumulate: int) -> torch.Tensor:
        """`is_due`: the optimizer steps after this batch. `accumulate`: of how many batches a step's gradient is the
        mean. Returns the detached loss. Raises InvalidRequest."""
        if self._loss is None:
            raise InvalidRequest(
                "job.train_step in a job without a loss",
                todo="give the loss to job.prepare: model, optimizer = job.prepare(model, optimizer, loss=f)",
            )
        if len(batch) < 2:
            raise InvalidRequest(
                f"job.train_step of {len(batch)} values",
                why="the last value is the target, and those before it are the model's inputs",
                todo="call job.train_step(x, y), for loss(model(x), y)",
            )
        *inputs, target = batch
        if isinstance(self._loop.strategy, RunsTogether):
            return self._take_together(self._loop.strategy, inputs, target, is_due=is_due, accumulate=accumulate)
        loss = self._loss(self._model(*inputs), target)
        check_loss(loss)
        torch.clear_autocast_cache()  # it has parameters from before the step
        with torch.autocast(loss.device.type, enabled=False):  # a script's autocast is for the forward
            part, scaler = loss / accumulate if accumulate > 1 else loss, self._loop.scaler
            (part if scaler is None else scaler.scale(part)).backward()
            self._passes += 1
            if is_due:
                self._step(accumulate)
        return loss.detach()

    def _take_together(
        self, strategy: RunsTogether, inputs: Sequence[Any], target: Any, *, is_due: bool, accumulate: int
    ) -> torch.Tensor:
        """With the other members, each of which has a part of the variables."""
        self._check_source(strategy)
        with INTERRUPTS:
            strategy.run(inputs, target, accumulate)
            if not is_due:
                return torch.tensor(strategy.loss_before_step())
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        return torch.tensor(strategy.loss)  # the strategy drops gradients, after the last of this worker's ranks

    def _check_source(self, strategy: RunsTogether) -> None:
        """Raises InvalidRequest if the members may not come to this batch together."""
        name = self._loop.session.job_settings.strategy.value
        if self._loop.need_trainer().accumulates_by_hand:
            raise InvalidRequest(
                f"job.no_sync in a job whose job.strategy is {name}",
                why="all members compute equally often in a step, and must know how often",
                todo="give job.batches accumulate, the number of batches in a step",
            )
        if strategy.needs_feed and self._loop.feed is None:
            raise InvalidRequest(
                f"job.train_step outside of job.batches in a job whose job.strategy is {name}",
                why="all workers compute the same batch, with the same random numbers",
                todo="go through the data by job.batches",
            )
        if isinstance(strategy, PushedAsync) and self._loop.sampled is not None:
            raise InvalidRequest(
                f"job.sampler in an asynchronous job whose job.strategy is {name}",
                why="one worker of a replica leases the samples, and tells the others which they are",
                todo="go through the data by job.batches, or set job.consistency.mode to sync",
            )
        if self._loop.sampled is None:
            return
        if isinstance(strategy, ShardedStrategy) or self._loop.session.logical_ranks > 1:
            raise InvalidRequest(
                f"job.sampler in a job whose job.strategy is {name}, with {self._loop.session.logical_ranks} ranks",
                why="a worker may get a batch that does not count, and its gradients are added up with those of others",
                todo="go through the data by job.batches",
            )

    def _step(self, accumulate: int) -> None:
        optimizer, scaler = self._optimizer, self._loop.scaler
        passes, self._passes = self._passes, 0
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        if isinstance(optimizer, ServerOptimizer):
            gradients += optimizer.row_gradients() or []
        if not self._is_checked and not gradients:
            check_loss(torch.zeros(()))
        self._is_checked = True
        if passes != accumulate:  # at the end of an epoch, and in job.no_sync()
            torch._foreach_mul_(gradients, accumulate / passes)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if self._schedule is not None:
            self._schedule.step()
        optimizer.zero_grad()
