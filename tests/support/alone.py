"""A yard inside the test's own process, shared by several tests. The fixtures `alone` and `connect` go with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.config import configuration
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_worker.job import connect as worker

SYNC = {"job.consistency.mode": "sync", "job.consistency.logical_ranks": 1}
SYNC_2 = SYNC | {"job.consistency.logical_ranks": 2}
Connect = Callable[..., sy.Job]


@contextmanager
def local_yard(given: Mapping[str, object]) -> Iterator[tuple[LocalYard, Callable[[], sy.Job]]]:
    """A yard of its own with these settings, and a function that connects a worker to it. Close the jobs within."""
    settings = configuration.load(None, {}, {"log.level": "error", **given}).settings
    yard = LocalYard(settings)
    inside = settings.model_copy(update={"coordinator": COORDINATOR})
    try:
        yield yard, lambda: worker.connect(inside, network=yard.network)
    finally:
        yard.close()


def status(yard: LocalYard) -> wire.JobStatus:
    peer = yard.network.connect(COORDINATOR, name="coordinator")
    (job,) = peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000).jobs
    return job


def workers_of(yard: LocalYard) -> list[wire.MemberStatus]:
    peer = yard.network.connect(COORDINATOR, name="coordinator")
    members = peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000).members
    return [each for each in members if each.role == wire.ROLE_WORKER]


class Counted:
    """A job in which each value is the number of times that its sample has counted."""

    def __init__(self, job: sy.Job, samples: int) -> None:
        self.job = job
        self.values = torch.nn.Parameter(torch.zeros(samples, dtype=torch.float64))
        self.data = TensorDataset(torch.arange(samples))
        _, self.optimizer = job.prepare(torch.nn.ParameterList([self.values]), torch.optim.SGD([self.values], lr=1.0))

    def compute(self, index: torch.Tensor, share: float = 1.0) -> None:
        (-self.values[index].sum() * share).backward()

    def step(self, index: torch.Tensor, share: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.compute(index, share)
        self.optimizer.step()

    @property
    def counts(self) -> list[float]:
        return [round(value, 9) for value in self.job.pull()["0"].tolist()]
