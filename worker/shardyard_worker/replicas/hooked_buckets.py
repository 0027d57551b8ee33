"""Gradient buckets that are compressed for the all-reduce, by DistributedDataParallel's communication hooks
(job.all_reduce).

bf16 and fp16 send two bytes an element; inside a group on one machine nothing is compressed. PowerSGD sends two narrow
matrices for each gradient, always over torch's backend; what that loses is kept and added to the next gradient. Source:
T. Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization (2019), as torch has
it. Must not know: how a group is formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from shardyard.domain.replica_groups import AllReduce
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.hooked_sum import Hook, HookBucket, HookedSum
from shardyard_worker.replicas.gradient_buckets import GradientBuckets

_WHOLE_STEPS: Final = 2
"""Steps of a new group before PowerSGD compresses; with error feedback torch asks for two."""
_NARROW: Final[dict[AllReduce, Hook]] = {
    AllReduce.BF16: default_hooks.bf16_compress_hook,
    AllReduce.FP16: default_hooks.fp16_compress_hook,
}


class NarrowBuckets(GradientBuckets):
    """In bf16 or fp16."""

    def __init__(self, targets: Sequence[torch.Tensor], facts: int, how: AllReduce) -> None:
        self._narrow = _NARROW[how]
        super().__init__(targets, facts, method=f"in {how.value}", facts_apart=True)

    def _way(self, collectives: Collectives) -> str:
        return collectives.way_of(self._gradients(), self._method)


class PowerSGDBuckets(GradientBuckets):
    def __init__(self, targets: Sequence[torch.Tensor], facts: int, rank: int) -> None:
        self._rank = rank
        self._hook: Hook | None = None
        self._kept: dict[int, torch.Tensor] = {}
        """What compression has kept back of each bucket's gradients."""
        super().__init__(targets, facts, method=f"in {AllReduce.POWERSGD.value} of rank {rank}", facts_apart=True)
        self.overlaps = False  # one bucket is waited for before the next is sent

    def join(self, collectives: Collectives) -> None:
        super().join(collectives)
        if collectives.process_group is None:  # nothing is sent
            return
        state = powerSGD_hook.PowerSGDState(
            collectives.process_group, matrix_approximation_rank=self._rank, start_powerSGD_iter=_WHOLE_STEPS
        )
        state.error_dict = self._kept  # a newcomer has kept nothing; all begin with the same random matrices
        self._hook = lambda _, bucket: powerSGD_hook.powerSGD_hook(state, bucket)

    def _way(self, collectives: Collectives) -> str:
        return f"in {AllReduce.POWERSGD.value} over {collectives.backend}"

    def leave(self) -> None:
        super().leave()
        self._hook = None

    def _send_next(self) -> None:
        collectives, bucket, hook = self.collectives, self._buckets[self._next], self._hook
        assert collectives is not None
        if hook is None or not bucket.indices:
            super()._send_next()
            return
        is_last = self._next == len(self._buckets) - 2
        given = HookBucket(bucket.gradients, [*bucket.views.values()], self._next, is_last=is_last)
        work = collectives.begin(partial(HookedSum, hook, collectives.process_group, given))
        self._next += 1
        # it begins further collectives when the first one ends, which must come in one order in all members
        collectives.wait(work)
