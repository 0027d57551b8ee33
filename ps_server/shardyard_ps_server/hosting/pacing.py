"""The values of a job with bounded staleness wait for its slowest worker.

Owns: the job's clocks on this server, the bound in force, and the wait. Invariants: what a worker has pushed is counted
before its clock says so; of two orders the one of the later switch is in force, whichever comes last; without a bound
nobody is waited for, and no clock is kept. Safe for several threads. Must not know: values, partitions, how a wait is
said to the worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace

from shardyard.domain.consistency import SspPhase, SspReport
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Incarnation
from shardyard_ps_server.hosting.clocks import UNHEARD, SspClocks


class SspPacing:
    """Of one asynchronous job. `bound`: on its staleness, None: there is none; `switches`: the number of the switch of
    the job that says so."""

    def __init__(self, bound: int | None, switches: int = 0) -> None:
        self._clocks = SspClocks(bound)
        self._switches = switches
        self._changed = threading.Condition()

    @property
    def bound(self) -> int | None:
        return self._clocks.bound

    def agrees(self, bound: int | None, switches: int) -> bool:
        """Whether an order may say so: none of the same switch has said otherwise."""
        return switches != self._switches or bound == self.bound

    def switch(self, bound: int | None, switches: int) -> None:
        """An order that is no later than the one in force changes nothing."""
        with self._changed:
            if switches <= self._switches:
                return
            self._switches = switches
            self._clocks.go_by(bound)
            self._changed.notify_all()

    def expect(self, workers: Iterable[Incarnation]) -> None:
        if self.bound is None:
            return
        with self._changed:
            self._clocks.expect(workers)
            self._changed.notify_all()

    def hear(self, worker: Incarnation, pace: SspReport) -> int | None:
        """Of an exchange whose push, if it had one, is counted. The clock of one that joins."""
        with self._changed:
            clock = self._clocks.hear(worker, pace)
            self._changed.notify_all()
            return clock if pace.stride is SspPhase.JOINS else None

    def forget(self, workers: Iterable[Incarnation]) -> None:
        """They are refused from now on."""
        if not self._clocks.knows_anybody:  # who is heard at this moment is forgotten by who hears it
            return
        with self._changed:
            for worker in workers:
                self._clocks.forget(worker)
            self._changed.notify_all()

    def await_others(self, worker: Incarnation, pace: SspReport, until: float) -> str:
        """Waits until `until` (time.monotonic) for nobody to be too far behind. For whom it waits still; empty: for
        nobody. Raises InvalidRequest where it would wait for ever."""
        with self._changed:
            while (bound := self.bound) is not None:
                if pace.ahead > bound and self._switches:  # it has not heard of this bound yet
                    pace = replace(pace, ahead=bound)
                elif pace.ahead > bound:
                    raise InvalidRequest(
                        f"values that worker {worker} uses {pace.ahead} steps later, with a bound of {bound}",
                        why="all workers would wait for each other",
                        todo="set worker.window to no more than job.consistency.staleness",
                    )
                found = self._clocks.behind(worker, pace)
                if found is None:
                    break
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return _explain(pace, bound, *found)
            return ""

    @property
    def staleness_max(self) -> int:
        """The most steps of a worker that were missing in values that were given to another one, since the job has
        this bound."""
        with self._changed:
            return self._clocks.staleness_max


def _explain(pace: SspReport, bound: int, slowest: Incarnation, clock: int) -> str:
    if clock == UNHEARD:
        return f"worker {slowest}, which has work and has not said here how far it is"
    wanted = pace.clock + pace.ahead - bound
    return f"worker {slowest}, which has taken {clock} steps, to have taken {wanted} (staleness {bound})"
