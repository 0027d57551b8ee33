"""Bounded staleness: which worker is too far ahead, and the wait for the slowest.

Stale synchronous parallel (Ho et al., More effective distributed ML via a stale synchronous parallel parameter server,
NIPS 2013): the values on which a worker computes step c contain all pushes of the others up to step c - bound. A
worker's clock is the clock at which it joined, that of the slowest, plus the number of its steps since then whose
pushes this server has. No worker waits for one that rests, has left, or was declared dead (docs/internals/ledger.md,
rule C3). The bound of a job can be set and removed while it runs.

Example, with a bound of 2 and clocks {a: 7, b: 4}: worker a asks for the values of its next step. It lacks 7 - 4 = 3
steps of b, which is more than 2. So `await_slower` waits until b has reported clock 5.

Invariants: a clock never falls while its worker takes steps; a worker that joins does not set another one back; reports
from before a rest change nothing, however late they arrive; of two orders, the one of the later mode switch is in
force, whichever arrives last. Safe for several threads.
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
"""The clock of a worker that takes steps but has not reported to this server yet."""


class WorkerClocks:
    """The clocks of one asynchronous job on one server. Without a `bound` no worker waits, and no clocks are kept.
    `switches` numbers the job's mode switch that set the bound."""

    def __init__(self, bound: int | None, switches: int = 0) -> None:
        self._bound = bound
        self._switches = switches
        self._changed = threading.Condition()
        self._staleness_max = 0
        self._clocks: dict[Incarnation, int] = {}
        self._rested: dict[Incarnation, int] = {}
        """For each worker, the last epoch that ended with a rest: reports of it may arrive late."""

    @property
    def bound(self) -> int | None:
        return self._bound

    @property
    def staleness_max(self) -> int:
        """Under this bound, the most steps of another worker that were missing in values handed out."""
        with self._changed:
            return self._staleness_max

    def agrees(self, bound: int | None, switches: int) -> bool:
        """Whether no order of the same mode switch has set another bound."""
        return switches != self._switches or bound == self._bound

    def set_bound(self, bound: int | None, switches: int) -> None:
        """Changes the bound, unless the order is not later than the one in force."""
        with self._changed:
            if switches <= self._switches:
                return
            self._switches = switches
            if bound is None or self._bound is None:  # with a new bound, workers report again by themselves
                self._clocks.clear()
            self._bound, self._staleness_max = bound, 0
            self._changed.notify_all()

    def expect(self, workers: Iterable[Incarnation]) -> None:
        """Notes which workers take steps, as the coordinator says. All others that have not reported here do not."""
        if self._bound is None:
            return
        with self._changed:
            reported = {worker: clock for worker, clock in self._clocks.items() if clock != UNREPORTED}
            self._clocks = dict.fromkeys(workers, UNREPORTED) | reported
            self._changed.notify_all()

    def report(self, worker: Incarnation, report: SspReport) -> int | None:
        """Takes a worker's report, after the push of its exchange was counted. Returns the clock of a worker that
        joins."""
        with self._changed:
            clock = self._update(worker, report)
            self._changed.notify_all()
        return clock if report.phase is SspPhase.JOINS else None

    def _update(self, worker: Incarnation, report: SspReport) -> int:
        """Returns the worker's clock from now on."""
        if report.epoch <= self._rested.get(worker, -1):
            return report.clock
        if report.phase is SspPhase.RESTS:
            self._rested[worker] = report.epoch
            self._clocks.pop(worker, None)
            return report.clock
        if self._bound is None:  # the worker has not learned of this yet, or knows a later bound already
            return report.clock
        clock, known = report.clock, self._clocks.get(worker, UNREPORTED)
        if report.phase is SspPhase.JOINS:
            if known != UNREPORTED:
                return known  # it has joined already and repeats its request
            others = [each for other, each in self._clocks.items() if other != worker and each != UNREPORTED]
            clock = min(others, default=clock)
        self._clocks[worker] = max(clock, known)
        return self._clocks[worker]

    def forget(self, workers: Iterable[Incarnation]) -> None:
        """Forgets workers that are refused from now on, so that none of their reports can arrive late."""
        # if a worker reports at this moment, the thread that takes the report forgets it
        if not (self._clocks or self._rested):
            return
        with self._changed:
            for worker in workers:
                self._clocks.pop(worker, None)
                self._rested.pop(worker, None)
            self._changed.notify_all()

    def await_slower(self, worker: Incarnation, report: SspReport, until: float) -> str:
        """Waits until `until` (time.monotonic) at most for workers that are too far behind. Returns what it still waits
        for, or "" if the values may be given. Raises InvalidRequest if the wait could never end."""
        with self._changed:
            while (bound := self._bound) is not None:
                if report.ahead > bound and self._switches:  # the worker has not learned of this bound yet
                    report = replace(report, ahead=bound)
                elif report.ahead > bound:
                    raise InvalidRequest(
                        f"values that worker {worker} uses {report.ahead} steps later, with a bound of {bound}",
                        why="all workers would wait for each other",
                        todo="set worker.exchange to overlapped, or raise job.consistency.staleness",
                    )
                slowest = self._slowest_to_await(worker, report, bound)
                if slowest is None:
                    break
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return _explain(report, bound, *slowest)
            return ""

    def _slowest_to_await(self, worker: Incarnation, report: SspReport, bound: int) -> tuple[Incarnation, int] | None:
        """Returns the slowest of the other workers and its clock, if the values must wait for it."""
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
        return f"worker {slowest}, which has work and has not reported its steps to this server"
    needed = report.clock + report.ahead - bound
    return f"worker {slowest}, which is at clock {clock}, to reach clock {needed} (staleness {bound})"
