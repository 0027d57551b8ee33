"""Tables of a model in a job: rows that are on servers, held against the same model that trains by itself.

Gradients are whole numbers and rates powers of two wherever bits are compared, so that no order of sums shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from alone import Connect

import shardyard as sy

pytestmark = pytest.mark.usefixtures("alone")

NEVER = {"job.checkpoint.url": "never"}
DIM = 4


class Model(torch.nn.Module):
    """Two tables, one of them shared by two features, beside a dense layer."""

    def __init__(self, seed: int = 7, optimizer: Any = None) -> None:
        super().__init__()
        optimizer = optimizer or sy.tables.SGD(lr=1.0)
        users = sy.tables.Table(DIM, name="users", seed=seed, optimizer=optimizer, initial=sy.tables.zeros())
        self.author = sy.Embedding(DIM, table=users)
        self.friends = sy.EmbeddingBag(DIM, "sum", table=users, padding_idx=0)
        self.words = sy.EmbeddingBag(
            2, "sum", table=sy.tables.Table(2, seed=seed + 1, optimizer=optimizer, initial=sy.tables.zeros())
        )
        self.top = torch.nn.Linear(2 * DIM + 2, 1, bias=False)
        with torch.no_grad():
            self.top.weight.fill_(1.0)

    def forward(self, author: torch.Tensor, friends: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.author(author), self.friends(friends), self.words(words)], 1))


def batches(count: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        draw = torch.randint(-20, 20, (8, 7), generator=generator) * 0x1_0000_0001
        yield draw[:, 0], draw[:, 1:4], draw[:, 4:]


def train(model: Model, optimizers: list[torch.optim.Optimizer], steps: int, seed: int = 0) -> None:
    for step, batch in enumerate(batches(steps, seed)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(*batch) * float(step % 3 - 1)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def dense(model: Model) -> torch.optim.Optimizer:
    """Its values stay whole: a rate of 0 for the layer above, whose gradient depends on rows."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=0, msg=name)


# ---- as without a job


@pytest.mark.parametrize("given", [{}, {"worker.same_host": "never"}, {"worker.window": 1}, {"yard.servers": 1}])
def test_rows_of_a_job_are_those_of_a_model_that_trains_by_itself(connect: Connect, given: dict[str, Any]) -> None:
    alone, plain = Model(), torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    train(alone, [plain, sy.tables.Optimizer(alone)], 12)
    job = connect(settings=NEVER, **given)
    model, optimizer = job.prepare(Model(), dense(Model()))
    model = Model()
    job.close()
    job = connect(settings=NEVER, **given)
    model, optimizer = job.prepare(model, dense(model))
    train(model, [optimizer], 12)
    job.pull()
    found, expected = model.state_dict(), alone.state_dict()
    assert_same(found, expected)
    assert len(model.author.table) == len(alone.author.table) > 20
