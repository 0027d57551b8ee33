"""The mean of a model's buffers over the logical ranks of a step, as servers make it: by samples; of whole numbers, the
maximum (docs/guides/training.md).

Must not know: which ranks there are, how tensors are summed over members.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.replicas.ordered_rows import OrderedRows, padded
from shardyard_worker.training.variables import Variable


class BufferMeans:
    """All buffers in two flat tensors on the CPU: floats, with the total weight after them, and whole numbers. `ranks`:
    the job's logical ranks, if they are added in their order; None: in any."""

    def __init__(self, buffers: Sequence[Variable], ranks: int | None = None) -> None:
        self._floats = [at for at, each in enumerate(buffers) if each.target.is_floating_point()]
        self._wholes = [at for at, each in enumerate(buffers) if not each.target.is_floating_point()]
        self._sizes = [each.target.numel() for each in buffers]
        self._buffers = buffers
        self._ranks = ranks
        self._ordered: OrderedRows | None = None
        self._rank = 0
        """How many of this member's ranks have been added."""
        self.renew()

    def renew(self, members: int = 1) -> None:
        """Takes other memory."""
        self._elements = sum(self._sizes[at] for at in self._floats) + 1
        self._sums = torch.zeros(padded(self._elements, members), dtype=torch.float64)
        self._most = torch.zeros(sum(self._sizes[at] for at in self._wholes), dtype=torch.int64)

    def join(self, collectives: Collectives) -> None:
        """From now on these members add up their buffers."""
        if self._ranks is not None:
            self.renew(collectives.size)
            self._ordered = OrderedRows(self._sums, collectives, self._ranks)
        self.clear()

    def clear(self) -> None:
        self._rank = 0
        self._sums.zero_()
        self._most.zero_()
        if self._ordered is not None:
            self._ordered.rows.zero_()

    @torch.no_grad()
    def add(self, found: Sequence[torch.Tensor | None], weight: float) -> None:
        """`found`: the buffers after a rank's forward; None: it has none to give."""
        rank, self._rank = self._rank, self._rank + 1
        if not found or found[0] is None or not weight:
            return
        whole = [each for each in found if each is not None]
        flat = [*(whole[at].detach().reshape(-1).to("cpu", torch.float64) for at in self._floats), torch.ones(1)]
        sums = self._sums if self._ordered is None else self._ordered.rows[rank]
        sums[: self._elements].add_(torch.cat(flat), alpha=weight)
        if self._wholes:
            numbers = [whole[at].detach().reshape(-1).to("cpu", torch.int64) for at in self._wholes]
            torch.maximum(self._most, torch.cat(numbers), out=self._most)

    def add_up(self, collectives: Collectives) -> None:
        """Adds up the buffers of all members."""
        most, ordered = collectives.most(self._most), self._ordered
        if ordered is None:
            collectives.wait(collectives.sum(self._sums))
        else:
            collectives.wait(ordered.begin(collectives))
            collectives.wait(ordered.add_up(collectives))
        collectives.wait(most)

    def means(self) -> list[torch.Tensor] | None:
        """The buffers of the step, which stay as they are when the next ones are added; None if no rank had any."""
        weight = float(self._sums[self._elements - 1]) if self._buffers else 0.0
        if not weight:
            return None
        found: dict[int, torch.Tensor] = {}
        floats, wholes = self._sums[: self._elements - 1] / weight, self._most.clone()
        for places, flat in ((self._floats, floats), (self._wholes, wholes)):
            found.update(zip(places, torch.split(flat, [self._sizes[at] for at in places]), strict=True))
        return [found[at].view(each.target.shape) for at, each in enumerate(self._buffers)]
