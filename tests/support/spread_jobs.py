"""Jobs whose replicas are spread over several workers, with the scripts of `probe.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

from shardyard_launcher.yard.local_cluster import LocalCluster
from tests.support.yards import Probes, RoleYard, Script

STEPS, BATCH, EPOCHS = 50, 8, 5
STRATEGIES = ("pipeline", "sharded", "tensor")
Started = list[tuple[Script, Path]]


def settings(
    yard: LocalCluster | RoleYard, job: str, strategy: str, workers: int = 2, *, size: int = 2, **more: object
) -> dict[str, object]:
    """`size`: of a replica. The workers share memory or do not, as the job's name says: half of the jobs do."""
    sizes = {"pipeline": "job__pipeline__stages", "sharded": "job__sharded__size", "tensor": "job__tensor__size"}
    common: dict[str, object] = {
        "coordinator": yard.address if isinstance(yard, RoleYard) else yard.coordinator,
        "job": job,
        "job__seed": 4,
        "job__strategy": strategy,
        "job__pipeline__microbatches": 4,
        "job__workers_expected": workers,
        "membership__coordinator_grace_ms": 10_000,
        "worker__threads": 1,
        "worker__same_host": ("auto", "never")[crc32(job.encode()) % 2],
    }
    if strategy in sizes:
        common[sizes[strategy]] = size
    return common | more


def alone(yard: LocalCluster | RoleYard, job: str, ranks: int = 1, mode: str = "sync") -> dict[str, object]:
    """Of one worker that computes so many logical ranks, with the variables on the servers."""
    more = {} if mode == "async" else {"job__consistency__logical_ranks": ranks}
    return settings(yard, job, "parameter_server", 1, job__consistency__mode=mode, **more)


def options(ranks: int) -> tuple[str, ...]:
    """Of a run of 50 steps."""
    return ("--samples", str(STEPS * BATCH * ranks // EPOCHS), "--epochs", str(EPOCHS))


def start(probes: Probes, workers: int, *given: str, **common: Any) -> Started:
    return [probes.start(*given, **common) for _ in range(workers)]


def counts_mode(strategy: str) -> str:
    return "tensor-counts" if strategy == "tensor" else "stage-counts"
