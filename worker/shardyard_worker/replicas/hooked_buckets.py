"""Gradient buckets that are compressed for the all-reduce, by DistributedDataParallel's communication hooks
(job.all_reduce).

bf16 and fp16 send two bytes an element. PowerSGD sends two narrow matrices for each gradient; what that loses is kept
and added to the next gradient. Source: T. Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization (2019), as torch has it. Must not know: how a group is formed.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from shardyard.domain.replica_groups import AllReduce
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.replicas.gradient_buckets import Bucket, GradientBuckets

_POLL_S: Final = 0.0005
_LONGEST: Final = datetime.timedelta(minutes=2)
"""Longer than the backend lets a collective last."""
_WHOLE_STEPS: Final = 2
"""Steps of a new group before PowerSGD compresses; with error feedback torch asks for two."""
_NARROW: Final = {AllReduce.BF16: default_hooks.bf16_compress_hook, AllReduce.FP16: default_hooks.fp16_compress_hook}


class _Work:
    """A hook's future, waited for as a collective."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self._future = future

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self, timeout: datetime.timedelta = _LONGEST) -> None:
        give_up = time.monotonic() + timeout.total_seconds()
        while not self._future.done():
            if time.monotonic() > give_up:
                raise RuntimeError("not yet")
            time.sleep(_POLL_S)
        self._future.value()  # raises what the collective has raised


class _GradBucket:
    """A bucket as hooks see it: torch's GradBucket cannot be made here."""

    def __init__(self, bucket: Bucket, index: int, *, is_last: bool) -> None:
        self._bucket = bucket
        self._index = index
        self._is_last = is_last

    def buffer(self) -> torch.Tensor:
        return self._bucket.gradients

    def gradients(self) -> list[torch.Tensor]:
        return list(self._bucket.views.values())

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last


class HookedBuckets(GradientBuckets):
    def __init__(self, targets: Sequence[torch.Tensor], facts: int, how: AllReduce, rank: int) -> None:
        self._how = how
        self._matrix_rank = rank
        self._hook: Callable[[Any], torch.futures.Future[Any]] | None = None
        self._kept: dict[int, torch.Tensor] = {}
        """What compression has kept back of each bucket's gradients."""
        super().__init__(targets, facts, facts_apart=True)
        self.overlaps = how is not AllReduce.POWERSGD  # one bucket is waited for before the next is sent

    @property
    def is_suspect(self) -> bool:
        return True

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint}, all-reduced in {self._how.value} of rank {self._matrix_rank}"

    def join(self, collectives: Collectives) -> None:
        super().join(collectives)
        group = collectives.process_group
        self._hook = None
        if group is None:  # nothing is sent
            return
        if self._how is AllReduce.POWERSGD:
            state = powerSGD_hook.PowerSGDState(
                group, matrix_approximation_rank=self._matrix_rank, start_powerSGD_iter=_WHOLE_STEPS
            )
            state.error_dict = self._kept  # a newcomer has kept nothing; all begin with the same random matrices
            self._hook = lambda bucket: powerSGD_hook.powerSGD_hook(state, bucket)
        else:
            narrow = _NARROW[self._how]
            self._hook = lambda bucket: narrow(group, bucket)

    def _way(self, collectives: Collectives) -> str:
        return f"in {self._how.value} over {collectives.backend}"

    def leave(self) -> None:
        super().leave()
        self._hook = None

    def _send_next(self) -> None:
        collectives, bucket = self.collectives, self._buckets[self._next]
        assert collectives is not None
        if self._hook is None or not bucket.indices:
            super()._send_next()
            return
        hook, is_last = self._hook, self._next == len(self._buckets) - 2
        seen = _GradBucket(bucket, self._next, is_last=is_last)
        bucket.work = collectives.begin(lambda: _Work(hook(seen)))
        self._next += 1
        if self._how is AllReduce.POWERSGD:
            # it begins further collectives when the first one ends, which must come in one order in all members
            collectives.wait(bucket.work)
            bucket.work = None

    def await_sums(self) -> None:
        super().await_sums()
        if self._hook is not None:  # hooks make means over the members
            assert self.collectives is not None
            for bucket in self._buckets[:-1]:
                bucket.gradients.mul_(self.collectives.size)
