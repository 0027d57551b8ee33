"""The workers of a sharded replica whose variables are on servers compute parts of one batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shardyard.domain.errors import InvalidRequest
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.consistency.groups.share_parts import ShardPart, part_of_batch


def test_parts_are_neighbours_and_have_all_samples() -> None:
    batch = ((torch.arange(7), {"mask": torch.arange(14).view(7, 2)}), 3)
    found = [part_of_batch(batch, place, 3) for place in range(3)]
    assert torch.cat([index for ((index, _), _), _ in found]).equal(torch.arange(7))
    assert [number for (_, number), _ in found] == [3] * 3
    assert [each["mask"].shape[0] for ((_, each), _), _ in found] == [3, 2, 2]
    assert [share for _, share in found] == [3 / 7, 2 / 7, 2 / 7]


@pytest.mark.parametrize("batch", [torch.zeros(1, 4), (torch.zeros(4), torch.zeros(5)), (torch.zeros(()),), 3])
def test_batch_without_a_part_for_each_worker_is_refused(batch: object) -> None:
    with pytest.raises(InvalidRequest, match="for 2 workers"):
        part_of_batch(batch, 0, 2)


def test_members_draw_other_random_numbers() -> None:
    """They have the same seed for a batch, so they would drop out the same elements of their parts."""

    def draws(place: int) -> float:
        part: Any = ShardPart.__new__(ShardPart)
        part.model = SimpleNamespace(compute=lambda *_: torch.rand(()).item())
        torch.manual_seed(5)
        inside = cast(Collectives, SimpleNamespace(place=place, size=2))
        return cast(float, part._compute(inside, [torch.zeros(4)], torch.zeros(4), 1.0))

    with torch.random.fork_rng():
        assert draws(0) == draws(0) != draws(1)


def test_buffers_are_means_by_samples() -> None:
    """Of three samples, and of two of another member."""
    part: Any = ShardPart.__new__(ShardPart)
    buffer = SimpleNamespace(target=torch.zeros(1), found=torch.tensor([5.0]))
    part.model = SimpleNamespace(compute=lambda *_: 0.0, replica=SimpleNamespace(buffers=[buffer]))

    def sum_with_other(tensor: torch.Tensor) -> None:
        tensor += 0.4 * torch.tensor([10.0, 1.0])  # its buffer and its weight

    part.inside = SimpleNamespace(place=0, size=2, sum=sum_with_other, most=lambda _: None, wait=lambda _: None)
    with torch.random.fork_rng():
        part._compute(part.inside, [torch.zeros(5)], torch.zeros(5), 1.0)
    (mean,) = part._buffers()
    assert mean.tolist() == pytest.approx([(3 * 5.0 + 2 * 10.0) / 5])
