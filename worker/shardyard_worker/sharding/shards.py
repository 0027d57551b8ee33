"""This worker's shards of a job's variables, and the state of the optimizer that updates them.

The script's own optimizer runs on plain tensors that share the memory of the shards, so it must treat elements alike.

Owns: the conversion between shards and whole variables. Invariant: `values` and `state` gather, so all members call
them together. Must not know: how a model computes with shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardyard.domain.optimizers import OptimizerSpec
from shardyard_worker.exchange.buffers.tensor_types import widened
from shardyard_worker.optimizers.torch_state import VariableState
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

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The whole of which this is the shard's part. All members call it together."""
        if not self._is_dtensor:
            return part
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = self.cut.device_mesh, self.cut.placements, self.cut.shape, self.cut.stride()
        found = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
        return found.full_tensor()

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """The shard's part of a whole that all members have."""
        if not self._is_dtensor:
            return whole
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = self.cut.device_mesh, self.cut.placements
        return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


class ShardedReplica(Replica):
    """`parameters`: whole. `shards`: of them, in their order."""

    def __init__(
        self,
        parameters: Sequence[Variable],
        shards: Sequence[Shard],
        buffers: Sequence[Variable],
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
    ) -> None:
        local = [replace(each, target=shard.local) for each, shard in zip(parameters, shards, strict=True)]
        super().__init__(local, buffers, optimizer, spec)
        self.shards = shards
        self._whole = parameters

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
    def take_values(self) -> None:
        """The shards get their elements of the script's parameters, which have whole values."""
        for whole, shard in zip(self._whole, self.shards, strict=True):
            shard.local.copy_(shard.part(whole.target.detach()))

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

    def set_state(self, states: Mapping[int, VariableState]) -> None:
        """`states`: of whole variables."""
        self.take_values()
        self._set_own_state({at: self._part_of(at, state) for at, state in states.items()})

    def _part_of(self, at: int, state: VariableState) -> VariableState:
        found = {}
        for name, array in state.slots.items():
            whole = torch.from_numpy(array).view(self._whole[at].spec.shape)
            found[name] = self.shards[at].part(whole).reshape(-1).clone().numpy()
        return VariableState(state.count, found)

    def state(self) -> dict[int, VariableState]:
        found = self._own_state()
        for at, name, initial in self._slots():  # in this order in all members, whatever their shards have
            if at in found:
                part = found[at].slots.get(name)
                local = self.shards[at].local
                given = widened(torch.full_like(local, initial)) if part is None else torch.from_numpy(part)
                whole = self.shards[at].whole(given.view(local.shape)).contiguous().reshape(-1).numpy()
                found[at] = VariableState(found[at].count, {**found[at].slots, name: whole})
        return found

    def values(self) -> list[torch.Tensor]:
        whole = [shard.whole(shard.local.detach()) for shard in self.shards]
        buffers = [each.target for each in self.buffers]
        return [widened(each).detach().cpu().reshape(-1) for each in (*whole, *buffers)]
