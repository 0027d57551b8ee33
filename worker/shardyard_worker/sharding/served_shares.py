"""A cut model's variables between servers and shards, where the servers have them (job.between parameter_server).

A worker exchanges a share of each variable with the servers: some of its rows. A shard of rows is that share. A shard
of columns becomes one of rows, and back. Of what all members have, each exchanges other rows, and the members put
together what they have pulled.

Owns: the memory of shares that are no shards. Must not know: groups, steps, servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from shardyard.domain.layout.shares import share_of, spec_of_share
from shardyard_worker.exchange.buffers.tensor_types import TORCH_DTYPES
from shardyard_worker.sharding.shards import Shard
from shardyard_worker.training.variables import Variable

_ALIGN_BYTES: Final = 8
Gather = Callable[[torch.Tensor, torch.Tensor], None]
"""`gather(whole, own)` puts the members' own tensors into `whole`, one after another."""


class ServedShares:
    """Of the member at `place` of `count`. `parameters`: whole, which have `shards`; `buffers` follow them among the
    job's variables, and are in all members."""

    def __init__(
        self,
        parameters: Sequence[Variable],
        shards: Sequence[Shard],
        buffers: Sequence[Variable],
        place: int,
        count: int,
    ) -> None:
        self._whole = [*parameters, *buffers]
        self._shards = shards
        self._place = place
        self._count = count
        self._columns = [at for at, shard in enumerate(shards) if shard.has_columns]
        self._alike = [at for at in range(len(self._whole)) if at >= len(shards) or not shards[at].is_cut]
        """The variables that all members have."""
        self._begins, nbytes = dict[int, int](), 0
        for at in self._alike:
            self._begins[at] = nbytes
            begin, end = self._share(at, 0)
            nbytes += -(-(end - begin) * self._whole[at].target.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        self._gathered = torch.zeros(count, nbytes, dtype=torch.uint8)
        self._own = torch.zeros(nbytes, dtype=torch.uint8)
        self.variables = [self._variable(at) for at in range(len(self._whole))]
        """The shares, which pulls write to."""

    @property
    def has_buffers(self) -> bool:
        return len(self._whole) > len(self._shards)

    def _share(self, at: int, place: int) -> tuple[int, int]:
        return share_of(self._whole[at].spec, place, self._count)

    def _variable(self, at: int) -> Variable:
        spec = spec_of_share(self._whole[at].spec, self._place, self._count)
        if at in self._begins:
            return Variable(spec, self._view(self._own, at, self._place).view(spec.shape))
        if at in self._columns:
            return Variable(spec, torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype]))
        return Variable(spec, self._shards[at].local.detach())

    def _view(self, memory: torch.Tensor, at: int, place: int) -> torch.Tensor:
        """The share of that member, flat, of a variable that all have."""
        target, (begin, end) = self._whole[at].target, self._share(at, place)
        start = self._begins[at]
        return memory[start : start + (end - begin) * target.itemsize].view(target.dtype)

    # ---- from the servers

    @torch.no_grad()
    def put(self, gather: Gather) -> None:
        """Gives the shards, and the buffers, the values of the shares. All members call it together."""
        for at in self._columns:
            self._shards[at].take_rows(self.variables[at].target)
        if not self._own.numel():
            return
        gather(self._gathered.view(-1), self._own)
        for at in self._alike:
            target = self._target(at)
            shares = [self._view(gathered, at, place) for place, gathered in enumerate(self._gathered)]
            target.copy_(torch.cat(shares).view(target.shape))

    def _target(self, at: int) -> torch.Tensor:
        if at < len(self._shards):
            return self._shards[at].local
        self._whole[at].put_back()
        return self._whole[at].target

    # ---- to the servers

    def given(
        self, gradients: Sequence[torch.Tensor | None], buffers: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The shares of the gradients of shards, and of buffers. All members call it together."""
        found = [*gradients, *buffers]
        return [None if each is None else self._given(at, each) for at, each in enumerate(found)]

    def _given(self, at: int, found: torch.Tensor) -> torch.Tensor:
        shape: Any = self.variables[at].spec.shape
        if at in self._columns:
            return self._shards[at].rows_of_columns(found)
        if at in self._begins:
            begin, end = self._share(at, self._place)
            return found.detach().reshape(-1)[begin:end].view(shape)
        return found
