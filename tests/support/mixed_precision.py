"""Models and yards for loss scaling, autocast and narrow parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import shardyard as sy
from shardyard.config import configuration
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_worker.job import connect as worker

INF = float("inf")
STEPS = 24


@contextmanager
def yard_of(**given: Any) -> Iterator[Callable[[], sy.Job]]:
    """A yard that several workers join, each by a call of what this gives; its attribute `yard` is the yard."""
    found = configuration.load(None, {}, {"yard.servers": 2, "log.level": "error"} | given).settings
    yard = LocalYard(found)
    jobs: list[sy.Job] = []

    def join() -> sy.Job:
        inside = found.model_copy(update={"coordinator": COORDINATOR})
        jobs.append(worker.connect(inside, network=yard.network))
        return jobs[-1]

    join.yard = yard  # type: ignore[attr-defined]
    try:
        yield join
    finally:
        for job in jobs:
            job.close()
        yard.close()


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def twin(model: torch.nn.Module, make: Callable[[], torch.nn.Module] = mlp) -> torch.nn.Module:
    copy = make()
    copy.load_state_dict(model.state_dict())
    return copy


def assert_close(mine: torch.nn.Module, theirs: torch.nn.Module) -> None:
    for name, value in theirs.state_dict().items():
        assert torch.allclose(mine.state_dict()[name].float(), value.float(), rtol=1e-5, atol=1e-7), name


def data(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)) for _ in range(steps)]


class Noting(torch.nn.Module):
    """A weight, and a buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return -(self.weight * x).sum()
