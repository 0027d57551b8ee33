"""How far the workers of a synchronous job have come that wait until a step is settled, for all to end or halt at it.

Owns: what each has said. Invariant: the step is settled when every living worker has said how far it has come; it is
behind all that anybody has contributed to. Must not know: what is settled, records, time.
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
        """Of the living, those that have not said how far they have come."""
        return tuple(worker for worker in sorted(workers) if worker not in self._steps)

    def has_all(self, workers: Collection[Incarnation]) -> bool:
        """Whether all of the living have, of whom there is one at least."""
        return bool(workers) and not self.missing(workers)

    def agreed_step(self, step: int) -> int:
        """The step to settle on. `step`: the first of which no partition has any part: so far came those who are
        gone."""
        return max([step, *self._steps.values()])

    def clear(self) -> None:
        self._steps.clear()
