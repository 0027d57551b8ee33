"""Bounded staleness: which worker is too far ahead, and the wait for the slowest.

Stale synchronous parallel (Ho et al., More effective distributed ML via a stale synchronous parallel parameter server,
NIPS 2013): the values that a worker computes step c on contain all pushes of the others up to step c - bound. A
worker's clock is the number of its steps whose pushes this server has. Workers join at the clock of the slowest. Nobody
waits for a worker that rests, has left, or is declared dead (docs/internals/ledger.md, rule C3). A job may have a bound
at one time and none at another.

Example, with a bound of 2 and clocks {a: 7, b: 4}: worker a asks for the values of its next step. It lacks 7 - 4 = 3
steps of b, which is more than 2. So `await_slower` waits until b has reported clock 5.

Invariants: a clock never falls while its worker takes steps; a worker that joins does not set another one back; reports
from before a rest change nothing, however late they come; of two orders the one of the later switch is in force,
whichever comes last. Safe for several threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from shardyard.domain.consistency import SspPhase, SspReport
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Incarnation

UNREPORTED: Final = -1
"""The clock of a worker that takes steps, and has not reported to this server."""


class SspClock:
    """The clocks of one asynchronous job on one server. Without a `bound` nobody waits, and no clocks are kept.
    `switches` numbers the mode switch of the job that has set the bound."""

    def __init__(self, bound: int | None, switches: int = 0) -> None:
        self._bound = bound
        self._switches = switches
        self._changed = threading.Condition()
        self._staleness_max = 0
        self._clocks: dict[Incarnation, int] = {}
        self._rested: dict[Incarnation, int] = {}
        """For each worker the last epoch that has ended with a rest: reports of it may come late."""

    @property
    def bound(self) -> int | None:
        return self._bound

    @property
    def staleness_max(self) -> int:
        """The most steps of another worker that were missing in values that were given, under this bound."""
        with self._changed:
            return self._staleness_max

    def agrees(self, bound: int | None, switches: int) -> bool:
        """Whether no order of the same switch has set another bound."""
        return switches != self._switches or bound == self._bound

    def set_bound(self, bound: int | None, switches: int) -> None:
        """Changes the bound, unless the order is no later than the one in force."""
        with self._changed:
            if switches <= self._switches:
                return
            self._switches = switches
            if bound is None or self._bound is None:  # workers report again by themselves when there is a bound
                self._clocks.clear()
            self._bound, self._staleness_max = bound, 0
            self._changed.notify_all()

    def expect(self, workers: Iterable[Incarnation]) -> None:
        """The coordinator says which workers take steps. Others that have not reported here do not."""
        if self._bound is None:
            return
        with self._changed:
            reported = {worker: clock for worker, clock in self._clocks.items() if clock != UNREPORTED}
            self._clocks = dict.fromkeys(workers, UNREPORTED) | reported
            self._changed.notify_all()

    def report(self, worker: Incarnation, report: SspReport) -> int | None:
        """Takes a worker's report, after the push of its exchange was counted. Gives the clock of one that joins."""
        with self._changed:
            clock = self._update(worker, report)
            self._changed.notify_all()
        return clock if report.phase is SspPhase.JOINS else None

    def _update(self, worker: Incarnation, report: SspReport) -> int:
        """The worker's clock from now on."""
        if report.epoch <= self._rested.get(worker, -1):
            return report.clock
        if report.phase is SspPhase.RESTS:
            self._rested[worker] = report.epoch
            self._clocks.pop(worker, None)
            return report.clock
        if self._bound is None:  # the worker does not know that yet, or knows a later bound already
            return report.clock
        clock, known = report.clock, self._clocks.get(worker, UNREPORTED)
        if report.phase is SspPhase.JOINS:
            if known != UNREPORTED:
                return known  # it has joined, and asks again
            others = [each for other, each in self._clocks.items() if other != worker and each != UNREPORTED]
            clock = min(others, default=clock)
        self._clocks[worker] = max(clock, known)
        return self._clocks[worker]

    def forget(self, workers: Iterable[Incarnation]) -> None:
        """These workers are refused from now on, so no report of theirs can come late."""
        # a worker that reports at this moment is forgotten by the thread that takes its report
        if not (self._clocks or self._rested):
            return
        with self._changed:
            for worker in workers:
                self._clocks.pop(worker, None)
                self._rested.pop(worker, None)
            self._changed.notify_all()

    def await_slower(self, worker: Incarnation, report: SspReport, until: float) -> str:
        """Waits at most until `until` (time.monotonic) for workers that are too far behind. Gives what it still waits
        for, empty if the values may be given. Raises InvalidRequest if the wait could never end."""
        with self._changed:
            while (bound := self._bound) is not None:
                if report.ahead > bound and self._switches:  # the worker does not know this bound yet
                    report = replace(report, ahead=bound)
                elif report.ahead > bound:
                    raise InvalidRequest(
                        f"values that worker {worker} uses {report.ahead} steps later, with a bound of {bound}",
                        why="all workers would wait for each other",
                        todo="set worker.window to no more than job.consistency.staleness",
                    )
                slowest = self._too_far_behind(worker, report, bound)
                if slowest is None:
                    break
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return _explain(report, bound, *slowest)
            return ""

    def _too_far_behind(self, worker: Incarnation, report: SspReport, bound: int) -> tuple[Incarnation, int] | None:
        """The slowest of the other workers and its clock, if the values must wait for it."""
        slowest = min(((clock, other) for other, clock in self._clocks.items() if other != worker), default=None)
        if slowest is None:
            return None
        clock, other = slowest
        own = self._clocks.get(worker, report.clock) if report.phase is SspPhase.JOINS else report.clock
        missing = own + report.ahead - clock
        if clock == UNREPORTED or missing > bound:
            return other, clock
        self._staleness_max = max(self._staleness_max, missing)
        return None


def _explain(report: SspReport, bound: int, slowest: Incarnation, clock: int) -> str:
    if clock == UNREPORTED:
        return f"worker {slowest}, which has work and has not said here how far it is"
    needed = report.clock + report.ahead - bound
    return f"worker {slowest}, which has taken {clock} steps, to have taken {needed} (staleness {bound})"
