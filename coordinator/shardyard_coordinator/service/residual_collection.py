"""Collects the residuals of workers' error feedback while a checkpoint is being taken.

    ready     the worker knows of the checkpoint from a heartbeat, and asks until all workers are ready
    copied    the worker has copied its residual between two of its pushes; then servers cut their partitions, so that
              few pushes lie between the copy and the cut
    ended     the worker has written its file, at the same time as the servers write theirs

Owns: which checkpoint waits for which workers, and how far each is. Invariants: no call waits for a worker
that has left, nor longer than its limit; a worker is asked for the newest checkpoint only; a report about another
checkpoint, or by another worker, is refused. Safe for several threads. Must not know: storage, members, when a
checkpoint is taken.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from shardyard.domain.errors import NotFound
from shardyard.domain.ids import Incarnation, JobId
from shardyard.runtime.waits import WaitRegistry
from shardyard.storage.storage import Written

LOOK_S: Final = 0.1
"""How often a wait checks which workers have left."""


@dataclass(frozen=True, slots=True)
class ResidualRequest:
    """Asks a worker for its residual. `number`: of the checkpoint. `url`: the folder of the job's checkpoints."""

    number: int
    url: str


class Stage(enum.IntEnum):
    READY = 1
    COPIED = 2
    ENDED = 3


@dataclass(frozen=True, slots=True)
class ResidualReport:
    """How far a worker is. At ENDED, `written` is its file, or `failure` says why there is none; neither: its residual
    is zero."""

    stage: Stage
    written: Written | None = None
    failure: str = ""


@dataclass
class ResidualCollection:
    """For one checkpoint. `stages`: how far each worker is. `copies`: ready workers must copy now."""

    wanted: ResidualRequest
    workers: frozenset[Incarnation]
    stages: dict[Incarnation, Stage] = field(default_factory=dict)
    copies: bool = False
    files: dict[Incarnation, Written] = field(default_factory=dict)
    failures: dict[Incarnation, str] = field(default_factory=dict)


class ResidualCollections:
    """`living`: returns a job's living workers. `wait_registry`: shows the waits."""

    def __init__(self, living: Callable[[JobId], Collection[Incarnation]], wait_registry: WaitRegistry) -> None:
        self._living = living
        self._wait_registry = wait_registry
        self._changed = threading.Condition()
        self._open: dict[tuple[JobId, int], ResidualCollection] = {}
        self._closed = False

    @contextmanager
    def open(
        self, job: JobId, wanted: ResidualRequest, workers: Collection[Incarnation]
    ) -> Iterator[ResidualCollection]:
        """Within the block, these workers are asked to save their residuals for this checkpoint. The block ends when
        the checkpoint is committed or has failed."""
        begun, key = ResidualCollection(wanted, frozenset(workers)), (job, wanted.number)
        with self._changed:
            assert key not in self._open, f"checkpoint {wanted.number} of job {job} is taken twice"
            self._open[key] = begun
        try:
            yield begun
        finally:
            with self._changed:
                del self._open[key]

    def wanted(self, job: JobId, worker: Incarnation) -> ResidualRequest | None:
        """The residual that this worker saves: for the newest checkpoint, if an earlier one failed and still runs."""
        with self._changed:
            found = [each.wanted for (of, _), each in self._open.items() if of == job and worker in each.workers]
            return max(found, key=lambda each: each.number, default=None)

    def report(self, job: JobId, worker: Incarnation, number: int, said: ResidualReport) -> bool:
        """Whether a ready worker must copy now. Raises NotFound if the checkpoint does not wait for it."""
        with self._changed:
            found = self._open.get((job, number))
            if found is None or worker not in found.workers:
                raise NotFound(
                    f"no checkpoint {number} of job {job} waits for the residual of worker {worker}",
                    why="it was committed without it, or failed",
                    todo="",
                )
            if said.stage > found.stages.get(worker, 0):
                found.stages[worker] = said.stage
                if said.written is not None:
                    found.files[worker] = said.written
                if said.failure:
                    found.failures[worker] = said.failure
                self._changed.notify_all()
            return found.copies

    def await_copies(self, job: JobId, begun: ResidualCollection, *, ready_ms: int, copied_ms: int) -> None:
        """Waits until all living workers have copied their residuals, all at the same time: at most `ready_ms` until
        they are ready, then at most `copied_ms` until they have copied."""
        self._await(job, begun, Stage.READY, "to learn that they must copy their residuals", ready_ms)
        with self._changed:
            begun.copies = True
        self._await(job, begun, Stage.COPIED, "to copy their residuals", copied_ms)

    def await_files(self, job: JobId, begun: ResidualCollection, timeout_ms: int) -> None:
        """Waits until each living worker has written its file, or has failed to, at most `timeout_ms`."""
        self._await(job, begun, Stage.ENDED, "to write their residuals", timeout_ms)

    def close(self) -> None:
        """Ends all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _await(self, job: JobId, begun: ResidualCollection, stage: Stage, what: str, timeout_ms: int) -> None:
        missing: list[Incarnation] = []
        give_up = time.monotonic() + timeout_ms / 1000
        with self._wait_registry.over(lambda: f"workers {', '.join(map(str, missing[:8]))} {what}"):
            while (left_s := give_up - time.monotonic()) > 0:
                living = self._living(job)  # asked before the lock is taken: it has one of its own
                with self._changed:
                    missing[:] = sorted(
                        each for each in begun.workers.intersection(living) if begun.stages.get(each, 0) < stage
                    )
                    if not missing or self._closed:
                        return
                    self._changed.wait(min(left_s, LOOK_S))
