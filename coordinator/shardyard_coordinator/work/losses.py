"""What is lost: pushes without leased data, exactly (rule A11), and residuals of compression.

No other worker can compute the pushes of a worker's own source again: what a restored partition lacks of them is lost.
A residual is lost with its worker. Owns: which sequences of which worker each partition lacks; how many were lost of
departed workers, and how many residuals; the departed workers about which partitions must still be asked.
Invariants: a push that is found lost twice is counted once. Memory does not grow with the number of workers that have
gone. Must not know: how partitions are asked, which request led to it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.domain.limits import PARTITIONS_MAX, SEQUENCE_MAX
from shardyard_coordinator.records import SUM_MAX, Body, DamagedRecord, Entry, checked_items, checked_number

_NUMBERS: Final = 3
DEPARTED_MAX: Final = 1_024
"""The latest; more workers do not go between two checkpoints of a job."""
RETRY_MS: Final = 1_000

Nexts = Collection[tuple[PartitionId, int]]
"""The next sequence of a worker's own source in each partition."""

Spans = list[tuple[int, int]]
"""Sequences [first, last], ascending, apart from each other."""


@dataclass(frozen=True, slots=True)
class LostRange:
    """Acknowledged pushes `first` to `last` of a worker, which a partition no longer has."""

    partition: PartitionId
    first: int
    last: int


class LostPushes:
    def __init__(self) -> None:
        self._lost: dict[Incarnation, dict[PartitionId, Spans]] = {}
        self._of_departed = 0

    @property
    def count(self) -> int:
        """The number of pushes of which some partition lacks its part."""
        return self._of_departed + sum(_pushes(lost) for lost in self._lost.values())

    def add(self, worker: Incarnation, lost: Iterable[LostRange]) -> None:
        known = self._lost.setdefault(worker, {})
        for each in lost:
            known[each.partition] = _joined([*known.get(each.partition, []), (each.first, each.last)])

    def forget(self, worker: Incarnation) -> None:
        """The worker departed. What it lost stays counted."""
        self._of_departed += _pushes(self._lost.pop(worker, {}))

    # ---- records

    def entries(self) -> list[Entry]:
        before: list[Entry] = [("pushes_lost_before", {"count": self._of_departed})] if self._of_departed else []
        return [*before, *(pushes_lost(worker, _ranges(lost)) for worker, lost in sorted(self._lost.items()))]

    def restore(self, kind: str, body: Body) -> None:
        """Applies a record of `entries`, or one of its kinds. Raises DamagedRecord."""
        if kind == "pushes_lost_before":
            self._of_departed = body.number("count", most=SUM_MAX)
        elif kind == "pushes_lost":
            self.add(Incarnation(body.number("worker", least=1)), [_range_of(each) for each in body.items("lost")])
        else:
            raise DamagedRecord("its kind is unknown to this release")


class Departed:
    """The workers that departed since the newest checkpoint of a job whose partitions go back to checkpoints.

    A living worker finds the gap at its next push. A departed worker pushes no more, so the partitions are asked
    what they have from it. Only what a restored partition lacks is declared lost.
    """

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
        """A worker with so many acknowledged pushes of its own departed. Returns the workers that are dropped
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


class LostResiduals:
    """Workers that left with an unsent residual while other workers continued."""

    def __init__(self) -> None:
        self.count = 0
        self.norm = 0.0

    def add(self, norm: float) -> None:
        """`norm`: the 2-norm that the worker last reported; 0: it had no residual."""
        if norm:
            self.count += 1
            self.norm = min(math.hypot(self.norm, norm), sys.float_info.max)

    def add_unknown(self) -> None:
        """A residual of unknown norm, which no worker could take over."""
        self.count += 1

    # ---- records

    def entries(self) -> list[Entry]:
        return [("residuals_lost_before", {"count": self.count, "norm": self.norm})] if self.count else []

    def restore(self, body: Body) -> None:
        """Applies a record of `entries`. Raises DamagedRecord."""
        self.count, self.norm = body.number("count", most=SUM_MAX), body.real("norm")


def pushes_lost(worker: Incarnation, lost: Sequence[LostRange]) -> Entry:
    return "pushes_lost", {"worker": worker, "lost": [[each.partition, each.first, each.last] for each in lost]}


def described(lost: Sequence[LostRange]) -> str:
    """For people: each range once, with the partitions that lack it."""
    found: dict[tuple[int, int], list[int]] = {}
    for each in lost:
        found.setdefault((each.first, each.last), []).append(each.partition)
    return "; ".join(
        f"#{first}{'' if first == last else f' to #{last}'} in partition {', '.join(map(str, sorted(partitions)))}"
        for (first, last), partitions in sorted(found.items())
    )


def _range_of(item: object) -> LostRange:
    partition, first, last = checked_items(item, "a range", count=_NUMBERS)
    begin = checked_number(first, "a range's first", most=SEQUENCE_MAX)
    return LostRange(
        PartitionId(checked_number(partition, "a range's partition", most=PARTITIONS_MAX - 1)),
        begin,
        checked_number(last, "a range's last", least=begin, most=SEQUENCE_MAX),
    )


def _ranges(lost: dict[PartitionId, Spans]) -> list[LostRange]:
    return [LostRange(partition, *span) for partition, spans in sorted(lost.items()) for span in spans]


def _pushes(lost: dict[PartitionId, Spans]) -> int:
    return sum(last - first + 1 for first, last in _joined([span for spans in lost.values() for span in spans]))


def _joined(spans: Spans) -> Spans:
    found: Spans = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found
