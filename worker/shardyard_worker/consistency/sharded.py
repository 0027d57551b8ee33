"""Synchronous steps of a model whose variables are cut over the members of a group: job.strategy sharded and tensor
(docs/internals/ledger.md, rules D1 to D5, D7 and D8).

    sharded   each member computes the batches of its logical ranks. Parameters are gathered, and gradients summed and
              cut, module by module, while it computes: so all members compute equally often in a step. One with fewer
              ranks than others computes its last batch again, with weight 0.
    tensor    a group is one logical rank: its members read the same batches, and each computes a part of each layer.

Must not know: how a model is cut, how a step is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Rank
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_worker.consistency.spread import LOSS, SQUARE_NORM, WEIGHT, Gradients, SpreadStrategy, square_norm
from shardyard_worker.replicas.buffer_means import BufferMeans
from shardyard_worker.replicas.collectives import Collectives
from shardyard_worker.replicas.default_group import DefaultGroup
from shardyard_worker.sharding.sharded_model import FullyShardedModel, ShardedModel, TensorParallelModel
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput


class _CutStrategy(SpreadStrategy):
    """The base of both."""

    _model: ShardedModel

    def __init__(self, trainer: Trainer, model: ShardedModel) -> None:
        super().__init__(trainer, model)
        self._group: DefaultGroup | None = None
        self._own_loss = float("nan")

    def _begin_group(self, collectives: Collectives) -> None:
        if collectives.process_group is not None:
            self._group = DefaultGroup(collectives, collectives.process_group)
        self._model.begin(collectives.place, collectives.size, self._group)

    def _end_group(self) -> None:
        group, self._group = self._group, None
        self._model.end()
        if group is not None:
            group.end()

    def _found_buffers(self) -> list[torch.Tensor]:
        return [found for found in (each.found for each in self._model.replica.buffers) if found is not None]

    def _reported(self, sending: StepInput, gradients: Gradients) -> StepInput:
        own = gradients.tensors
        return replace(sending, tensors=[*own, *sending.tensors[len(own) :]])


class ShardedStrategy(_CutStrategy):
    """For job.strategy sharded."""

    publishes_to_change = True
    _model: FullyShardedModel

    def __init__(self, trainer: Trainer, model: FullyShardedModel) -> None:
        super().__init__(trainer, model)
        self._buffer_means = BufferMeans(model.replica.buffers)
        self._passes = 0
        """How often this member has computed in the step at hand."""
        self._weight = 0.0
        """Of the batches of this step, added up."""
        self._has_odd_loss = False
        """Whether the loss of one of them was not finite."""
        self._newest: tuple[Sequence[Any], Any] | None = None
        """The last batch."""

    def _begin_group(self, collectives: Collectives) -> None:
        super()._begin_group(collectives)
        self._buffer_means = BufferMeans(self._model.replica.buffers)
        self._forget_step()

    def _is_to_change(self, collectives: Collectives) -> bool:
        """Also if this worker is told to leave: then the others continue without it from what all have published."""
        return super()._is_to_change(collectives) or self._session.drain.asked

    @property
    def may_leave(self) -> bool:
        """Not before the members have published for that."""
        return self._collectives is None or self._is_to_leave

    def _forget_step(self) -> None:
        self._passes, self._weight = 0, 0.0
        self._model.drop_gradients()
        self._buffer_means.clear()

    def _run(self, inputs: Sequence[Any], target: Any) -> None:
        weight = self.weight_of_work()
        if weight is None:
            raise InvalidRequest(
                "job.train_step twice for one batch",
                why="a batch is one piece of work, and counts once",
                todo="call it once for each batch of job.batches",
            )
        self._newest = inputs, target
        self._passes += 1
        self._weight += weight
        self._own_loss = self._model.compute(inputs, target, weight)
        self._has_odd_loss = not math.isfinite(self._own_loss) or (self._has_odd_loss and self._passes > 1)

    def _not_finite(self, said: Sequence[float]) -> float:
        """The gradients are sums over all members; that of a batch is most often not finite because its loss is not."""
        return super()._not_finite(said) * (1 + self._has_odd_loss)

    def _collected(
        self, sending: StepInput | None, said: list[float], *, is_last: bool
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor] | None]:
        collectives = self._collectives
        assert collectives is not None
        buffers = self.replica.buffers
        if sending is not None and buffers:
            given = sending.tensors[len(self.replica.targets) :]
            found = self._found_buffers()
            kept = [None if one is None else own for one, own in zip(given, found, strict=True)]
            self._buffer_means.add(kept, sending.weight)
        if not is_last:
            return [], None
        self._compute_as_often(-(-self._session.logical_ranks // collectives.size))
        if buffers:
            self._buffer_means.add_up(collectives)
        gradients = self._model.gradients
        said[WEIGHT], said[SQUARE_NORM] = self._weight, square_norm(gradients)
        means = self._buffer_means.means() if buffers else None
        self._forget_step()
        return gradients, means

    def _compute_as_often(self, passes: int) -> None:
        """As the members with the most ranks. Buffers and the loss stay as they are."""
        while self._passes < passes:
            if self._newest is None:
                raise InvalidRequest(
                    "a step in which this worker has no batch, before its first",
                    why="all members gather the parameters for each other's batches, so each computes one",
                    todo="see why the batch is in quarantine (shardyard quarantine)",
                )
            self._passes += 1
            self._model.compute(*self._newest, 0.0)

    def _divisor(self, facts: Sequence[float]) -> float:
        return facts[WEIGHT]

    def _loss_of(self, facts: Sequence[float]) -> float:  # noqa: ARG002 - of its own batch, as with replicas
        return self._own_loss


class TensorStrategy(_CutStrategy):
    """For job.strategy tensor."""

    _model: TensorParallelModel

    def _ranks_at(self, group: ReplicaGroup, place: int) -> tuple[Rank, ...]:  # noqa: ARG002
        return (Rank(0),)

    def _run(self, inputs: Sequence[Any], target: Any) -> None:
        self._model.drop_gradients()
        self._own_loss = self._model.compute(inputs, target, 1.0)

    def _collected(
        self,
        sending: StepInput | None,
        said: list[float],
        *,
        is_last: bool,  # noqa: ARG002 - a worker has one rank
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor] | None]:
        collectives = self._collectives
        assert collectives is not None
        gradients = self._model.gradients
        if sending is None:
            return gradients, None
        is_first = collectives.place == 0
        # what is not cut is the same in all members
        own = [
            each for each, shard in zip(gradients, self._model.replica.shards, strict=True) if is_first or shard.is_cut
        ]
        said[SQUARE_NORM] = square_norm(own)
        if is_first:
            said[WEIGHT], said[LOSS] = sending.weight, self._own_loss
        return gradients, [each.clone() for each in self._found_buffers()]
