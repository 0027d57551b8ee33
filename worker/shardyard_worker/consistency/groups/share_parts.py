"""Shares of a cut model whose variables are on the servers: job.strategy sharded and tensor with job.between
parameter_server. Each worker pushes its share of every gradient, and pulls its share of every value.

    sharded   each member computes a part of the batch of a logical rank. Parameters are gathered, and gradients summed
              and cut, module by module, while it computes.
    tensor    the members compute the batch together, each a part of each layer.

Must not know: how a model is cut, how a push travels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from shardyard.domain.errors import InvalidRequest
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.default_group import CollectiveGroup, DefaultGroup
from shardyard_worker.collectives.group_store import no_place
from shardyard_worker.collectives.messages import Messages
from shardyard_worker.consistency.groups.parts import ReplicaPart
from shardyard_worker.replicas.buffer_means import BufferMeans
from shardyard_worker.replicas.row_exchange import own_rows
from shardyard_worker.sharding.served_shares import ServedShares
from shardyard_worker.sharding.sharded_model import FullyShardedModel, ShardedModel, TensorParallelModel
from shardyard_worker.training.table_binding import TakenRows
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput

_SEEDS: Final = 1 << 62


class SharePart(ReplicaPart):
    """The base of both."""

    model: ShardedModel

    def __init__(self, trainer: Trainer, model: ShardedModel) -> None:
        super().__init__(trainer, model)
        self._group: DefaultGroup | None = None
        self._shares: ServedShares | None = None
        self._messages: Messages | None = None
        self._put: int | None = None
        """The version that the shards have. None: unknown."""

    def _begin(self, inside: Collectives) -> None:
        self._group = DefaultGroup(CollectiveGroup(inside), inside)
        self._messages = Messages(inside)
        self.model.begin(inside.place, inside.size, self._group)
        self._shares = self.model.served_shares(inside.place, inside.size)
        self._put = None
        self._trainer.use_place(inside.place, self._shares.variables)

    def _end(self) -> None:
        group, self._group, self._shares = self._group, None, None
        messages, self._messages = self._messages, None
        self.model.end()
        if group is not None:
            group.end()
        if messages is not None:
            messages.end()

    def put_values(self, version: int | None) -> None:
        """From the shares into the shards."""
        inside, shares = self.inside, self._shares
        if inside is None or shares is None:
            raise no_place()
        if shares.has_buffers or version is None or self._put != version:
            shares.put(lambda whole, own: inside.wait(inside.gather(whole, own)))
            self._put = version

    def run(self, inputs: Sequence[Any], target: Any, weight: float) -> float:
        if self.inside is None:
            raise no_place()
        return self._compute(self.inside, inputs, target, weight)

    @abstractmethod
    def _compute(self, inside: Collectives, inputs: Sequence[Any], target: Any, weight: float) -> float:
        """As `run`."""

    @property
    def messages(self) -> Messages:
        if self._messages is None:
            raise no_place()
        return self._messages

    def _given(self, sending: StepInput) -> list[torch.Tensor | None]:  # noqa: ARG002 - the script has none
        assert self._shares is not None
        return self._shares.given(self.model.gradients, self._buffers())

    def _buffers(self) -> Sequence[torch.Tensor | None]:
        """Those that the batch's forward has made."""
        return [each.found for each in self.model.replica.buffers]


class ShardPart(SharePart):
    """For job.strategy sharded."""

    model: FullyShardedModel
    _part = 1.0
    """Of the last batch's samples, that of this worker."""

    def _compute(self, inside: Collectives, inputs: Sequence[Any], target: Any, weight: float) -> float:
        (inputs, target), self._part = part_of_batch((inputs, target), inside.place, inside.size)
        # all members draw the same numbers for a batch, and each drops out other elements of its part
        torch.manual_seed(int(torch.randint(_SEEDS, ())) + inside.place)
        return self._part * self.model.compute(inputs, target, weight * self._part)

    def _buffers(self) -> Sequence[torch.Tensor | None]:
        """Their means over the parts of the batch."""
        buffers, inside = self.model.replica.buffers, self.inside
        if not buffers or inside is None:
            return super()._buffers()
        means = BufferMeans(buffers)
        means.add(super()._buffers(), self._part)
        means.add_up(inside)
        found = means.means() or ()
        return [each.to(buffer.target.dtype) for each, buffer in zip(found, buffers, strict=True)]


class TensorPart(SharePart):
    """For job.strategy tensor."""

    model: TensorParallelModel

    def _begin(self, inside: Collectives) -> None:
        """A model that was not compared with the whole one is, also in members that have compared it."""
        super()._begin(inside)
        lacks = torch.tensor([not self.model.was_compared], dtype=torch.int64)
        with self._session.wait_registry.over(lambda: "the other workers of this replica, to compare models"):
            inside.wait(inside.most(lacks))
        if lacks.any():
            self.model.compare_next()

    def _given_rows(self, sending: StepInput, inside: Collectives) -> TakenRows | None:
        """All members have the same gradients of rows."""
        return own_rows(sending.rows, self._trainer.partitions_at[inside.place])

    def _compute(self, inside: Collectives, inputs: Sequence[Any], target: Any, weight: float) -> float:
        if self.model.is_to_compare:
            self.model.gather_whole()
        loss = self.model.compute(inputs, target, weight)
        return loss if inside.place == 0 else 0.0


def part_of_batch(batch: Any, place: int, count: int) -> tuple[Any, float]:
    """The samples of the member at this place of so many, which are neighbours along the first dimension of each
    tensor, and their share of the batch. Raises InvalidRequest.

    >>> part_of_batch((torch.arange(5), "masked"), 1, 2)
    ((tensor([3, 4]), 'masked'), 0.4)
    """
    leaves, spec = pytree.tree_flatten(batch)
    sizes = {each.shape[0] if each.dim() else 0 for each in leaves if isinstance(each, torch.Tensor)}
    if len(sizes) != 1 or min(sizes) < count:
        raise InvalidRequest(
            f"job.train_step with tensors of {sorted(sizes)} samples, for {count} workers",
            why="each worker of a replica computes some samples of the batch: of each tensor that it is given, it takes"
            " a part along the first dimension",
            todo=f"give tensors whose first dimension is the batch, of {count} samples at least",
        )
    (samples,) = sizes
    parts = [torch.tensor_split(each, count)[place] if isinstance(each, torch.Tensor) else each for each in leaves]
    own = next(each for each in parts if isinstance(each, torch.Tensor)).shape[0]
    return pytree.tree_unflatten(parts, spec), own / samples
