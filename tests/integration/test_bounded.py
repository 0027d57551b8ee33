"""Bounded staleness, in yards inside this process: what a gradient is computed on lacks at most so many steps of any
other worker, whoever joins, rests and leaves (docs/ledger.md, rule C3)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.runtime import configuration
from shardyard_launcher.local import COORDINATOR, LocalYard
from shardyard_worker import job as worker

pytestmark = pytest.mark.usefixtures("alone")

PLACES = 8
SAMPLES, PER_SHARD = 160, 4
DATA = TensorDataset(torch.zeros(SAMPLES))
DEADLINE_S = 30.0
BOUNDED = {
    "yard.servers": 2,
    "job.partitions": 4,
    "job.block_bytes": 64,
    "job.consistency.mode": "bounded",
    "job.data.batches_per_data_shard": PER_SHARD,
    "log.level": "error",
}


class Traced:
    """A worker whose steps are counted at a place of its own, in variables of several partitions, so that whoever reads
    them knows how many of its steps are there."""

    def __init__(self, job: sy.Job, place: int) -> None:
        self.job = job
        self.place = place
        self.steps = 0
        self.lacks: list[tuple[int, float]] = []
        """Of each step: how many there were of all others, and the most steps by which another one was behind."""
        self.values = [torch.nn.Parameter(torch.zeros(PLACES)) for _ in range(4)]
        model = torch.nn.ParameterList(self.values)
        _, self.optimizer = job.prepare(model, torch.optim.SGD(self.values, lr=1.0))

    def look(self, others: Sequence[int]) -> None:
        there = torch.stack([values.detach() for values in self.values]).amin(0)
        self.lacks.append((int(there.sum()), max(self.steps - float(there[other]) for other in others)))

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward([-values[self.place] for values in self.values])
        self.optimizer.step()
        self.steps += 1


@contextmanager
def yard(**given: object) -> Iterator[Callable[..., sy.Job]]:
    """Gives jobs, all of the same name; they must be closed within."""
    settings = configuration.load(None, {}, BOUNDED | given).settings
    made = LocalYard(settings)
    try:
        inside = settings.model_copy(update={"coordinator": COORDINATOR})
        yield lambda: worker.connect(inside, network=made.network)
    finally:
        made.close()


def train(
    connect: Callable[[], sy.Job],
    place: int,
    workers: int,
    *,
    joined: threading.Barrier,
    pause_s: Callable[[int], float] = lambda step: 0.0,
) -> Traced:
    """Worker `place` of so many, all of which begin when all have joined."""
    others = [other for other in range(workers) if other != place]
    with connect() as job:
        traced = Traced(job, place)
        for _ in job.batches(DATA, batch_size=1):
            if traced.steps == 0:
                joined.wait(DEADLINE_S)
            traced.look(others)
            traced.step()
            time.sleep(pause_s(traced.steps))
        return traced


@pytest.mark.parametrize(("staleness", "window"), [(0, 0), (1, 0), (1, 1), (3, 0), (3, 1)])
def test_promise_5_no_gradient_lacks_more_steps_of_another_worker_than_the_bound(staleness: int, window: int) -> None:
    joined = threading.Barrier(3)
    pauses: list[Callable[[int], float]] = [lambda step: 0.01, lambda step: 0.002 * (step % 5), lambda _: 0.0]
    given = {"job.consistency.staleness": staleness, "worker.window": window}
    with yard(**given) as connect, ThreadPoolExecutor(3) as threads:
        runs = [
            threads.submit(train, connect, place, 3, joined=joined, pause_s=pause) for place, pause in enumerate(pauses)
        ]
        traced = [run.result(DEADLINE_S) for run in runs]
    assert sum(each.steps for each in traced) == SAMPLES
    # in the end, when the last data shards are leased, others have no work and are not waited for
    busy = SAMPLES - 3 * PER_SHARD - 3 * (staleness + 1)
    lacks = [lack for each in traced for total, lack in each.lacks if total < busy]
    assert len(lacks) > SAMPLES / 2
    assert max(lacks) <= staleness
    if staleness:
        assert max(lacks) > 0
