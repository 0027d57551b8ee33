"""Gradients as a few large tensors, which are summed over all members while the backward still computes the rest.

The parameters are cut into buckets in reverse order, since a backward computes the last gradients first (Li et al.,
PyTorch Distributed, VLDB 2020). The first bucket is small, so that the first sum begins early. A bucket is sent when
all its gradients are there, and buckets are sent in their order, the same on all members. The last one also carries the
step's facts, so it is sent with the step: a small model needs one sum a step.

If a script changes gradients after the backward, as when it clips them itself, what was sent is wrong. All members
learn of it with the step's facts, send their buckets again, and from then on send nothing before the step.

Owns: the buckets' memory, and which gradients are in it. Must not know: groups, steps, the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from shardyard.codecs.format.finiteness import scale, warm
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.group_store import GroupLost
from shardyard_worker.collectives.hooked_sum import Hook
from shardyard_worker.replicas.ordered_rows import padded

FIRST_BYTES: Final = 1 << 20
BUCKET_BYTES: Final = 25 << 20
"""As in DistributedDataParallel."""
_DTYPES: Final = {torch.float32: "float32", torch.float64: "float64"}


class Bucket:
    """`facts`: how many numbers it carries behind its gradients. `members`: between how many it can be cut evenly."""

    def __init__(
        self, indices: Sequence[int], targets: Sequence[torch.Tensor], facts: int = 0, members: int = 1
    ) -> None:
        self.indices = indices
        self._shapes = [targets[index].shape for index in indices]
        self._elements = sum(shape.numel() for shape in self._shapes)
        dtype, device = (targets[indices[0]].dtype, targets[indices[0]].device) if indices else (torch.float32, None)
        self.flat = torch.zeros(padded(self._elements + facts, members), dtype=dtype, device=device)
        self.gradients, self.facts = self.flat[: self._elements], self.flat[self._elements : self._elements + facts]
        self.size = self._elements + facts
        self.views = self.views_of(self.flat)
        self.missing = len(indices)
        self.work: Any = None

    def views_of(self, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        """The gradients in memory with this bucket's layout."""
        parts = torch.split(flat[: self._elements], [shape.numel() for shape in self._shapes])
        return {index: part.view(shape) for index, part, shape in zip(self.indices, parts, self._shapes, strict=True)}


