"""Sends and receives between the stages of a pipeline, as torch.distributed.pipelining makes them.

torch's schedules use torch.distributed's default group. `StageGroup` is that group, over the collectives of this
worker's replica group.

Must not know: stages, schedules.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.default_group import DefaultGroup
from shardyard_worker.collectives.messages import Messages


class StageGroup(dist.ProcessGroup):
    """Of a worker with a stage. For the thread that trains. `inside`: the workers of this pipeline, at least two.
    `everyone`: the members of the replica group, which may have other pipelines beside it."""

    def __init__(self, inside: Collectives, everyone: Collectives) -> None:
        """Raises InvalidRequest if the script uses torch.distributed itself."""
        super().__init__(inside.place, inside.size)  # type: ignore[call-arg]
        self._gloo = inside.process_group
        self._shared = inside.shared_messages
        self._default = DefaultGroup(self, inside, everyone)
        self.messages = Messages(everyone)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        if self._shared is not None and self._shared.fits(tensors[0]):
            return self._shared.send(tensors[0], dst)
        return self.messages.send(self._gloo, tensors[0].detach().contiguous(), dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Any:
        if self._shared is not None and self._shared.fits(tensors[0]):
            return self._shared.receive(tensors[0], src)
        return self.messages.receive(self._gloo, tensors[0].detach(), src, tag)

    def flush(self) -> None:
        """Returns when all that was sent is on its way. Raises GroupLost."""
        if self._shared is not None:
            self._shared.flush()

    def end(self) -> None:
        """Ends all transfers, and gives torch.distributed back."""
        self._default.end()
        self.messages.end()
