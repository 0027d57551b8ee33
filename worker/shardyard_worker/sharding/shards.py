"""This worker's shards of a job's variables, and the state of the optimizer that updates them.

The script's own optimizer runs on plain tensors that share the memory of the shards, so it must treat elements alike.

Owns: which elements of a variable a shard has. Must not know: how a model computes with shards.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardyard.checkpoints.partition_file import VALUES
from shardyard.domain.optimizers import OptimizerSpec
from shardyard_worker.exchange.optimizer_exchange import GivenPart
from shardyard_worker.exchange.variable_parts import Region
from shardyard_worker.replicas.replica import Replica
from shardyard_worker.training.variables import Variable


class Shard:
    """Of one parameter. `cut`: as it is in the model that computes; a DTensor, or a plain tensor that is not cut."""

    def __init__(self, cut: Any) -> None:
        from torch.distributed.tensor import DTensor  # takes a second, and most jobs cut nothing

        self.cut = cut
        self._is_dtensor = isinstance(cut, DTensor)
        local = cut.to_local() if self._is_dtensor else cut
        self.local = torch.nn.Parameter(local.detach(), requires_grad=False)

    @property
    def is_cut(self) -> bool:
        """Whether members have different elements."""
        return self._is_dtensor and any(not placement.is_replicate() for placement in self.cut.placements)

    @property
    def gradient(self) -> torch.Tensor | None:
        """Of this shard's elements."""
        found: torch.Tensor | None = self.cut.grad
        if found is not None and self._is_dtensor:
            found = self.cut.grad.redistribute(placements=self.cut.placements).to_local()
        return found

    @property
    def region(self) -> Region:
        """The elements that this shard has."""
        if not self._is_dtensor:
            return Region.whole(self.cut.numel())
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape = tuple(self.cut.shape)
        local, offset = compute_local_shape_and_global_offset(shape, self.cut.device_mesh, self.cut.placements)
        (placement,) = self.cut.placements
        if placement.is_replicate():
            return Region.whole(self.cut.numel())
        begin = offset[placement.dim]
        return Region.along(shape, placement.dim, begin, begin + local[placement.dim])

    def rows(self, part: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Neighbouring elements of a whole of which this is the shard's part, flat, others in each member, and where
        they begin. All members call it together: a shard of columns becomes one of rows."""
        region = self.region
        if region.outer == 1:
            return region.begin * region.inner, part.reshape(-1)
        from torch.distributed.tensor import Shard as ShardOf
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, shape = self.cut.device_mesh, tuple(self.cut.shape)
        _, offset = compute_local_shape_and_global_offset(shape, mesh, [ShardOf(0)])
        return offset[0] * math.prod(shape[1:]), self.rows_of_columns(part).reshape(-1)

    @property
    def has_columns(self) -> bool:
        """Whether it is cut along another dimension than the first."""
        return self.is_cut and self.cut.placements[0].dim > 0

    def rows_of_columns(self, part: torch.Tensor) -> torch.Tensor:
        """Rows of a whole of which `part` is the shard's columns, others in each member. All members call it
        together."""
        from torch.distributed.tensor import Shard as ShardOf

        return self._moved(part, self.cut.placements, [ShardOf(0)])

    @torch.no_grad()
    def take_rows(self, rows: torch.Tensor) -> None:
        """The opposite: takes the values of its columns from the members' rows of the whole."""
        from torch.distributed.tensor import Shard as ShardOf

        self.local.copy_(self._moved(rows, [ShardOf(0)], self.cut.placements))

    def _moved(self, part: torch.Tensor, before: Sequence[Any], after: Sequence[Any]) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        mesh, shape, stride = self.cut.device_mesh, self.cut.shape, self.cut.stride()
        found = DTensor.from_local(part, mesh, before, run_check=False, shape=shape, stride=stride)
        local: torch.Tensor = found.redistribute(placements=after).to_local()
        return local


class ShardedReplica(Replica):
    """`parameters`: whole. `shards`: of them, in their order. `place`, `size`: of the group that has shards of the same
    wholes."""

    def __init__(
        self,
        parameters: Sequence[Variable],
        shards: Sequence[Shard],
        buffers: Sequence[Variable],
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        *,
        place: int = 0,
        size: int = 1,
    ) -> None:
        local = [replace(each, target=shard.local) for each, shard in zip(parameters, shards, strict=True)]
        super().__init__(local, buffers, optimizer, spec)
        self.shards = shards
        self._whole = parameters
        self._place = place
        self._size = size

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        with self._optimizer_of_shards():
            super().step(gradients)

    @contextlib.contextmanager
    def _optimizer_of_shards(self) -> Iterator[None]:
        """The optimizer updates the shards. Outside of a step it has the script's parameters."""
        groups = self._optimizer.param_groups
        own = [group["params"] for group in groups]
        shard_of = {each.target: shard.local for each, shard in zip(self._whole, self.shards, strict=True)}
        for group in groups:
            group["params"] = [shard_of.get(each, each) for each in group["params"]]
        try:
            yield
        finally:
            for group, parameters in zip(groups, own, strict=True):
                group["params"] = parameters

    @torch.no_grad()
    def take_over(self, shards: Sequence[Shard], buffers: Sequence[Variable]) -> None:
        """Continues with shards of the same sizes, of another group."""
        self.buffers = buffers
        for at, (old, new) in enumerate(zip(self.shards, shards, strict=True)):
            new.local.copy_(old.local)
            if old.local in self._optimizer.state:
                self._optimizer.state[new.local] = self._optimizer.state.pop(old.local)
            self.targets[at] = new.local
        self.parameters = [replace(each, target=at) for each, at in zip(self.parameters, self.targets, strict=True)]
        self.shards = shards

    # ---- copies

    def region(self, at: int) -> Region:
        return self.shards[at].region if at < len(self.shards) else super().region(at)

    @torch.no_grad()
    def given(self) -> dict[int, GivenPart]:
        """The elements of this worker's shards; and of what all members have, other ones in each. All members call it
        together."""
        return {at: self._rows_of(at, given) for at, given in super().given().items()}

    def _rows_of(self, at: int, given: GivenPart) -> GivenPart:
        if at >= len(self.shards) or not self.shards[at].is_cut:
            begin, end = (given.elements * each // self._size for each in (self._place, self._place + 1))
            found = {name: array[begin:end] for name, array in given.arrays.items()}
            return GivenPart(begin, end - begin, given.count, found)
        shard, begin, found = self.shards[at], 0, {}
        slots = self._slots_of(at) if given.count else ()
        for name, initial in ((VALUES, 0.0), *((slot.name, slot.initial) for slot in slots)):
            array = given.arrays.get(name)
            part = torch.full((given.elements,), initial) if array is None else torch.from_numpy(array)
            begin, rows = shard.rows(part.view(shard.local.shape))
            found[name] = rows.contiguous().numpy()
        return GivenPart(begin, found[VALUES].size, given.count, found)
