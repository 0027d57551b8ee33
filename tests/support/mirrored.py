"""Mirrored jobs in the test's own process: their settings, their workers side by side, and a small network to train."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from tests.support.alone import local_yard

MIRRORED: Mapping[str, object] = {
    "job.strategy": "multi_worker_mirrored",
    "membership.heartbeat_ms": 20,
    "job.rank_grace_ms": 5_000,
    "job.partitions": 4,
    "job.checkpoint.url": "never",
}
SERVERS: Mapping[str, object] = {**MIRRORED, "job.strategy": "parameter_server", "job.consistency.mode": "sync"}
SAMPLES, BATCH, EPOCHS = 48, 3, 2


def ranks(count: int) -> dict[str, object]:
    return {"job.workers_expected": count, "job.consistency.logical_ranks": count}


def side_by_side(workers: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, range(workers)))


class Losses:
    """Trains a small network in float64, with BatchNorm, and notes each loss."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(3)
        self._model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        ).double()
        x = torch.randn(SAMPLES, 4, dtype=torch.float64)
        self._data = TensorDataset(x, x.sum(1, keepdim=True).sin())
        self._optimizer = optimizer

    def train(self, job: sy.Job, **batches: Any) -> dict[int, float]:
        """The losses of this worker's ranks, added up by step."""
        model = copy.deepcopy(self._model)
        model, optimizer = job.prepare(model, self._optimizer(model.parameters(), lr=0.02))
        found: dict[int, float] = {}
        with job:
            for x, y in job.batches(self._data, batch_size=BATCH, epochs=EPOCHS, **batches):
                loss = torch.nn.functional.mse_loss(model(x), y)
                found[job.step] = found.get(job.step, 0.0) + loss.item()
                loss.backward()
                if job.step_due:
                    optimizer.step()
                    optimizer.zero_grad()
        return found


class Values(Losses):
    """Also notes the final values, which all workers must have."""

    values: list[list[float]]

    def train(self, job: sy.Job, **batches: Any) -> dict[int, float]:
        model = copy.deepcopy(self._model)
        model, optimizer = job.prepare(model, self._optimizer(model.parameters(), lr=0.02))
        with job:
            for x, y in job.batches(self._data, batch_size=BATCH, epochs=EPOCHS, **batches):
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        self.values = [each.flatten().tolist() for each in model.state_dict().values()]
        return {0: 0.0}


def losses_of(given: Mapping[str, object], workers: int, losses: Losses, **batches: Any) -> list[float]:
    with local_yard(given) as (_, connect):
        jobs = [connect() for _ in range(workers)]
        found = side_by_side(workers, lambda at: losses.train(jobs[at], **batches))
    steps = sorted({step for each in found for step in each})
    return [sum(each.get(step, 0.0) for each in found) for step in steps]
