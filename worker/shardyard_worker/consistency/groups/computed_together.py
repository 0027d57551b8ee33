"""Batches that are computed by several workers together, a part of the model in each: the base of `spread`, of
`pushed_sync` and of `pushed_async`.

`run` computes gradients together with the other members of this worker's replica, and leaves each with those of its own
variables.

Owns: what was computed of the step at hand. Must not know: how gradients are computed, how a step is taken.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardyard.domain.errors import InvalidRequest
from shardyard.domain.push_names import PushName
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.group_store import GroupLost
from shardyard_worker.consistency.groups.group_strategy import GroupStrategy
from shardyard_worker.replicas.spread_model import SpreadModel
from shardyard_worker.session.session import Session
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput


class RunsTogether(ABC):
    """A mix-in of strategies whose workers compute each batch together."""

    weight_of_batch: Callable[[], float | None]
    """The share of the batch at hand in the samples of its work; None: no work is at hand."""
    needs_feed = False
    """Whether batches must come from job.batches."""
    _session: Session
    _trainer: Trainer
    _model: SpreadModel
    """What this worker has a part of."""
    _lost: GroupLost | None = None
    """The computation has met the loss of a member."""
    _passes = 0
    """How many batches were computed in the step at hand."""
    _accumulate = 1
    """How many a rank has in a step."""
    _weight = 0.0
    """Of these, added up."""
    _has_run = False
    """Whether gradients of the work at hand were computed."""
    _own_loss = 0.0
    """Of the last batch: what this member has computed of it."""
    _has_odd_loss = False
    """Whether that of a batch of this step is not finite."""
    loss = float("nan")
    """Of the last batch; NaN if it did not count."""

    @property
    @abstractmethod
    def _inside(self) -> Collectives | None:
        """Those of this worker's replica. None: it has no place."""

    @property
    @abstractmethod
    def _at_hand(self) -> str:
        """The work whose gradients are computed, in words."""

    def _weight_at_hand(self) -> float | None:
        """The weight of the batch at hand in the gradients of its work; None: no work is at hand."""
        return self.weight_of_batch()

    def run(self, inputs: Sequence[Any], target: Any, accumulate: int) -> None:
        """Computes the gradients of a batch with the other members. A rank's part of a step has `accumulate` batches.
        Raises InvalidRequest, UnsupportedModel. If a member is lost, `contribute` says so."""
        at_hand, weight = self._at_hand, self._weight_at_hand()
        if self._inside is None:
            raise InvalidRequest("job.train_step without a place in the group", todo="call it for each batch")
        if weight is None:
            raise InvalidRequest(
                "job.train_step twice for one batch",
                why="a batch is one piece of work, and counts once",
                todo="call it once for each batch of job.batches",
            )
        self._model.free()
        self._accumulate = accumulate
        if self._lost is None:
            try:
                with self._session.wait_registry.over(lambda: f"{at_hand} of the other members"):
                    self._own_loss = self._run(inputs, target, weight)
            except GroupLost as error:
                self._lost = error
        self._passes += 1
        self._weight += weight
        self._has_odd_loss |= not math.isfinite(self._own_loss)
        self._has_run = True

    @abstractmethod
    def _run(self, inputs: Sequence[Any], target: Any, weight: float) -> float:
        """Adds the gradients of a batch, times `weight`, to those of this worker's parameters. Returns what it has
        computed of the batch's loss. Raises as `run` does, and GroupLost."""

    def loss_before_step(self) -> float:
        """Of the last batch, after which others follow in the step; NaN if a member is lost."""
        inside, at_hand = self._inside, self._at_hand
        if inside is not None and self._lost is None:
            try:
                with self._session.wait_registry.over(lambda: f"{at_hand} of the other members"):
                    return self._loss_of_batch(inside)
            except GroupLost as error:
                self._lost = error
        return float("nan")

    def _loss_of_batch(self, inside: Collectives) -> float:
        """Of a batch after which this replica computes another one for the step."""
        found = torch.tensor([self._own_loss], dtype=torch.float64)
        inside.wait(inside.sum(found))
        return float(found)

    def _check_has_run(self) -> None:
        """Raises InvalidRequest if no gradients of the work at hand were computed."""
        if not self._has_run:
            raise InvalidRequest(
                f"optimizer.step() in a job whose job.strategy is {self._model.strategy.value}",
                why="a worker has the gradients of its own variables only, after it has computed with the others",
                todo="call job.train_step(x, y), which computes the loss and takes the step",
            )

    def _leave_step(self) -> None:
        """The group is left, and the step at hand with it."""
        self._lost, self._has_run = None, False
        self._forget_step()

    def _forget_step(self) -> None:
        """Nothing was computed of the step at hand."""
        self._passes, self._weight, self._has_odd_loss = 0, 0.0, False
        self._model.drop_gradients()
        if self._trainer.link.tables is not None:
            self._trainer.link.tables.clear()


class ComputedTogether(RunsTogether, GroupStrategy):
    """Of synchronous steps."""

    @property
    def _at_hand(self) -> str:
        return f"step {self.versions.current}"

    def contribute(self, name: PushName | None, sending: StepInput | None, upcoming: Upcoming | None = None) -> None:
        if sending is not None:
            self._check_has_run()
        self.loss = float("nan")
        try:
            super().contribute(name, sending, upcoming)
        finally:
            self._has_run = False

    def drop(self) -> None:
        super().drop()
        self._forget_step()

    def close(self) -> None:
        super().close()
        self._model.close()


def square_norm(gradients: Sequence[torch.Tensor | None]) -> float:
    norms = [float(torch.linalg.vector_norm(each)) for each in gradients if each is not None]
    return sum([norm * norm for norm in norms])
