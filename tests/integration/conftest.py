"""Fixtures of the integration tests; the modules beside this file (yards, alone) can be imported by its tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardyard as sy
from shardyard_worker.training import grad_hooks
from tests.support.alone import Connect
from tests.support.yards import Probes, RoleYard, preloaded_scripts


@pytest.fixture(scope="session", autouse=True)
def preloaded() -> Iterator[None]:
    with preloaded_scripts():
        yield


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("SHARDYARD"):
            monkeypatch.delenv(name)
    torch.set_num_threads(1)


@pytest.fixture
def connect(alone: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Jobs in this process; all are left at the end. Gradients of small models take the way of large ones."""
    monkeypatch.setattr(grad_hooks, "WATCHED_BYTES_MIN", 0)
    jobs: list[sy.Job] = []

    def start(**settings: Any) -> sy.Job:
        given = {"yard.servers": 2, "job.partitions": 4, "log.level": "error"} | settings.pop("settings", {}) | settings
        jobs.append(sy.connect(settings=given))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[RoleYard]:
    begun = RoleYard(tmp_path)
    yield begun
    begun.stop()


@pytest.fixture
def probes(tmp_path: Path) -> Iterator[Probes]:
    with Probes(tmp_path) as running:
        yield running
