"""Gradient buckets whose sums do not depend on the number of members (job.deterministic).

The gradients of each logical rank stay apart, and are added in the order of the ranks (`ordered_rows`). Must not know:
how a group is formed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.replicas.gradient_buckets import Bucket, GradientBuckets
from shardyard_worker.replicas.ordered_rows import OrderedRows


class OrderedBuckets(GradientBuckets):
    """`ranks`: the job's logical ranks. The memory of this member's ranks is that of as many models."""

    def __init__(self, targets: Sequence[torch.Tensor], facts: int, ranks: int) -> None:
        self._ranks = ranks
        self._rank = 0
        """How many of this member's ranks have been added."""
        self._rows: list[tuple[Bucket, OrderedRows, list[dict[int, torch.Tensor]]]] = []
        super().__init__(targets, facts, method=f"in the order of {ranks} ranks")

    def join(self, collectives: Collectives) -> None:
        self._make(collectives.size)
        self._rows = []
        for bucket in self._buckets:
            ordered = OrderedRows(bucket.flat, collectives, self._ranks)
            self._rows.append((bucket, ordered, [bucket.views_of(row) for row in ordered.rows]))
        self._views = {index: views for bucket, _, views in self._rows for index in bucket.indices}
        super().join(collectives)

    def _way(self, collectives: Collectives) -> str:
        return f"in the order of the ranks over {collectives.backend}"

    def clear(self) -> None:
        super().clear()
        self._rank = 0

    def _put(self, index: int, gradient: torch.Tensor, weight: float) -> None:
        torch.mul(gradient.detach(), weight, out=self._views[index][self._rank][index])

    def add(self, tensors: Sequence[torch.Tensor | None], weight: float) -> None:
        for index, tensor in enumerate(tensors):
            if tensor is None:
                self._views[index][self._rank][index].zero_()
            elif index not in self._sent:
                self._put(index, tensor.to_dense() if tensor.is_sparse else tensor, weight)
        self._sent.clear()
        self._rank += 1

    def _send_next(self) -> None:
        assert self.collectives is not None
        bucket, ordered, _ = self._rows[self._next]
        if bucket is self._buckets[-1]:
            facts = bucket.flat.numel() - bucket.facts.storage_offset()
            ordered.rows[:, -facts:] = 0
            ordered.rows[0, bucket.facts.storage_offset() :][: bucket.facts.numel()] = bucket.facts
        bucket.work = ordered.begin(self.collectives)
        self._next += 1

    def await_sums(self) -> None:
        collectives = self.collectives
        assert collectives is not None
        for bucket, ordered, _ in self._rows:
            collectives.wait(bucket.work)
            bucket.work = ordered.add_up(collectives)
        super().await_sums()

    def mean(self, weight: float) -> list[torch.Tensor]:
        self._divisor = 1.0  # what other weights there were before must not change the bits
        return super().mean(weight)
