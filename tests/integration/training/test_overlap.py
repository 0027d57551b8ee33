"""Gradients that are sent while backward computes others give the same bits as those sent with the step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

import shardyard as sy
from shardyard_worker.exchange.server_group import ServerGroup
from shardyard_worker.job.job import Job

STEPS = 6
Change = Callable[[torch.nn.Sequential, int], None]


def nothing(model: torch.nn.Sequential, step: int) -> None:
    del model, step


def clip(model: torch.nn.Sequential, step: int) -> None:
    if step % 2:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def change_unseen_by_autograd(model: torch.nn.Sequential, step: int) -> None:
    if step % 2:
        model[0].weight.grad.data[0, 0] = 7.0


def change_through_numpy(model: torch.nn.Sequential, step: int) -> None:
    if step % 2:
        model[2].weight.grad.numpy()[:2] = model[2].weight.grad.numpy()[1::-1].copy()


def take_away(model: torch.nn.Sequential, step: int) -> None:
    if step % 2:
        model[2].bias.grad = None


def accumulate(model: torch.nn.Sequential, step: int) -> None:
    model(torch.full((2, 8), float(step))).sum().backward()


def train(change: Change, **settings: object) -> str:
    everything = {"yard.servers": 2, "job.partitions": 2, "worker.same_host": "never", **settings}
    with sy.connect(settings=everything) as job:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
        model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            change(model, step)
            optimizer.step()
        return digest(job)


def digest(job: Job) -> str:
    values = job.pull()
    return hashlib.sha256(b"".join(values[name].numpy().tobytes() for name in sorted(values))).hexdigest()


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(
    "change", [nothing, clip, change_unseen_by_autograd, change_through_numpy, take_away, accumulate]
)
def test_promise_6_bits_are_the_same_with_gradients_sent_ahead(change: Change, mode: str) -> None:
    kept = {"job.consistency.mode": mode}
    assert train(change, **kept, **{"worker.exchange": "overlapped"}) == train(change, **kept)


def test_gradients_do_travel_before_the_step() -> None:
    settings = {"worker.same_host": "never", "worker.exchange": "overlapped"}
    with sy.connect(settings=settings) as job:
        model = torch.nn.Linear(64, 64)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        sent: list[int] = []
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).sum().backward()
            router: ServerGroup = job._loop.trainer.router
            router._overlap.drain()
            sent.append(sum(len(each.sums) for each in router._overlap._sent.values()))
            optimizer.step()
        assert sent == [2, 2, 2], "weight and bias, each time"


def test_gradients_sent_ahead_of_a_push_that_is_not_made_are_not_counted() -> None:
    settings = {"worker.same_host": "never", "worker.exchange": "overlapped"}
    with sy.connect(settings=settings) as job:
        model = torch.nn.Linear(64, 64, bias=False)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        before = model.weight.detach().clone()
        model(torch.ones(1, 64)).sum().backward()
        assert torch.equal(job.pull()["weight"], before)
        optimizer.zero_grad()
        (2 * model(torch.ones(1, 64)).sum()).backward()
        optimizer.step()
        assert np.array_equal(model.weight.detach().numpy(), (before - 2).numpy())


def test_what_was_sent_ahead_of_another_exchange_is_sent_again() -> None:
    settings = {"worker.same_host": "never", "worker.exchange": "overlapped"}
    with sy.connect(settings=settings) as job:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(64)) for _ in range(2)])
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        sum(each.sum() for each in model).backward()
        job.pull()
        optimizer.zero_grad()
        model[0].sum().backward()
        optimizer.step()
        assert [each.sum().item() for each in model] == [-64, 0]
