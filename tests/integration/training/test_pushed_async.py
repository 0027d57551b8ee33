"""Asynchronous pipelines whose variables are on the servers: each is one worker to the ledgers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard_launcher.yard.local_cluster import LocalCluster
from tests.support.yards import Probes, Script, finish, running_yard, wait_for_any

Started = list[tuple[Script, Path]]


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    given = {"membership.lease_ms": 1_500, "membership.heartbeat_ms": 100}
    with running_yard(tmp_path_factory.mktemp("yard"), servers=2, settings=given) as cluster:
        yield cluster


def settings(yard: LocalCluster, job: str, workers: int = 2, **more: object) -> dict[str, object]:
    common: dict[str, object] = {
        "coordinator": yard.coordinator,
        "job": job,
        "job__seed": 4,
        "job__strategy": "pipeline",
        "job__between": "parameter_server",
        "job__consistency__mode": "async",
        "job__pipeline__microbatches": 4,
        "job__workers_expected": workers,
        "job__checkpoint__url": "never",
        "job__data__batches_per_data_shard": 5,
        "membership__coordinator_grace_ms": 10_000,
        "worker__threads": 1,
    }
    return common | more


def start(probes: Probes, workers: int, *given: str, **common: Any) -> Started:
    return [probes.start(*given, **common) for _ in range(workers)]


def counted(samples: int, epochs: int, *more: str) -> tuple[str, ...]:
    return ("stage-counts", "--samples", str(samples), "--epochs", str(epochs), *more)


@pytest.mark.parametrize("pipelines", [1, 2])
def test_each_sample_counts_once_in_each_stage(yard: LocalCluster, probes: Probes, pipelines: int) -> None:
    common = settings(yard, f"counts-{pipelines}", 2 * pipelines)
    given = counted(96, 3, "--accumulate", str(pipelines))
    results = [finish(script, out) for script, out in start(probes, 2 * pipelines, *given, **common)]
    for result in results:
        assert result["counts"] == [[3.0] * 96] * 2
    assert sum(result["computed"] for result in results) == 2 * 3 * 24, "one pipeline computes a batch"
