"""How far the workers of a job are that take steps, and whether one is too far ahead of another.

Stale synchronous parallel (Ho et al., More effective distributed ML via a stale synchronous parallel parameter server,
NIPS 2013): what a worker computes step c on has all that the others have pushed in their steps up to c - bound. A
worker's clock is the number of its steps whose pushes this server has. Workers join at the clock of the slowest, and
nobody waits for one that rests, has left or is gone (docs/ledger.md, rule C3). A job may have a bound at times, and at
times none.

Owns: the clocks. Invariants: a clock never falls while its worker takes steps; nobody who joins sets another one back;
what was said before a rest counts no more, however late it comes, and whatever bounds there were in between. Must not
know: what is pushed, the clock on the wall, threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from shardyard.domain.consistency import SspPhase, SspReport
from shardyard.domain.ids import Incarnation

UNHEARD: Final = -1
"""The clock of a worker that takes steps somewhere, and has not said so here."""


class SspClocks:
    """Of one job on one server. Without a `bound` nobody is waited for, and no clock is kept."""

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self.staleness_max = 0
        """The largest number of steps of another worker that were missing in values that were given."""
        self._clocks: dict[Incarnation, int] = {}
        self._rested: dict[Incarnation, int] = {}
        """The last turn of each worker that has ended with a rest: what is said of it may come late."""

    def go_by(self, bound: int | None) -> None:
        """Another bound than before, or none. Where there was none, who takes steps says so again by itself."""
        if bound is None or self.bound is None:
            self._clocks.clear()
        self.bound, self.staleness_max = bound, 0

    @property
    def knows_anybody(self) -> bool:
        return bool(self._clocks or self._rested)

    def expect(self, workers: Iterable[Incarnation]) -> None:
        """These take steps, as somebody else knows; nobody else does who has not been heard here."""
        if self.bound is None:
            return
        heard = {worker: clock for worker, clock in self._clocks.items() if clock != UNHEARD}
        self._clocks = dict.fromkeys(workers, UNHEARD) | heard

    def hear(self, worker: Incarnation, pace: SspReport) -> int:
        """What a worker says of itself. Its clock here from now on."""
        if pace.turn <= self._rested.get(worker, -1):
            return pace.clock
        if pace.stride is SspPhase.RESTS:
            self._rested[worker] = pace.turn
            self._clocks.pop(worker, None)
            return pace.clock
        if self.bound is None:  # said by one that has not heard of that yet, or has heard of another bound first
            return pace.clock
        clock, known = pace.clock, self._clocks.get(worker, UNHEARD)
        if pace.stride is SspPhase.JOINS:
            if known != UNHEARD:
                return known  # it has joined, and asks again
            others = [each for other, each in self._clocks.items() if other != worker and each != UNHEARD]
            clock = min(others, default=clock)
        self._clocks[worker] = max(clock, known)
        return self._clocks[worker]

    def forget(self, worker: Incarnation) -> None:
        """It is refused from now on: nothing of it comes late."""
        self._clocks.pop(worker, None)
        self._rested.pop(worker, None)

    def behind(self, worker: Incarnation, pace: SspReport) -> tuple[Incarnation, int] | None:
        """The slowest of the others, and its clock, if it is so far behind that the values must wait for it; else what
        they lack counts in `staleness_max`."""
        bound = self.bound
        if bound is None:
            return None
        found = min(((clock, other) for other, clock in self._clocks.items() if other != worker), default=None)
        if found is None:
            return None
        clock, other = found
        mine = self._clocks.get(worker, pace.clock) if pace.stride is SspPhase.JOINS else pace.clock
        lacking = mine + pace.ahead - clock
        if clock == UNHEARD or lacking > bound:
            return other, clock
        self.staleness_max = max(self.staleness_max, lacking)
        return None
