"""What workers' error feedback remembered at a checkpoint, when the whole job has gone back to it, or when they left:
whose it is now.

It belongs to the state of that checkpoint: over all workers, what the servers have and what was not sent yet is the sum
of the gradients that count there. So a worker that lives takes up its own again, whatever it remembers since; what is
of workers that are gone is added to what the first living one remembers. So is what a worker had not sent that leaves a
synchronous job. Owns: what nobody has taken up yet. Invariants: each is taken up once, by one worker; what is of a
worker that lives goes to nobody else; going back again begins anew, with what the checkpoint says then, and what was
handed over since is void; while a checkpoint is taken nothing that was left changes hands, so it is in the files of
that checkpoint once. Must not know: storage, what the files hold, who sends what.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardyard.checkpoints.manifest import ResidualFile, left_name, worker_name
from shardyard.domain.errors import TooLarge
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
HOLD_MS: Final = 30_000
"""For so long no checkpoint is begun while a worker that leaves writes, or one that goes on reads what was left."""
LEFT_MAX: Final = 1_024
"""Left and not taken up yet; and of those that were, so many are known, should somebody ask again."""


class Fate(enum.Enum):
    """What becomes of what a worker that leaves has not sent (FeedbackFate on the wire)."""

    WAIT = "wait"
    WRITE = "write"
    HANDED_OVER = "handed over"
    UNWANTED = "unwanted"
    VOID = "void"


@dataclass(frozen=True, slots=True)
class Handover:
    """`own`: of the worker that is told, in the place of all that it remembers; else of one that is gone, to be added.
    `file` is below `url`."""

    generation: Generation
    own: bool
    url: str
    file: ResidualFile


@dataclass(frozen=True, slots=True)
class Left:
    """What a worker that leaves has not sent, of that 2-norm. `file` is below `url`."""

    worker: Incarnation
    url: str
    file: ResidualFile
    norm: float


@dataclass(frozen=True, slots=True)
class Claim:
    """Whether a worker takes up what it has read; `record`, where that is new. `left`: what nobody needs any more; of
    what is lost, `lost` is the 2-norm, 0 where nobody knows it, None where nothing is."""

    taken: bool
    record: Entry | None = None
    left: Left | None = None
    lost: float | None = None


class ResidualHandovers:
    """Of one job."""

    def __init__(self) -> None:
        self.generation = NEVER
        """Of the map with which the job has last gone back as a whole."""
        self._url = ""
        self._is_same_run = False
        self._due: dict[str, ResidualFile] = {}
        self._left: dict[str, Left] = {}
        self._taken: dict[str, Incarnation] = {}
        self._leaving: dict[Incarnation, int] = {}
        self._since_ms: dict[str, int] = {}

    @property
    def due(self) -> tuple[str, ...]:
        """The workers whose memory nobody has taken up yet since the job went back."""
        return tuple(self._due)

    @property
    def left(self) -> tuple[Left, ...]:
        """What workers that leave, or have left, had not sent, and nobody has taken up yet."""
        return tuple(self._left.values())

    def go_back(self, committed: Committed, url: str, generation: Generation, *, is_same_run: bool) -> Entry:
        """All partitions are as `committed` has them. `is_same_run`: those whose memory it has may live still."""
        self._begin(generation, url, {file.worker: file for file in committed.feedback}, is_same_run=is_same_run)
        return self._gone_back

    # ---- from who leaves

    def begin_leaving(self, worker: Incarnation, now_ms: int) -> None:
        """The worker will write what it has not sent; it takes up nothing any more."""
        self._leaving.setdefault(worker, now_ms)

    def is_leaving(self, worker: Incarnation) -> bool:
        return worker in self._leaving or self.has_from(worker)

    def has_from(self, worker: Incarnation) -> bool:
        """Whether the worker has handed over what it had not sent, so that nothing of it is lost with it."""
        name = left_name(worker)
        return name in self._left or name in self._taken

    def hand_over(self, left: Left, now_ms: int) -> Entry:
        """Raises TooLarge."""
        if len(self._left) >= LEFT_MAX:
            raise TooLarge(f"what {LEFT_MAX} workers had not sent waits for somebody to take it up; no more is taken")
        assert not self.has_from(left.worker)
        self._leave(left, now_ms)
        return _handed_over(left)

    def forget(self, worker: Incarnation) -> None:
        """The worker is gone; what it has handed over stays."""
        self._leaving.pop(worker, None)

    def holds(self, now_ms: int, ready: Sequence[Incarnation]) -> bool:
        """Whether a checkpoint should wait a little: somebody writes, or reads, what was left. `ready`: as in
        `told_to`."""
        begun = [*self._leaving.values()]
        if self._takers(ready):
            begun += self._since_ms.values()
        return any(now_ms - since_ms < HOLD_MS for since_ms in begun)

    # ---- to who goes on

    def told_to(
        self, worker: Incarnation, workers: Sequence[Incarnation], ready: Sequence[Incarnation], *, frozen: bool
    ) -> tuple[Handover, ...]:
        """What the worker shall take up. `workers`: the living; `ready`: those of them that have the job's variables,
        the first one first; `frozen`: a checkpoint is being taken."""
        if worker not in ready:
            return ()
        living = self._living(workers)
        found = []
        for name, file in self._due.items():
            own = living.get(name) == worker
            if own or (name not in living and worker == ready[0]):
                found.append(Handover(self.generation, own, self._url, file))
        if self._takers(ready)[:1] == [worker] and not frozen:
            found += [Handover(self.generation, False, left.url, left.file) for left in self._left.values()]
        return tuple(found)

    def take(
        self,
        worker: Incarnation,
        workers: Sequence[Incarnation],
        generation: Generation,
        name: str,
        *,
        lost: bool,
        frozen: bool,
    ) -> Claim:
        """A worker has read the memory of the one of that name and, unless it is `lost`, will take it up. It is asked
        again if the answer does not reach it. `frozen`: as in `told_to`."""
        if generation != self.generation:
            return Claim(False)
        record: Entry = ("feedback_taken", {"worker": worker, "of": name, "lost": lost})
        left = self._left.get(name)
        if left is not None:
            if frozen or left.worker == worker:
                return Claim(False)
            self._settle(worker, name)
            return Claim(True, record, left, left.norm if lost else None)
        if name not in self._due:
            return Claim(self._taken.get(name) == worker)
        if self._living(workers).get(name, worker) != worker:
            return Claim(False)
        self._settle(worker, name)
        return Claim(True, record, None, 0.0 if lost else None)

    def _takers(self, ready: Sequence[Incarnation]) -> list[Incarnation]:
        return [each for each in ready if not self.is_leaving(each)]

    def _living(self, workers: Sequence[Incarnation]) -> dict[str, Incarnation]:
        return {worker_name(worker): worker for worker in workers} if self._is_same_run else {}

    def _begin(self, generation: Generation, url: str, files: dict[str, ResidualFile], *, is_same_run: bool) -> None:
        self.generation, self._url, self._is_same_run = generation, url, is_same_run
        self._due, self._left, self._taken = files, {}, {}
        self._leaving, self._since_ms = {}, {}

    def _leave(self, left: Left, now_ms: int) -> None:
        self._left[left.file.worker], self._since_ms[left.file.worker] = left, now_ms
        self._leaving.pop(left.worker, None)

    def _settle(self, worker: Incarnation, name: str) -> None:
        self._due.pop(name, None)
        if self._left.pop(name, None) is not None:
            self._since_ms.pop(name, None)
        self._taken[name] = worker
        if not self._due:
            for earliest in list(self._taken)[:-LEFT_MAX]:
                del self._taken[earliest]

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
            *(_handed_over(left) for left in self._left.values()),
            *([("feedback_taken_before", {"taken": taken})] if taken else []),
        ]

    def restore(self, kind: str, body: Body, now_ms: int) -> float | None:
        """Takes a record of `entries`, or one of its kinds. The 2-norm of what it says to be lost, 0 where nobody knows
        it; None: nothing. Raises DamagedRecord."""
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
            case "feedback_handed_over":
                left = _left_of(body)
                require(not self.has_from(left.worker), f"worker {left.worker} hands over twice what it has not sent")
                self._leave(left, now_ms)
            case "feedback_taken":
                name, lost = body.text("of"), body.flag("lost")
                known = self._left.get(name)
                require(known is not None or name in self._due, f"what worker {name} remembered was not there")
                self._settle(Incarnation(body.number("worker", least=1)), name)
                norm = 0.0 if known is None else known.norm
                return norm if lost else None
            case "feedback_taken_before":
                taken = (checked_items(each, "what was taken up", count=2) for each in body.items("taken"))
                self._taken = {
                    checked_text(name, "whose was taken up"): Incarnation(
                        checked_number(worker, "who took it up", least=1)
                    )
                    for name, worker in taken
                }
            case _:
                raise DamagedRecord("its kind is unknown to this release")
        return None


def _handed_over(left: Left) -> Entry:
    return "feedback_handed_over", {
        "worker": left.worker,
        "norm": left.norm,
        "url": left.url,
        "feedback": feedback_record((left.file,)),
    }


def _left_of(body: Body) -> Left:
    files = feedback_of(body)
    require(len(files) == 1, f"{len(files)} files of what a worker had not sent")
    worker = Incarnation(body.number("worker", least=1))
    require(files[0].worker == left_name(worker), f"worker {worker} hands over the file of {files[0].worker}")
    return Left(worker, body.text("url"), files[0], body.real("norm"))
