"""Which gradient buckets a job has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardyard.config.settings import JobSettings
from shardyard.domain.replica_groups import AllReduce
from shardyard_worker.replicas.gradient_buckets import GradientBuckets
from shardyard_worker.replicas.hooked_buckets import NarrowBuckets, PowerSGDBuckets
from shardyard_worker.replicas.ordered_buckets import OrderedBuckets


def buckets_of(settings: JobSettings, targets: Sequence[torch.Tensor], facts: int, ranks: int) -> GradientBuckets:
    """`targets`: the parameters. `facts`: how many numbers are summed with them. `ranks`: the job's logical ranks."""
    if settings.deterministic:
        return OrderedBuckets(targets, facts, ranks)
    match settings.all_reduce:
        case AllReduce.WHOLE:
            return GradientBuckets(targets, facts)
        case AllReduce.POWERSGD:
            return PowerSGDBuckets(targets, facts, settings.powersgd_rank)
        case narrow:
            return NarrowBuckets(targets, facts, narrow)
