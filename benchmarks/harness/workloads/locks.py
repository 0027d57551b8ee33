"""How long partitions are locked during steps, with checkpoints and without, in one process.

`lock`: readers of a partition wait for it, and a checkpoint that copies it. `turn`: only changes of the partition wait
for it; an update holds it while it computes.

Owns: the lock that measures. Must not know: what runs under it.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.measuring.pairs import Figures
from shardyard.config import configuration
from shardyard.config.settings import Settings
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_worker.job import connect as worker

STEPS = 60
CHECKPOINT_EVERY_STEPS = 10


class TimedLock:
    """A lock that records how long it was held. While a Condition waits on it, it is not held."""

    def __init__(self, held_ms: list[float]) -> None:
        self._lock = threading.RLock()
        self._held_ms = held_ms
        self._since = 0.0

    def acquire(self, *arguments: Any) -> bool:
        taken = self._lock.acquire(*arguments)
        if taken:
            self._since = time.perf_counter()
        return taken

    def release(self) -> None:
        self._held_ms.append(1e3 * (time.perf_counter() - self._since))
        self._lock.release()

    # a Condition needs these of a reentrant lock

    def _is_owned(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined,no-any-return]

    def _release_save(self) -> Any:
        self._held_ms.append(1e3 * (time.perf_counter() - self._since))
        return self._lock._release_save()  # type: ignore[attr-defined]

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)  # type: ignore[attr-defined]
        self._since = time.perf_counter()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def longest_locks(nbytes: int, checkpoints: bool) -> Figures:
    """Steps of Adam on so many bytes of parameters, two servers. Every thread of this process shares its interpreter,
    so a lock may be held for longer than in a server of its own."""
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as folder:
        given = {
            "yard.servers": 2,
            "job.partitions": 8,
            "job.checkpoint.url": folder if checkpoints else "never",
            "job.checkpoint.every_steps": CHECKPOINT_EVERY_STEPS,
            "log.level": "error",
        }
        settings = configuration.load(None, {}, given).settings
        held, written = _take_steps(settings, nbytes, Path(folder))
    found = {"checkpoints": float(written)}
    for name, held_ms in held.items():
        found |= {f"{name}_p99_ms": float(np.percentile(held_ms, 99)), f"{name}_max_ms": float(np.max(held_ms))}
    return found


def _take_steps(settings: Settings, nbytes: int, folder: Path) -> tuple[dict[str, list[float]], int]:
    held: dict[str, list[float]] = {"lock": [], "turn": []}
    yard = LocalYard(settings)
    try:
        inside = settings.model_copy(update={"coordinator": COORDINATOR})
        with worker.connect(inside, network=yard.network) as job:
            values = [torch.nn.Parameter(torch.zeros(nbytes // 4 // 16)) for _ in range(16)]
            _, optimizer = job.prepare(torch.nn.ParameterList(values), torch.optim.Adam(values, lr=1e-3))
            for server in yard._servers:
                for hosted in server.store.hosted():
                    for partition in hosted.partitions.values():
                        partition.changed = threading.Condition(TimedLock(held["lock"]))  # type: ignore[arg-type]
                        partition.turn = TimedLock(held["turn"])  # type: ignore[assignment]
            for _ in range(STEPS):
                optimizer.zero_grad()
                torch.autograd.backward([value.sum() for value in values])
                optimizer.step()
            written = len(list(folder.glob("*/*/manifest.json")))
    finally:
        yard.close()
    return held, written
