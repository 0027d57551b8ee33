"""A push of this worker's own of which nobody knows whether it arrived: its name is never given to another gradient."""

from __future__ import annotations

import pytest
import torch

from shardyard.domain import errors
from tests.support.alone import local_yard


def test_promise_1_the_name_of_a_push_that_failed_half_way_is_not_used_again(alone: None) -> None:
    with local_yard({"job.partitions": 2, "membership.coordinator_grace_ms": 100}) as (yard, connect), connect() as job:
        job.register({"a": torch.zeros(64), "b": torch.zeros(64)}, lr=1.0)
        job.push({"a": torch.ones(64), "b": torch.ones(64)})
        yard.network.leave("in-process:server-1")
        with pytest.raises(errors.ServerUnavailable):
            job.push({"a": torch.ones(64), "b": torch.ones(64)})
        with pytest.raises(errors.InvalidRequest, match="may have reached only some of the servers"):
            job.push({"a": torch.ones(64), "b": torch.ones(64)})
