"""A worker leaves a synchronous job: a step has room for its logical ranks only, so the residual is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.config import configuration
from shardyard.config.settings import Settings
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_worker.job import connect as worker
from tests.support.alone import SYNC, status
from tests.support.scripts.probe import whole_numbers

QUICK = {"membership.heartbeat_ms": 20, "membership.lease_ms": 600_000, "log.level": "error"}
CODED = {"job.compression.push": "topk:0.01", "job.compression.whole_elements_max": 0}
SHAPE = (20, 30)
GRADIENT = whole_numbers(1)[0]


class Yard:
    """In this process. Of its workers one has the one logical rank; the others stand by."""

    def __init__(self, given: dict[str, object]) -> None:
        settings = configuration.load(None, {}, QUICK | SYNC | CODED | {"job.partitions": 3} | given).settings
        self.inside: Settings = settings.model_copy(update={"coordinator": COORDINATOR})
        self.local = LocalYard(settings)
        self.jobs: list[sy.Job] = []

    def connect(self) -> sy.Job:
        job = worker.connect(self.inside, network=self.local.network)
        self.jobs.append(job)
        job.register({"w": torch.zeros(SHAPE)}, optimizer="sgd", lr=1.0)
        return job

    def train(self, job: sy.Job, steps: int) -> None:
        """So many that count: what is computed on standby is dropped."""
        progress = job._session.progress
        wanted = progress.samples + steps
        while progress.samples < wanted:
            job.push({"w": -GRADIENT})


@pytest.fixture
def yards(tmp_path: Path, alone: None) -> Iterator[Callable[..., Yard]]:
    made: list[Yard] = []

    def start(**given: object) -> Yard:
        kept: dict[str, object] = {"job.checkpoint.url": str(tmp_path), "job.workers_expected": 9}
        made.append(Yard(kept | given))
        return made[-1]

    yield start
    for yard in made:
        for job in yard.jobs:
            job.close("the end")
        yard.local.close()


def residual(job: sy.Job) -> np.ndarray[Any, Any]:
    return job.compression_state()["residual.w"].reshape(SHAPE).numpy()


@pytest.mark.parametrize("url", ["here", "never"])
def test_worker_that_leaves_says_what_is_lost_with_it_and_the_others_go_on(
    yards: Callable[..., Yard], url: str, caplog: pytest.LogCaptureFixture
) -> None:
    yard = yards(**({"job.checkpoint.url": url} if url == "never" else {}))
    first, second = yard.connect(), yard.connect()
    yard.train(first, 5)
    norm = float(np.linalg.norm(residual(first)))
    with caplog.at_level(logging.WARNING, "shardyard.worker"):
        first.close()
    assert any("is lost with it" in each.getMessage() for each in caplog.records)
    found = status(yard.local)
    assert found.residuals_lost == 1
    assert found.residual_lost_norm == pytest.approx(norm, rel=1e-5)
    yard.train(second, 2)
    assert second.step == 7


def test_residual_at_the_end_of_the_data_is_neither_counted_nor_logged_as_lost(
    yards: Callable[..., Yard], caplog: pytest.LogCaptureFixture
) -> None:
    yard = yards()
    data = TensorDataset(whole_numbers(12))
    jobs = [yard.connect(), yard.connect()]

    def train(job: sy.Job) -> None:
        for (added,) in job.batches(data, batch_size=4):
            job.push({"w": -added.sum(0)})

    threads = [threading.Thread(target=train, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with caplog.at_level(logging.WARNING, "shardyard.worker"):
        for job in jobs:
            job.close()
    assert [each.getMessage() for each in caplog.records if "is lost" in each.getMessage()] == []
    assert status(yard.local).residuals_lost == 0, "no step follows in which it could be sent"
