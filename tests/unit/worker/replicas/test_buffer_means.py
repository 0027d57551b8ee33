"""The mean of a model's buffers over the logical ranks of a step."""

from __future__ import annotations

import torch

from shardyard_worker.replicas.buffer_means import BufferMeans
from shardyard_worker.training.model_variables import buffers_of


def test_means_are_those_of_their_step_whatever_is_added_after_it() -> None:
    means = BufferMeans(buffers_of(torch.nn.BatchNorm1d(2)))
    for mean, count, weight in ((1.0, 4, 1.0), (4.0, 5, 3.0)):
        means.add([torch.full((2,), mean), torch.ones(2), torch.tensor(count)], weight)
    found = means.means()
    means.clear()
    means.add([torch.zeros(2), torch.zeros(2), torch.tensor(9)], 1.0)
    assert found is not None
    assert [each.tolist() for each in found] == [[3.25, 3.25], [1.0, 1.0], 5]
