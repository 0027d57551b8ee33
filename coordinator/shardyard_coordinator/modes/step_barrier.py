"""How far the workers of a synchronous job have come that wait until a step is fixed, before which all stop or halt.

Owns: what each worker has reported. Invariant: the agreed step comes after all steps to which a worker has contributed.
Must not know: what the step is for, records, time.
"""

from __future__ import annotations

from collections.abc import Collection

from shardyard.domain.ids import Incarnation


class StepBarrier:
    """Of one job, until `clear`."""

    def __init__(self) -> None:
        self._steps: dict[Incarnation, int] = {}

    def on_reached(self, worker: Incarnation, step: int) -> None:
        """The worker has contributed to no step from this one on, and waits."""
        self._steps[worker] = max(step, self._steps.get(worker, 0))

    def missing(self, workers: Collection[Incarnation]) -> tuple[Incarnation, ...]:
        """The living workers that have not reported how far they have come."""
        return tuple(worker for worker in sorted(workers) if worker not in self._steps)

    def has_all(self, workers: Collection[Incarnation]) -> bool:
        """Whether all living workers have reported, and there is at least one."""
        return bool(workers) and not self.missing(workers)

    def agreed_step(self, step: int) -> int:
        """The step before which all stop. `step`: the first of which no partition has any part; workers that are gone
        came so far."""
        return max([step, *self._steps.values()])

    def clear(self) -> None:
        self._steps.clear()
