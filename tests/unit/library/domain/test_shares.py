"""Shares of variables are cut as torch cuts tensors."""

from __future__ import annotations

import pytest
import torch

from shardyard.domain.layout.shares import share_of, spec_of_share
from shardyard.domain.variables import DType, VariableSpec


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(8, 3), (5, 3), (1, 4), (2,), (7,), (4, 0), (0, 4), (3, 2, 2)])
def test_shares_are_the_chunks_of_torch(shape: tuple[int, ...], count: int) -> None:
    whole, spec = torch.arange(torch.Size(shape).numel()).view(shape), VariableSpec("w", DType.INT64, shape)
    chunks = torch.chunk(whole, count)
    for place in range(count):
        begin, end = share_of(spec, place, count)
        chunk = chunks[place] if place < len(chunks) else whole[:0]
        assert whole.reshape(-1)[begin:end].equal(chunk.reshape(-1))
        assert spec_of_share(spec, place, count).elements == end - begin


def test_the_first_worker_has_a_number() -> None:
    spec = VariableSpec("scale", DType.FLOAT32, ())
    assert [share_of(spec, place, 3) for place in range(3)] == [(0, 1), (1, 1), (1, 1)]
    assert [spec_of_share(spec, place, 3).shape for place in range(3)] == [(1,), (0,), (0,)]
