"""Saves what the jobs of a yard have learned before the yard is ended.

Owns: how long that may take, and the words about each job. Invariants: nothing in the yard is ended here. A job whose
checkpoint cannot be taken is named, with the checkpoint that it has. Must not know: command lines, how a checkpoint is
written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from shardyard.domain import errors
from shardyard.runtime.waits import ExplainedWait
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.checkpoints.take import WantedCheckpoint
from shardyard_launcher.status.report import UNFINISHED
from shardyard_launcher.status.words import describe_checkpoint
from shardyard_launcher.terminal.coordinator_client import ASK_AGAIN_S, CoordinatorClient
from shardyard_launcher.yard.running_yard import RECOVERY_MS_MAX, RunningYard

SAVE_MS_MAX: Final = 300_000
"""How long the checkpoints of all jobs may take."""
STATUS_TIMEOUT_MS: Final = 5_000
NOT_WHOLE: Final = "the yard is not whole"


def save_jobs(yard: RunningYard, stop: threading.Event, doomed: Path | None = None) -> Iterator[str]:
    """Takes a checkpoint of each job that has not ended. Says what it does and what came of it, line by line. Ends when
    each job has its checkpoint or none can be had, after SAVE_MS_MAX, or once `stop` is set. A checkpoint in the folder
    `doomed` is not waited for."""
    if not yard.state.coordinator or yard.broken:
        yield f"no checkpoint is taken, since {NOT_WHOLE}; jobs go on from the checkpoints that they have"
        return
    try:
        with yard.connect() as client:
            jobs = _running(yard, client, stop)
            if jobs:
                yield f"taking a checkpoint of {_names(job.name for job in jobs)} first; --now does not"
                yield from _Saving(yard, client, jobs, doomed).run(stop)
    except errors.CoordinatorUnavailable as error:
        yield f"no checkpoint is taken: {error.what}; jobs go on from the checkpoints that they have"


def _running(yard: RunningYard, client: CoordinatorClient, stop: threading.Event) -> list[wire.JobStatus]:
    """The jobs that have not ended. Waits for a coordinator that is started again."""
    until = time.monotonic() + RECOVERY_MS_MAX / 1000
    with ExplainedWait(lambda: "the coordinator, which is started again; Ctrl-C leaves the yard up") as wait:
        while True:
            try:
                return [job for job in client.status(timeout_ms=STATUS_TIMEOUT_MS).jobs if job.state in UNFINISHED]
            except errors.CoordinatorUnavailable:
                yard.refresh()
                if not yard.will_recover or stop.is_set() or time.monotonic() > until:
                    raise
            wait.tick()
            stop.wait(ASK_AGAIN_S)


class _Saving:
    def __init__(
        self, yard: RunningYard, client: CoordinatorClient, jobs: list[wire.JobStatus], doomed: Path | None
    ) -> None:
        self._yard = yard
        self._doomed = doomed
        self._jobs = {job.name: job for job in jobs}
        self._wanted = {name: WantedCheckpoint(client, name) for name in self._jobs}
        self._until = time.monotonic() + SAVE_MS_MAX / 1000

    def run(self, stop: threading.Event) -> Iterator[str]:
        with ExplainedWait(lambda: f"a checkpoint of {_names(self._wanted)}; Ctrl-C leaves the yard up") as wait:
            while self._wanted and not stop.is_set():
                for name, wanted in list(self._wanted.items()):
                    said = self._ask(self._jobs[name], wanted)
                    if said is not None:
                        del self._wanted[name]
                        yield said
                if self._wanted:
                    wait.tick()
                    stop.wait(ASK_AGAIN_S)

    def _ask(self, job: wire.JobStatus, wanted: WantedCheckpoint) -> str | None:
        """What became of the checkpoint, in words; None if that is not known yet."""
        try:
            reply = wanted.ask()
        except errors.CoordinatorUnavailable as error:  # its supervisor starts it again
            return self._not_yet(job, error.what)
        except errors.ShardyardError as error:
            return _not_taken(job, error.what)
        if self._doomed is not None and Path(reply.url).is_relative_to(self._doomed):
            return f"job {job.name}: no checkpoint is taken, since its checkpoints are deleted"
        if reply.done:
            return f"job {job.name}: checkpoint {reply.number} of step {reply.step:,} is in {reply.url}"
        return self._not_yet(job, f"it was not there after {SAVE_MS_MAX // 1000} s")

    def _not_yet(self, job: wire.JobStatus, why: str) -> str | None:
        self._yard.refresh()
        if self._yard.broken:
            return _not_taken(job, NOT_WHOLE)
        return _not_taken(job, why) if time.monotonic() > self._until else None


def _not_taken(job: wire.JobStatus, why: str) -> str:
    said = f"job {job.name}: no checkpoint was taken: {why}"
    if not job.HasField("checkpoint"):
        return f"{said}; it has none, and begins anew"
    return f"{said}; it goes on from checkpoint {describe_checkpoint(job.checkpoint, 0)}"


def _names(jobs: Iterable[str]) -> str:
    names = sorted(jobs)
    return f"job{'s'[: len(names) != 1]} {', '.join(names)}"
