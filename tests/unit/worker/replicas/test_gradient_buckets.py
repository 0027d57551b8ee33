"""What members of a group compare before they sum."""

from __future__ import annotations

import torch

from shardyard_worker.replicas.gradient_buckets import GradientBuckets


def test_members_with_devices_of_another_kind_sum_something_else() -> None:
    """A worker on a GPU would call other collectives than one that shares memory."""

    def fingerprint_on(device: str) -> str:
        buckets = GradientBuckets([torch.nn.Parameter(torch.zeros(3, device=device))], 1)
        buckets.close()
        return buckets.fingerprint

    assert fingerprint_on("cpu") == "gradients of 1 parameters in 4 torch.float32 on cpu"
    assert fingerprint_on("meta") == "gradients of 1 parameters in 4 torch.float32 on meta"
