"""The mean of a model's buffers over the logical ranks of a step, as servers make it: by samples; of whole numbers, the
maximum (docs/guides/training.md).

Must not know: which ranks there are, how tensors are summed over members.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardyard_worker.training.variables import Variable


class BufferMeans:
    """All buffers in two flat tensors on the CPU: `sums` of floats, with the total weight last, and `most` of whole
    numbers."""

    def __init__(self, buffers: Sequence[Variable]) -> None:
        self._floats = [at for at, each in enumerate(buffers) if each.target.is_floating_point()]
        self._wholes = [at for at, each in enumerate(buffers) if not each.target.is_floating_point()]
        self._buffers = buffers
        self.renew()

    def renew(self) -> None:
        """Takes other memory."""
        sizes = [each.target.numel() for each in self._buffers]
        self.sums = torch.zeros(sum(sizes[at] for at in self._floats) + 1, dtype=torch.float64)
        self.most = torch.zeros(sum(sizes[at] for at in self._wholes), dtype=torch.int64)

    def clear(self) -> None:
        self.sums.zero_()
        self.most.zero_()

    @torch.no_grad()
    def add(self, found: Sequence[torch.Tensor | None], weight: float) -> None:
        """`found`: the buffers after a rank's forward; None: it has none to give."""
        if not found or found[0] is None or not weight:
            return
        whole = [each for each in found if each is not None]
        flat = [*(whole[at].detach().reshape(-1).to("cpu", torch.float64) for at in self._floats), torch.ones(1)]
        self.sums.add_(torch.cat(flat), alpha=weight)
        if self._wholes:
            numbers = [whole[at].detach().reshape(-1).to("cpu", torch.int64) for at in self._wholes]
            torch.maximum(self.most, torch.cat(numbers), out=self.most)

    def means(self) -> list[torch.Tensor] | None:
        """The buffers of the step; None if no rank had any."""
        weight = float(self.sums[-1])
        if not weight:
            return None
        found: dict[int, torch.Tensor] = {}
        for places, flat in ((self._floats, self.sums[:-1] / weight), (self._wholes, self.most)):
            sizes = [self._buffers[at].target.numel() for at in places]
            found.update(zip(places, torch.split(flat, sizes), strict=True))
        return [found[at].view(each.target.shape) for at, each in enumerate(self._buffers)]
