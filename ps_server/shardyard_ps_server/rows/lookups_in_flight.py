"""Rows that workers have looked up and not pushed yet. A gradient is being computed on them, so they do not expire.

A row is in flight from its look-up until its worker pushes it, or has pushed ROWS_IN_FLIGHT_MAX times without it, or
KEPT_MS have passed, or the worker is gone. For each worker at most IDS_MAX ids are kept beside those of its newest
look-up.

Owns: what each worker has in flight. It changes no row and no frequency, and is in no log and no checkpoint. Safe for
several threads. Must not know: tables, why rows expire.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.domain.limits import ROWS_IN_FLIGHT_MAX
from shardyard.domain.tables.row_ids import Ids
from shardyard.runtime.clock import Clock

IDS_MAX: Final = 1 << 19
KEPT_MS: Final = 600_000


class TablePart(NamedTuple):
    """One table in one partition."""

    partition: PartitionId
    table: int


class _LookUp(NamedTuple):
    place: TablePart
    ids: Ids
    at_ms: int
    pushes: int
    """The number of earlier pushes of the worker."""


@dataclass
class _OfWorker:
    """`look_ups`: by number, the oldest first; `places`: the look-ups' numbers by place; `ids`: how many in all."""

    look_ups: dict[int, _LookUp] = field(default_factory=dict)
    places: dict[TablePart, list[int]] = field(default_factory=dict)
    ids: int = 0
    pushes: int = 0

    def at(self, place: TablePart) -> list[tuple[int, _LookUp]]:
        return [(number, self.look_ups[number]) for number in self.places.get(place, ())]

    def put(self, number: int, look_up: _LookUp) -> None:
        if number not in self.look_ups:
            self.places.setdefault(look_up.place, []).append(number)
        self.ids += look_up.ids.size - (self.look_ups[number].ids.size if number in self.look_ups else 0)
        self.look_ups[number] = look_up

    def drop(self, number: int) -> None:
        gone = self.look_ups.pop(number)
        self.ids -= gone.ids.size
        self.places[gone.place].remove(number)
        if not self.places[gone.place]:
            del self.places[gone.place]


class LookupsInFlight:
    """The look-ups in flight of one job."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._workers: dict[Incarnation, _OfWorker] = {}

    def begin(self, worker: Incarnation, looked_up: Sequence[tuple[TablePart, Ids]]) -> None:
        """Notes that a worker has looked up these ids, which ascend, each once."""
        now_ms = self._clock.now_ms()
        with self._lock:
            mine = self._workers.setdefault(worker, _OfWorker())
            before = list(mine.look_ups)
            for place, ids in looked_up:
                if ids.size:
                    mine.put(next(self._numbers), _LookUp(place, ids, now_ms, mine.pushes))
            for number in before:
                if mine.ids > IDS_MAX or mine.look_ups[number].at_ms < now_ms - KEPT_MS:
                    mine.drop(number)

    def end(self, worker: Incarnation, pushed: Iterable[tuple[TablePart, Ids]]) -> None:
        """Notes that the worker has pushed these ids. Called for each push, also for one without rows."""
        with self._lock:
            mine = self._workers.get(worker)
            if mine is None:
                return
            for place, ids in pushed:
                for number, each in mine.at(place):
                    rest = _without(each.ids, ids)
                    if rest.size:
                        mine.put(number, each._replace(ids=rest))
                    else:
                        mine.drop(number)
            mine.pushes += 1
            late = mine.pushes - ROWS_IN_FLIGHT_MAX
            for number in [*itertools.takewhile(lambda each: mine.look_ups[each].pushes <= late, mine.look_ups)]:
                mine.drop(number)

    def forget(self, workers: Iterable[Incarnation]) -> None:
        with self._lock:
            for worker in workers:
                self._workers.pop(worker, None)

    def without(self, place: TablePart, ids: Ids) -> Ids:
        """Returns those of the ids, which ascend, that no worker has in flight."""
        if not ids.size:
            return ids
        since_ms = self._clock.now_ms() - KEPT_MS
        with self._lock:
            found = [each for mine in self._workers.values() for _, each in mine.at(place)]
        for each in found:
            if each.at_ms >= since_ms:
                ids = _without(ids, each.ids)
        return ids

    def __len__(self) -> int:
        """The number of ids in flight, over all workers."""
        with self._lock:
            return sum([mine.ids for mine in self._workers.values()])


def _without(ids: Ids, others: Ids) -> Ids:
    """Both arguments ascend."""
    if not others.size:
        return ids
    places = np.searchsorted(others, ids)
    places[places == others.size] = 0
    left: Ids = ids[others[places] != ids]
    return left
