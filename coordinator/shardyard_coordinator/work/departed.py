"""Workers that are gone, and whose own pushes restored partitions may lack (rule A11).

A living worker finds the gap at its next push. A worker that is gone pushes no more, so the partitions are asked what
they have from it. Owns: the workers that have gone since the newest checkpoint, with the number of own pushes that each
reported as acknowledged; which partitions were restored; whether they must be asked. Invariant: only what a restored
partition lacks is declared lost. Must not know: how partitions are asked, what was lost before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.domain.limits import PARTITIONS_MAX, SEQUENCE_MAX
from shardyard_coordinator.records import Body, DamagedRecord, Entry, checked_items, checked_number
from shardyard_coordinator.work.losses import LostRange

DEPARTED_MAX: Final = 1_024
"""The latest; more workers do not go between two checkpoints of a job."""
RETRY_MS: Final = 1_000

Nexts = Collection[tuple[PartitionId, int]]
"""The next sequence of a worker's own source in each partition."""


class Departed:
    """For jobs whose partitions go back to checkpoints."""

    def __init__(self) -> None:
        self._pushed: dict[Incarnation, int] = {}
        self._restored: frozenset[PartitionId] = frozenset()
        self._is_due = False
        self._is_asked = False
        self._retry_at_ms = 0

    @property
    def is_due(self) -> bool:
        """Whether some partitions have not been asked yet. Until then no checkpoint is begun: it would hide what they
        lack."""
        return self._is_due

    def add(self, worker: Incarnation, pushed: int) -> list[Incarnation]:
        """A worker is gone that reported so many acknowledged pushes of its own. Returns the workers that are dropped
        to make room for it."""
        self._pushed[worker] = pushed
        given_up = list(self._pushed)[:-DEPARTED_MAX]
        for each in given_up:
            del self._pushed[each]
        self._is_due = self._is_due or bool(self._restored)
        return given_up

    def restored(self, partitions: Iterable[PartitionId]) -> None:
        """These partitions are as a checkpoint has them."""
        self._restored |= frozenset(partitions)
        self._is_due, self._is_asked = bool(self._pushed and self._restored), False

    def forget(self, gone: Iterable[Incarnation]) -> list[Incarnation]:
        """A checkpoint has everything from these workers. Returns those that can lose nothing more."""
        forgotten = [worker for worker in gone if self._pushed.pop(worker, None) is not None]
        self._is_due = self._is_due and bool(self._pushed)
        return forgotten

    def ask(self, now_ms: int) -> tuple[Incarnation, ...]:
        """The workers to ask partitions about now, if it is time."""
        if not self._is_due or self._is_asked or now_ms < self._retry_at_ms:
            return ()
        self._is_asked = True
        return tuple(self._pushed)

    def fail(self, now_ms: int) -> None:
        """Some server did not answer."""
        self._is_asked, self._retry_at_ms = False, now_ms + RETRY_MS

    def answer(self, found: Mapping[Incarnation, Nexts]) -> dict[Incarnation, list[LostRange]]:
        """What restored partitions lack of each worker's pushes. If a worker was killed, this may include the push that
        was under way."""
        self._is_asked = False
        self._is_due = not set(self._pushed) <= set(found)  # some may have gone meanwhile
        lost = {worker: self._lacks(worker, nexts) for worker, nexts in found.items() if worker in self._pushed}
        return {worker: ranges for worker, ranges in lost.items() if ranges}

    def _lacks(self, worker: Incarnation, nexts: Nexts) -> list[LostRange]:
        end = max([self._pushed[worker], *(found for _, found in nexts)])
        return [
            LostRange(partition, found, end - 1)
            for partition, found in nexts
            if partition in self._restored and found < end
        ]

    # ---- records

    def entries(self) -> list[Entry]:
        if not self._pushed and not self._restored:
            return []
        workers = [[worker, pushed] for worker, pushed in self._pushed.items()]
        return [("workers_departed", {"workers": workers, "restored": sorted(self._restored)})]

    def restore(self, body: Body) -> None:
        """Applies a record of `entries`. Raises DamagedRecord."""
        for each in body.items("workers"):
            worker, pushed = checked_items(each, "a worker that is gone", count=2)
            known = Incarnation(checked_number(worker, "a worker that is gone", least=1))
            self._pushed[known] = checked_number(pushed, "its pushes", most=SEQUENCE_MAX)
        if len(self._pushed) > DEPARTED_MAX:
            raise DamagedRecord(f"{len(self._pushed)} workers are gone; at most {DEPARTED_MAX}")
        partitions = [PartitionId(number) for number in body.numbers("restored", most=PARTITIONS_MAX - 1)]
        self.restored(partitions)
