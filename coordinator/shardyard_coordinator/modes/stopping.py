"""Ends a job before its data ends, and fixes the step before which all workers end (rule B9 of
docs/internals/ledger.md).

Owns: who asked for it first; in a synchronous job, how far each worker is, and the fixed step. Invariants: the first
request decides, and cannot be cancelled. The step is fixed once, after every living worker has reported how far it is
and waits there, and after the servers have reported what they have from departed workers. So no worker has
contributed to that step, and all steps with a contribution are computed by all. Must not know: what steps contain,
servers, time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardyard.domain import limits
from shardyard.domain.consistency import Stop
from shardyard.domain.ids import Incarnation
from shardyard_coordinator.modes.step_barrier import StepBarrier
from shardyard_coordinator.records import Body, Entry, require


class Stopping:
    """`by_steps`: the job is synchronous."""

    def __init__(self, *, by_steps: bool) -> None:
        self._by_steps = by_steps
        self._reached = StepBarrier()
        self.stop: Stop | None = None

    def ask(self, reason: str, worker: Incarnation | None) -> list[Entry]:
        """Returns the records, none if a stop was requested before. `worker`: None for a person."""
        if self.stop is not None:
            return []
        self.stop = Stop(reason, worker)
        return [self._asked, *([] if self._by_steps else self._fix(0))]

    def on_reached(self, worker: Incarnation, reached: int) -> None:
        """The worker waits, and contributes to no step from `reached` on."""
        if self._is_open:
            self._reached.on_reached(worker, reached)

    def is_due(self, workers: Collection[Incarnation]) -> bool:
        """Whether all living workers have reported how far they are."""
        return self._is_open and self._reached.has_all(workers)

    def fix_step(self, step: int) -> list[Entry]:
        """Fixes the step once `is_due`. Returns the records. `step`: the first to which no partition has any
        contribution, those of departed workers included."""
        return self._fix(self._reached.agreed_step(step))

    def missing(self, workers: Collection[Incarnation]) -> tuple[Incarnation, ...]:
        """The living workers that have not reported how far they are."""
        return self._reached.missing(workers) if self._is_open else ()

    def is_over(self, step: int) -> bool:
        """Whether a synchronous job that is at `step` takes no more steps."""
        return self._by_steps and self.stop is not None and self.stop.settled and step >= self.stop.step

    @property
    def _is_open(self) -> bool:
        return self.stop is not None and not self.stop.settled

    def _fix(self, step: int) -> list[Entry]:
        assert self.stop is not None
        self.stop = replace(self.stop, settled=True, step=step)
        self._reached.clear()
        return [self._settled]

    # ---- records

    @property
    def _asked(self) -> Entry:
        assert self.stop is not None
        return "stop_asked", {"worker": self.stop.worker or 0, "reason": self.stop.reason}

    @property
    def _settled(self) -> Entry:
        assert self.stop is not None
        return "stop_settled", {"step": self.stop.step}

    def entries(self) -> list[Entry]:
        if self.stop is None:
            return []
        return [self._asked, *([self._settled] if self.stop.settled else [])]

    def restore(self, kind: str, body: Body) -> None:
        """Raises DamagedRecord."""
        if kind == "stop_asked":
            require(self.stop is None, "the job was asked to stop twice")
            self.stop = Stop(body.text("reason"), Incarnation(body.number("worker")) or None)
        else:
            require(self._is_open, "the step of a stop is fixed, and no stop was asked for")
            self._fix(body.number("step", most=limits.SEQUENCE_MAX))
