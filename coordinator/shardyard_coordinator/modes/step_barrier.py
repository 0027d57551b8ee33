"""Finds the step before which all workers of a synchronous job stop or change the mode.

Owns: the step at which each worker waits. Invariant: the agreed step comes after all steps to which a worker has
contributed. Must not know: what the step is for, records, time.
"""

from __future__ import annotations

from collections.abc import Collection

from shardyard.domain.ids import Incarnation


class StepBarrier:
    """Collects reports until `clear`."""

    def __init__(self) -> None:
        self._steps: dict[Incarnation, int] = {}

    def on_reached(self, worker: Incarnation, step: int) -> None:
        """The worker waits, and contributes to no step from this one on."""
        self._steps[worker] = max(step, self._steps.get(worker, 0))

    def missing(self, workers: Collection[Incarnation]) -> tuple[Incarnation, ...]:
        """The living workers that have not reported how far they are."""
        return tuple(worker for worker in sorted(workers) if worker not in self._steps)

    def has_all(self, workers: Collection[Incarnation]) -> bool:
        """Whether all living workers have reported, and there is at least one."""
        return bool(workers) and not self.missing(workers)

    def agreed_step(self, step: int) -> int:
        """The step before which all stop. `step`: the first to which no partition has any contribution, those of
        departed workers included."""
        return max([step, *self._steps.values()])

    def clear(self) -> None:
        self._steps.clear()
