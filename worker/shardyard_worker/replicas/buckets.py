"""Which gradient buckets a job has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardyard.config.settings import JobSettings
from shardyard.domain.replica_groups import AllReduce
from shardyard_worker.replicas.gradient_buckets import GradientBuckets
from shardyard_worker.replicas.hooked_buckets import HookedBuckets
from shardyard_worker.replicas.ordered_buckets import OrderedBuckets


def buckets_of(settings: JobSettings, targets: Sequence[torch.Tensor], facts: int, ranks: int) -> GradientBuckets:
    """`targets`: the parameters. `facts`: how many numbers are summed with them. `ranks`: the job's logical ranks."""
    if settings.deterministic:
        return OrderedBuckets(targets, facts, ranks)
    if settings.all_reduce is not AllReduce.WHOLE:
        return HookedBuckets(targets, facts, settings.all_reduce, settings.powersgd_rank)
    return GradientBuckets(targets, facts)
