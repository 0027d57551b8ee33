"""Sums in which every logical rank is added in the order of its number, so that the bits do not depend on how many
members compute the ranks (job.deterministic).

An all-reduce adds in an order that the number of members decides. Here each member gets its share of the elements of
all ranks (an all-to-all), adds them up, and gives the result to the others (an all-gather). A member with one rank
sends and receives as much as in a ring. Must not know: what is summed.
"""

from __future__ import annotations

from typing import Any

import torch

from shardyard_worker.collectives.collectives import Collectives


def padded(elements: int, members: int) -> int:
    """The elements of a tensor that has an equal share for each member."""
    return -(-elements // members) * members


class OrderedRows:
    """A row for each logical rank of this member. `whole` gets the sum of all members' rows; it has `padded` elements.
    `ranks`: the job's logical ranks."""

    def __init__(self, whole: torch.Tensor, collectives: Collectives, ranks: int) -> None:
        counts = [len(collectives.group.ranks_at(place, ranks)) for place in range(collectives.size)]
        share = whole.numel() // len(counts)
        self._counts = counts
        self.rows = whole.new_zeros(counts[collectives.place], whole.numel())
        self._whole = whole
        self._received = whole.new_zeros(sum(counts), share)
        self._added = whole.new_zeros(share)

    def begin(self, collectives: Collectives) -> Any:
        """Begins to send each member its share of this member's rows."""
        members, share = len(self._counts), self._added.numel()
        if members == 1:
            self._received = self.rows
            return None
        own = self.rows if len(self.rows) == 1 else self.rows.view(-1, members, share).transpose(0, 1).contiguous()
        splits = [count * share for count in self._counts]
        return collectives.exchange(self._received.view(-1), own.view(-1), splits, [len(self.rows) * share] * members)

    @torch.no_grad()
    def add_up(self, collectives: Collectives) -> Any:
        """After the first work has ended: adds up this member's share. Begins to give all members the whole."""
        self._added.copy_(self._received[0])
        for row in self._received[1:]:
            self._added.add_(row)
        if len(self._counts) == 1:
            self._whole.copy_(self._added)
        return collectives.gather(self._whole, self._added)
