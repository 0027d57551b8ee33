"""A push under way while the next gradient is computed: which gradient it carries, and on what the next is computed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard_worker.exchange.request_builder import RequestBuilder

STEPS = 8
LR = 0.125


def gradient(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    leaf = weight.clone().requires_grad_()
    F.linear(x, leaf).square().mean().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the push looks at the gradients only when the script has gone on."""
    shipped = RequestBuilder.push

    def later(self: RequestBuilder, *arguments: Any) -> Any:
        threading.Event().wait(0.02)
        return shipped(self, *arguments)

    monkeypatch.setattr(RequestBuilder, "push", later)


@pytest.mark.parametrize("given", [{}, {"worker.same_host": "never"}], ids=str)
@pytest.mark.usefixtures("slow")
def test_each_gradient_is_computed_on_what_the_push_before_the_last_has_made(given: dict[str, object]) -> None:
    batches = [torch.randn(16, 8) for _ in range(STEPS)]
    with sy.connect(
        settings={"worker.exchange": "delayed", "job.block_bytes": 64, "job.partitions": 2, **given}
    ) as job:
        model = torch.nn.Linear(8, 4, bias=False)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        versions = [model.weight.detach().clone()]
        held = versions[0]
        for x in batches:
            assert torch.equal(model.weight, held)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            assert model.weight.grad is None, "it is under way"
            versions.append(versions[-1] - LR * gradient(held, x))
            held = versions[-2]
        assert torch.equal(job.pull()["weight"], versions[-1])


def test_promise_1_each_batch_counts_once_with_a_push_under_way() -> None:
    dataset = TensorDataset(torch.ones(96, 1))
    with sy.connect(
        settings={"worker.exchange": "delayed", "yard.servers": 2, "job.data.batches_per_data_shard": 3}
    ) as job:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for (x,) in job.batches(dataset, batch_size=8, epochs=2):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        assert job.pull()["weight"].item() == -2 * 96 / 8
        assert job.step == 2 * 96 / 8
