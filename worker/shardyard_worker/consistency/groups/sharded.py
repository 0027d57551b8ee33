"""Synchronous steps of a model whose variables are cut over the members of a replica: job.strategy sharded and tensor
(docs/internals/ledger.md, rules D1 to D5, D7 and D8).

    sharded   each member computes the batches of its logical ranks. Parameters are gathered, and gradients summed and
              cut, module by module, while it computes: so all members compute equally often in a step. One with fewer
              ranks than others computes its last batch again, with weight 0.
    tensor    the members of a replica compute the batches of its logical ranks together, each a part of each layer.

Must not know: how a model is cut, how a step is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardyard.domain.errors import InvalidRequest
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.default_group import CollectiveGroup, DefaultGroup
from shardyard_worker.consistency.groups.spread import SpreadStrategy
from shardyard_worker.replicas.side_by_side import SideBySide
from shardyard_worker.sharding.sharded_model import FullyShardedModel, ShardedModel, TensorParallelModel
from shardyard_worker.training.trainer import Trainer


class _CutStrategy(SpreadStrategy):
    """The base of both."""

    _model: ShardedModel

    def __init__(self, trainer: Trainer, model: ShardedModel) -> None:
        super().__init__(trainer, model)
        self._group: DefaultGroup | None = None

    def _begin_group(self, members: SideBySide) -> None:
        inside = members.inside
        if inside.process_group is not None:
            self._group = DefaultGroup(CollectiveGroup(inside), inside)
        self._model.begin(inside.place, inside.size, self._group)

    def _end_group(self) -> None:
        group, self._group = self._group, None
        self._model.end()
        if group is not None:
            group.end()


class ShardedStrategy(_CutStrategy):
    """For job.strategy sharded."""

    computes_alone = True
    _model: FullyShardedModel

    def __init__(self, trainer: Trainer, model: FullyShardedModel) -> None:
        super().__init__(trainer, model)
        self._newest: tuple[Sequence[Any], Any] | None = None
        """The last batch."""

    @property
    def publishes_to_change(self) -> bool:
        return self._settings.workers_per_replica is None

    def _is_to_change(self, collectives: Collectives) -> bool:
        """Also if this worker is told to leave: then the others continue without it from what all have published."""
        return super()._is_to_change(collectives) or (self.publishes_to_change and self._session.drain.asked)

    @property
    def may_leave(self) -> bool:
        """Not before the members have published for that."""
        return not self.publishes_to_change or self._collectives is None or self._is_to_leave

    def _run(self, inputs: Sequence[Any], target: Any, weight: float) -> float:
        self._newest = inputs, target
        return self._model.compute(inputs, target, weight)

    def _before_sums(self, collectives: Collectives) -> None:
        """Computes as often as the members with the most ranks. Buffers and the loss stay as they are."""
        for _ in range(self._passes, -(-self._session.logical_ranks // collectives.size) * self._accumulate):
            if self._newest is None:
                raise InvalidRequest(
                    "a step in which this worker has no batch, before its first",
                    why="all members gather the parameters for each other's batches, so each computes one",
                    todo="see why the batch is in quarantine (shardyard quarantined)",
                )
            self._model.compute(*self._newest, 0.0)

    def _loss_of_batch(self, inside: Collectives) -> float:  # noqa: ARG002 - of its own, as with replicas
        return self._own_loss

    def _loss_in(self, facts: Sequence[float], members: SideBySide) -> float:  # noqa: ARG002
        return self._own_loss


class TensorStrategy(_CutStrategy):
    """For job.strategy tensor."""

    needs_feed = True
    _model: TensorParallelModel

    def _run(self, inputs: Sequence[Any], target: Any, weight: float) -> float:
        assert self._members is not None
        loss = self._model.compute(inputs, target, weight)
        return loss if self._members.inside.place == 0 else 0.0

    def _apart(self, gradients: Sequence[torch.Tensor | None], members: SideBySide) -> Sequence[torch.Tensor | None]:
        """What is not cut is the same in all members of a replica."""
        is_first = members.inside.place == 0
        shards = self._model.replica.shards
        return [each for each, shard in zip(gradients, shards, strict=True) if is_first or shard.is_cut]