class GradientBuckets:
    """Of a worker's parameters. `targets`: the parameters, in the model's order. `facts`: how many numbers are summed
    with them."""

    _narrow: Hook | None = None
    """Compresses gradients for torch's backend."""

    def __init__(
        self, targets: Sequence[torch.Tensor], facts: int, *, method: str = "", facts_apart: bool = False
    ) -> None:
        """`method`: how gradients are summed, in words, if their plain sums are not taken. `facts_apart`: no gradients
        are in the bucket with the facts."""
        warm()
        self._targets = targets
        self._method = method
        self._facts_apart = facts_apart
        self._fact_count = facts
        self._make()
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}
        """The gradients that are in buckets since the backward, and their versions then."""
        self._is_suspect = False
        self._weight: float | None = None
        """What `early_weight` has said when the first gradient of the backward came."""
        self._next = 0
        self._lost: GroupLost | None = None
        """Why what was to be sent within the backward was not."""
        self._has_sum = False
        """Whether the buckets have gradients of another of this worker's ranks."""
        self._divisor = 1.0
        """What gradients are divided by when they are put into buckets: the weight of the step before, which is most
        often that of this step."""
        self.overlaps = True
        """Whether gradients may be sent during the backward."""
        self.early_weight: Callable[[], float | None] = lambda: None
        """The weight of the work at hand, if its gradients are the last of this worker's step; else None."""
        self.collectives: Collectives | None = None
        self._hooks = [
            target.register_post_accumulate_grad_hook(partial(self._take_early, index))  # type: ignore[no-untyped-call]
            for index, target in enumerate(targets)
            if target.requires_grad  # a shard does not: what computes has another tensor
        ]

    @property
    def fingerprint(self) -> str:
        """What is summed, in words; the same in all members that can sum with each other."""
        sizes = ", ".join(f"{each.size} {each.flat.dtype} on {each.flat.device.type}" for each in self._buckets)
        return ", ".join(filter(None, [f"gradients of {len(self._targets)} parameters in {sizes}", self._method]))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def renew(self) -> None:
        """Takes other memory: an abandoned collective may still write this."""
        self._make()
        self.clear()

    def _make(self, members: int = 1) -> None:
        *first, last = cut(self._targets) or [[]]
        is_coarse = bool(last) and self._targets[last[0]].dtype not in (torch.float32, torch.float64)
        if is_coarse or self._facts_apart:
            first, last = [*first, last], []
        self._buckets = [Bucket(indices, self._targets, members=members) for indices in first]
        self._buckets.append(Bucket(last, self._targets, self._fact_count, members))
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.indices}

    @property
    def facts(self) -> torch.Tensor:
        """The facts of the step; after `await_sums` those of all members, added up."""
        return self._buckets[-1].facts

    @property
    def is_suspect(self) -> bool:
        """Whether the sums may not be finite because of this worker's gradients."""
        return self._is_suspect or bool(self._method)

    @property
    def has_begun(self) -> bool:
        """Whether buckets of a step were sent, and the step was not ended."""
        return self._next > 0

    def join(self, collectives: Collectives) -> None:
        """From now on these members sum."""
        self.collectives, self._divisor = collectives, 1.0
        self.clear()
        if collectives.size > 1:
            collectives.show(self._way(collectives))

    def _way(self, collectives: Collectives) -> str:
        """How gradients are summed, in words."""
        return collectives.way_of(self._gradients())

    def _gradients(self) -> list[torch.Tensor]:
        return [bucket.flat for bucket in self._buckets if bucket.indices]

    def leave(self) -> None:
        """These members sum no more."""
        self.collectives = None

    def clear(self) -> None:
        """Drops all gradients."""
        self._next, self._lost, self._has_sum, self._is_suspect = 0, None, False, False
        self._sent.clear()
        for bucket in self._buckets:
            bucket.missing, bucket.work = len(bucket.indices), None
        self.facts.zero_()

    # ---- during the backward

    def _take_early(self, index: int, target: torch.Tensor) -> None:
        if not self.overlaps or self.collectives is None or target.grad is None:
            return
        if not self._sent:
            self._weight = self.early_weight()
        weight = self._weight
        if weight is None or index in self._sent:  # a second backward: found when the step is taken
            return
        self._put(index, target.grad, weight)
        self._sent[index] = (target.grad, target.grad._version)
        bucket = self._bucket_of[index]
        bucket.missing -= 1
        try:
            while self._lost is None and self._next < len(self._buckets) - 1 and not self._buckets[self._next].missing:
                self._send_next()
        except GroupLost as error:  # the script's backward is not to end because of it
            self._lost = error

    def _send_next(self) -> None:
        assert self.collectives is not None
        bucket = self._buckets[self._next]
        bucket.work = self.collectives.sum(bucket.flat, self._narrow if bucket.indices else None)
        self._next += 1

    def _put(self, index: int, gradient: torch.Tensor, weight: float) -> None:
        view, share = self._bucket_of[index].views[index], weight / self._divisor
        gradient = gradient.detach()  # one of create_graph has a gradient of its own
        dtype = _DTYPES.get(gradient.dtype) if gradient.device.type == "cpu" and gradient.is_contiguous() else None
        if dtype is not None and gradient.dtype is view.dtype and not self._has_sum:
            self._is_suspect |= scale(gradient.data_ptr(), view.data_ptr(), view.numel(), share, dtype)
            return
        self._is_suspect = True
        if self._has_sum:
            view.add_(gradient, alpha=share)
        else:
            torch.mul(gradient, share, out=view)

    # ---- the step

    def changed(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether gradients that are in buckets have changed since, or others came."""
        return any(
            tensors[index] is not gradient or gradient._version != version
            for index, (gradient, version) in self._sent.items()
        )

    def add(self, tensors: Sequence[torch.Tensor | None], weight: float) -> None:
        """Adds gradients of one rank's work: those that are not in buckets since the backward."""
        for index, tensor in enumerate(tensors):
            if index in self._sent:
                continue
            if tensor is not None:
                self._put(index, tensor.to_dense() if tensor.is_sparse else tensor, weight)
            elif not self._has_sum:
                self._bucket_of[index].views[index].zero_()
        self._sent.clear()
        self._has_sum = True

    def send(self) -> None:
        """Begins to sum all buckets that are not under way. Raises GroupLost."""
        if self._lost is not None:
            raise self._lost
        while self._next < len(self._buckets):
            self._send_next()

    def await_sums(self) -> None:
        assert self.collectives is not None
        for bucket in self._buckets:
            self.collectives.wait(bucket.work)
            bucket.work = None

    def mean(self, weight: float) -> list[torch.Tensor]:
        """The sums, divided by the weight of all ranks, in the order of the parameters. They are views of the buckets,
        valid until the next step."""
        if weight != self._divisor:
            for bucket in self._buckets:
                bucket.gradients.mul_(self._divisor / weight)
            self._divisor = weight
        return [self._bucket_of[index].views[index] for index in range(len(self._targets))]

    def are_finite(self) -> bool:
        """Whether all sums are finite."""
        for bucket in self._buckets:
            found = bucket.gradients
            if not math.isfinite(float(found.sum())) and not bool(torch.isfinite(found).all()):
                return False
        return True


def cut(targets: Sequence[torch.Tensor]) -> list[list[int]]:
    """The parameters of each bucket, by their places: those with one dtype and device, from the last to the first."""
    found: list[list[int]] = []
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index in reversed(range(len(targets))):
        target = targets[index]
        key, nbytes = (target.dtype, target.device), target.numel() * target.element_size()
        bucket, held = open_.get(key, ([], 0))
        if bucket and held + nbytes > (FIRST_BYTES if bucket is found[0] else BUCKET_BYTES):
            bucket, held = [], 0
        if not bucket:
            found.append(bucket)
        bucket.append(index)
        open_[key] = bucket, held + nbytes
    return found
