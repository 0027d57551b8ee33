"""The residuals of the checkpoint to which the whole job has gone back, until workers take them over.

A residual is what a worker's error feedback has not sent yet. It belongs to the state of the checkpoint: what the
servers have, plus the residuals of all workers, is the sum of the gradients that count there. So a living worker takes
over its own residual again, in place of its present one. The residuals of departed workers are added to that of
the first living worker.

Owns: the residuals that no worker has taken over yet. Invariants: each is taken over once, by one worker. That of a
living worker goes to no other worker. When the job goes back again, only what that checkpoint says counts. Must not
know: storage, what the files contain, who sends what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardyard.checkpoints.manifest import ResidualFile, worker_name
from shardyard.domain.ids import Generation, Incarnation
from shardyard_coordinator.records import (
    Body,
    DamagedRecord,
    Entry,
    checked_items,
    checked_number,
    checked_text,
    require,
)
from shardyard_coordinator.storage.checkpoint_book import Committed, feedback_of, feedback_record

NEVER: Final = Generation(0)
"""The job has not gone back as a whole."""


@dataclass(frozen=True, slots=True)
class CheckpointResidual:
    """A residual that a worker should take over. `own`: it replaces the worker's residual; otherwise it belongs to a
    worker that is gone, and is added. `file` is below `url`."""

    generation: Generation
    own: bool
    url: str
    file: ResidualFile


@dataclass(frozen=True, slots=True)
class Claim:
    """Whether a worker takes over the residual that it has read. `record`: set if this is new."""

    taken: bool
    record: Entry | None = None


class CheckpointResiduals:
    def __init__(self) -> None:
        self.generation = NEVER
        """Of the map with which the job has last gone back as a whole."""
        self._url = ""
        self._is_same_run = False
        self._due: dict[str, ResidualFile] = {}
        self._taken: dict[str, Incarnation] = {}

    @property
    def due(self) -> tuple[str, ...]:
        """The names of workers whose residuals no worker has taken over since the job went back."""
        return tuple(self._due)

    def go_back(self, committed: Committed, url: str, generation: Generation, *, is_same_run: bool) -> Entry:
        """All partitions are as in `committed`. `is_same_run`: workers whose residuals it has may still live."""
        self._begin(generation, url, {file.worker: file for file in committed.feedback}, is_same_run=is_same_run)
        return self._gone_back

    def for_worker(
        self, worker: Incarnation, workers: Sequence[Incarnation], ready: Sequence[Incarnation]
    ) -> tuple[CheckpointResidual, ...]:
        """What the worker should take over. `workers`: the living ones. `ready`: those that have the job's variables,
        the first one first."""
        if worker not in ready:
            return ()
        living = self._living(workers)
        found = []
        for name, file in self._due.items():
            own = living.get(name) == worker
            if own or (name not in living and worker == ready[0]):
                found.append(CheckpointResidual(self.generation, own, self._url, file))
        return tuple(found)

    def take(
        self, worker: Incarnation, workers: Sequence[Incarnation], generation: Generation, name: str, *, lost: bool
    ) -> Claim:
        """A worker has read the residual of the worker of that name, and takes it over if the claim says so. It asks
        again if the answer does not arrive. `lost`: it could not be read."""
        if generation != self.generation:
            return Claim(False)
        if name not in self._due:
            return Claim(self._taken.get(name) == worker)
        if self._living(workers).get(name, worker) != worker:
            return Claim(False)
        self._take(worker, name)
        return Claim(True, ("feedback_taken", {"worker": worker, "of": name, "lost": lost}))

    def _living(self, workers: Sequence[Incarnation]) -> dict[str, Incarnation]:
        return {worker_name(worker): worker for worker in workers} if self._is_same_run else {}

    def _begin(self, generation: Generation, url: str, files: dict[str, ResidualFile], *, is_same_run: bool) -> None:
        self.generation, self._url, self._is_same_run = generation, url, is_same_run
        self._due, self._taken = files, {}

    def _take(self, worker: Incarnation, name: str) -> None:
        del self._due[name]
        self._taken[name] = worker

    # ---- records

    @property
    def _gone_back(self) -> Entry:
        return "feedback_due", {
            "generation": self.generation,
            "url": self._url,
            "same_run": self._is_same_run,
            "feedback": feedback_record(tuple(self._due.values())),
        }

    def entries(self) -> list[Entry]:
        taken = [[name, worker] for name, worker in self._taken.items()]
        return [
            *([self._gone_back] if self.generation else []),
            *([("feedback_taken_before", {"taken": taken})] if taken else []),
        ]

    def restore(self, kind: str, body: Body) -> bool:
        """Applies a record of `entries`, or one of its kinds. Returns whether it says that a residual is lost. Raises
        DamagedRecord."""
        match kind:
            case "feedback_due":
                files = feedback_of(body)
                generation = Generation(body.number("generation", least=1))
                self._begin(
                    generation,
                    body.text("url"),
                    {file.worker: file for file in files},
                    is_same_run=body.flag("same_run"),
                )
            case "feedback_taken":
                name, lost = body.text("of"), body.flag("lost")
                require(name in self._due, f"the residual of worker {name} was not there")
                self._take(Incarnation(body.number("worker", least=1)), name)
                return lost
            case "feedback_taken_before":
                taken = (checked_items(each, "a residual that was taken up", count=2) for each in body.items("taken"))
                self._taken = {
                    checked_text(name, "whose residual was taken up"): Incarnation(
                        checked_number(worker, "the worker that took it up", least=1)
                    )
                    for name, worker in taken
                }
            case _:
                raise DamagedRecord("its kind is unknown to this release")
        return False
