"""What workers' error feedback remembered at a checkpoint, when the whole job has gone back to it: whose it is now.

It belongs to the state of that checkpoint: over all workers, what the servers have and what was not sent yet is the sum
of the gradients that count there. So a worker that lives takes up its own again, whatever it remembers since; what is
of workers that are gone is added to what the first living one remembers. Owns: what nobody has taken up yet.
Invariants: each is taken up once, by one worker; what is of a worker that lives goes to nobody else; going back again
begins anew, with what the checkpoint says then. Must not know: storage, what the files hold, who sends what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardyard.checkpoints.manifest import FeedbackFile, worker_name
from shardyard.ground.types import Generation, Incarnation
from shardyard_coordinator.checkpoints import Committed, feedback_of, feedback_record
from shardyard_coordinator.records import (
    Body,
    DamagedRecord,
    Entry,
    checked_items,
    checked_number,
    checked_text,
    require,
)

NEVER: Final = Generation(0)
"""The job has not gone back as a whole."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """`own`: of the worker that is told, in the place of all that it remembers; else of one that is gone, to be added.
    `file` is below `url`."""

    generation: Generation
    own: bool
    url: str
    file: FeedbackFile


class HandOvers:
    """Of one job."""

    def __init__(self) -> None:
        self.generation = NEVER
        """Of the map with which the job has last gone back as a whole."""
        self._url = ""
        self._is_same_run = False
        self._due: dict[str, FeedbackFile] = {}
        self._taken: dict[str, Incarnation] = {}

    @property
    def due(self) -> tuple[str, ...]:
        """The workers whose memory nobody has taken up yet."""
        return tuple(self._due)

    def go_back(self, committed: Committed, url: str, generation: Generation, *, is_same_run: bool) -> Entry:
        """All partitions are as `committed` has them. `is_same_run`: those whose memory it has may live still."""
        self._begin(generation, url, {file.worker: file for file in committed.feedback}, is_same_run=is_same_run)
        return self._gone_back

    def told_to(
        self, worker: Incarnation, workers: Sequence[Incarnation], ready: Sequence[Incarnation]
    ) -> tuple[HandOver, ...]:
        """What the worker shall take up. `workers`: the living; `ready`: those of them that have the job's variables,
        the first one first."""
        if not self._due or worker not in ready:
            return ()
        living = self._living(workers)
        found = []
        for name, file in self._due.items():
            own = living.get(name) == worker
            if own or (name not in living and worker == ready[0]):
                found.append(HandOver(self.generation, own, self._url, file))
        return tuple(found)

    def take(
        self, worker: Incarnation, workers: Sequence[Incarnation], generation: Generation, name: str, *, lost: bool
    ) -> tuple[bool, Entry | None]:
        """A worker has read the memory of the one of that name and, unless it is `lost`, will take it up. Whether it
        may; it is asked again if the answer does not reach it."""
        if generation != self.generation:
            return False, None
        if name not in self._due:
            return self._taken.get(name) == worker, None
        if self._living(workers).get(name, worker) != worker:
            return False, None
        self._settle(worker, name)
        return True, ("feedback_taken", {"worker": worker, "of": name, "lost": lost})

    def _living(self, workers: Sequence[Incarnation]) -> dict[str, Incarnation]:
        return {worker_name(worker): worker for worker in workers} if self._is_same_run else {}

    def _begin(self, generation: Generation, url: str, files: dict[str, FeedbackFile], *, is_same_run: bool) -> None:
        self.generation, self._url, self._is_same_run = generation, url, is_same_run
        self._due, self._taken = files, {}

    def _settle(self, worker: Incarnation, name: str) -> None:
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
            "taken": [[name, worker] for name, worker in self._taken.items()],
        }

    def entries(self) -> list[Entry]:
        return [self._gone_back] if self.generation else []

    def restore(self, kind: str, body: Body) -> bool:
        """Takes a record of `entries`, or one of its kinds. Whether it says that something is lost. Raises
        DamagedRecord."""
        if kind == "feedback_due":
            files = feedback_of(body)
            generation = Generation(body.number("generation", least=1))
            self._begin(
                generation,
                body.text("url"),
                {file.worker: file for file in files},
                is_same_run=body.flag("same_run"),
            )
            taken = (checked_items(each, "what was taken up", count=2) for each in body.items("taken"))
            self._taken = {
                checked_text(name, "whose was taken up"): Incarnation(checked_number(worker, "who took it up", least=1))
                for name, worker in taken
            }
            return False
        if kind == "feedback_taken":
            name = body.text("of")
            require(name in self._due, f"what worker {name} remembered is taken up and was not there")
            self._settle(Incarnation(body.number("worker", least=1)), name)
            return body.flag("lost")
        raise DamagedRecord("its kind is unknown to this release")
