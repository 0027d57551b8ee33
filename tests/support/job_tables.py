"""A model with tables, trained in a job and without one. The fixture `yard` is one that several workers join."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardyard as sy
from shardyard.config import configuration
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_worker.job import connect as worker
from tests.support.alone import Connect

NEVER = {"job.checkpoint.url": "never"}
DIM = 4


class Model(torch.nn.Module):
    """Two tables, one of them shared by two features, beside a dense layer."""

    def __init__(self, optimizer: sy.tables.RowOptimizer | None = None, seed: int = 7, **given: Any) -> None:
        super().__init__()
        given = {"optimizer": optimizer or sy.tables.SGD(lr=1.0), "initial": sy.tables.zeros(), **given}
        users = sy.tables.Table(DIM, name="users", seed=seed, **given)
        words = sy.tables.Table(2, name="words", seed=seed + 1, **given)
        self.author = sy.Embedding(DIM, table=users)
        self.friends = sy.EmbeddingBag(DIM, "sum", table=users, padding_idx=0)
        self.words = sy.EmbeddingBag(2, "sum", table=words)
        self.top = torch.nn.Linear(2 * DIM + 2, 1, bias=False)
        with torch.no_grad():
            self.top.weight.fill_(1.0)

    def forward(self, author: torch.Tensor, friends: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.author(author), self.friends(friends), self.words(words)], 1))


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batches(count: int, seed: int = 0) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        draw = torch.randint(-20, 20, (8, 7), generator=generator) * 0x1_0000_0001
        yield draw[:, 0], draw[:, 1:4], draw[:, 4:]


def backward(model: Model, batch: Batch, step: int) -> None:
    (model(*batch) * float(step % 3 - 1)).sum().backward()


def train(model: Model, optimizers: list[torch.optim.Optimizer], steps: int, seed: int = 0) -> None:
    for step, batch in enumerate(batches(steps, seed)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model, batch, step)
        for optimizer in optimizers:
            optimizer.step()


def dense(model: torch.nn.Module, lr: float = 0.0) -> torch.optim.Optimizer:
    """A rate of 0: the layer above, whose gradient depends on rows, stays whole."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def begin(connect: Connect, settings: dict[str, Any], model: Any) -> tuple[sy.Job, Any, torch.optim.Optimizer]:
    job = connect(settings=settings)
    return job, *job.prepare(model, dense(model))


def assert_same(mine: dict[str, Any], theirs: dict[str, Any], tolerance: float = 0.0) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=tolerance, atol=tolerance, msg=name)


def trained_alone(steps: int, optimizer: sy.tables.RowOptimizer | None = None) -> Model:
    model = Model(optimizer)
    train(model, [dense(model), sy.tables.Optimizer(model)], steps)
    return model


class Yard:
    """Several workers in this process. Closes what it has opened."""

    def __init__(self) -> None:
        given = {"yard.servers": 2, "job.partitions": 4, "log.level": "error", **NEVER}
        settings = configuration.load(None, {}, given).settings
        self._settings = settings.model_copy(update={"coordinator": COORDINATOR})
        self.here = LocalYard(self._settings)
        self.jobs: list[sy.Job] = []

    def connect(self) -> sy.Job:
        self.jobs.append(worker.connect(self._settings, network=self.here.network))
        return self.jobs[-1]


@pytest.fixture
def yard() -> Iterator[Yard]:
    made = Yard()
    yield made
    for job in made.jobs:
        job.close("ends the test")
    made.here.close()
