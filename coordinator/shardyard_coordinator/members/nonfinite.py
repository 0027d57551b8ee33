"""How many gradients of each worker were not finite, and which workers are excluded for it.

Owns: counts by worker and in total. Invariants: a gradient that a worker reports twice is counted once. Memory does not
grow with the number of departed workers. Must not know: which batches these were (quarantine), members, time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shardyard.domain.ids import Incarnation
from shardyard_coordinator.records import SUM_MAX, Body, Entry, checked_items, checked_number

QUARANTINED: Final = "is in quarantine"
"""How the reason begins for which a worker is no member any more."""
_NUMBERS: Final = 3


@dataclass(frozen=True, slots=True)
class _Said:
    count: int = 0
    in_a_row: int = 0


class NotFinite:
    """`row_max`: a worker with so many consecutive reports is excluded; 0: never."""

    def __init__(self, row_max: int) -> None:
        self._row_max = row_max
        self._said: dict[Incarnation, _Said] = {}
        self._of_departed = 0
        self.quarantined = 0
        """Workers."""

    @property
    def count(self) -> int:
        return self._of_departed + sum(said.count for said in self._said.values())

    def of(self, worker: Incarnation) -> int:
        return self._said.get(worker, _Said()).count

    def take(self, worker: Incarnation, count: int, in_a_row: int) -> bool:
        """Takes a worker's total. Returns whether it is new."""
        if count <= self.of(worker):
            return False
        self._said[worker] = _Said(count, in_a_row)
        return True

    def expels(self, worker: Incarnation) -> bool:
        """Whether the worker must be excluded now."""
        return 0 < self._row_max <= self._said.get(worker, _Said()).in_a_row

    def quarantine(self) -> None:
        """Counts one more excluded worker."""
        self.quarantined += 1

    def forget(self, worker: Incarnation) -> None:
        """The worker departed. Its reports stay counted."""
        self._of_departed += self._said.pop(worker, _Said()).count

    # ---- records

    def entries(self) -> list[Entry]:
        if not (self.count or self.quarantined):
            return []
        workers = [[worker, said.count, said.in_a_row] for worker, said in self._said.items()]
        body = {"departed": self._of_departed, "quarantined": self.quarantined, "workers": workers}
        return [("not_finite_before", body)]

    def restore(self, kind: str, body: Body) -> None:
        """Applies a record of `entries`, `not_finite` or `worker_quarantined`. Raises DamagedRecord."""
        if kind == "not_finite":
            worker = Incarnation(body.number("worker", least=1))
            self.take(worker, body.number("count", least=1, most=SUM_MAX), body.number("in_a_row", most=SUM_MAX))
        elif kind == "worker_quarantined":
            self.quarantine()
        else:
            self._of_departed = body.number("departed", most=SUM_MAX)
            self.quarantined = body.number("quarantined", most=SUM_MAX)
            for each in body.items("workers"):
                said, count, in_a_row = (
                    checked_number(number, "a worker and its counts", most=SUM_MAX)
                    for number in checked_items(each, "a worker and its counts", count=_NUMBERS)
                )
                self._said[Incarnation(said)] = _Said(count, in_a_row)
