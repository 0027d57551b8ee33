"""Sends and receives between the stages of a pipeline, as torch.distributed.pipelining makes them.

torch's schedules use torch.distributed's default group. `StageGroup` is that group, over the collectives of this
worker's replica group.

Owns: the transfers under way. Must not know: stages, schedules.
"""

from __future__ import annotations

import datetime
from typing import Any, Final

import torch
import torch.distributed as dist

from shardyard_worker.replicas.collectives import Collectives
from shardyard_worker.replicas.default_group import DefaultGroup
from shardyard_worker.replicas.group_store import GroupLost

FOREVER: Final = datetime.timedelta(days=365)
"""A stage may compute for as long as it likes."""


class _Transfer:
    """A transfer under way. `into`: where a received tensor goes, if gloo cannot write it there."""

    def __init__(self, group: StageGroup, work: Any, tensor: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self._group = group
        self._work = work
        self._tensor = tensor  # gloo reads or writes it until the transfer has ended
        self._into = into

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:  # noqa: ARG002 - the group ends a wait
        try:
            self._work.wait(FOREVER)
        except RuntimeError as error:
            raise self._group.lost(error) from error
        if self._into is not None:
            self._into.copy_(self._tensor)
        return True


class StageGroup(dist.ProcessGroup):
    """Of the member at this place of a replica group of at least two. For the thread that trains."""

    def __init__(self, collectives: Collectives) -> None:
        """Raises InvalidRequest if the script uses torch.distributed itself."""
        super().__init__(collectives.place, collectives.size)  # type: ignore[call-arg]
        self._gloo = collectives.process_group
        self._default = DefaultGroup(collectives, self)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        sent = tensors[0].detach().contiguous()
        return self._begun(lambda: self._gloo.send([sent], dst, tag), sent)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Any:
        into = tensors[0].detach()
        if into.is_contiguous():
            return self._begun(lambda: self._gloo.recv([into], src, tag), into)
        received = torch.empty(into.shape, dtype=into.dtype)
        return self._begun(lambda: self._gloo.recv([received], src, tag), received, into)

    def _begun(self, begin: Any, tensor: torch.Tensor, into: torch.Tensor | None = None) -> _Transfer:
        try:
            return _Transfer(self, begin(), tensor, into)
        except RuntimeError as error:
            raise self.lost(error) from error

    def lost(self, error: RuntimeError) -> GroupLost:
        return self._default.lost(error)

    def end(self) -> None:
        """Ends all transfers, and gives torch.distributed back."""
        self._default.end()
