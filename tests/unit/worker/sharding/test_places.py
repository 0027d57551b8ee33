"""A member whose place changes from group to group has the shard of its new place, whatever torch keeps of meshes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardyard.checkpoints.partition_file import VALUES
from shardyard_worker.exchange.variable_parts import VariablePart
from shardyard_worker.sharding.fully_sharded import cut
from shardyard_worker.sharding.shards import Shard

WHOLE = torch.arange(12.0)


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def part_of(place: int, size: int) -> torch.Tensor:
    """The shard that a member of a new group has."""
    dist.init_process_group("fake", store=FakeStore(), rank=place, world_size=size)
    try:
        model = torch.nn.Linear(1, len(WHOLE), bias=False)
        cut(model, [], dist.group.WORLD, reshard_after_forward=True)
        shard = Shard(model.weight)
        part = VariablePart(shard.region, {VALUES: shard.local.view(-1)})
        for begin in range(0, len(WHOLE), 5):
            part.put(VALUES, begin, WHOLE[begin : begin + 5].numpy())
        return shard.local.flatten().clone()
    finally:
        dist.destroy_process_group()


def test_a_member_that_has_another_place_in_a_group_of_the_same_size_has_another_shard() -> None:
    for place, size in ((1, 2), (1, 3), (0, 2), (1, 2)):
        assert part_of(place, size).tolist() == WHOLE.chunk(size)[place].tolist()
