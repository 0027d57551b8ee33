"""The values of a job with bounded staleness wait for its slowest worker.

Owns: the job's clocks on this server, and the wait. Invariant: what a worker has pushed is counted before its clock
says so. Safe for several threads. Must not know: values, partitions, how a wait is said to the worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from shardyard.ground.errors import InvalidRequest
from shardyard.ground.types import Incarnation, Pace, Stride
from shardyard_ps_server.clocks import UNHEARD, Clocks


class Pacing:
    """Of one job."""

    def __init__(self, bound: int) -> None:
        self._clocks = Clocks(bound)
        self._changed = threading.Condition()

    @property
    def bound(self) -> int:
        return self._clocks.bound

    def expect(self, workers: Iterable[Incarnation]) -> None:
        with self._changed:
            self._clocks.expect(workers)
            self._changed.notify_all()

    def hear(self, worker: Incarnation, pace: Pace) -> int | None:
        """Of an exchange whose push, if it had one, is counted. The clock of one that joins."""
        with self._changed:
            clock = self._clocks.hear(worker, pace)
            self._changed.notify_all()
            return clock if pace.stride is Stride.JOINS else None

    def forget(self, workers: Iterable[Incarnation]) -> None:
        """They are refused from now on."""
        with self._changed:
            for worker in workers:
                self._clocks.forget(worker)
            self._changed.notify_all()

    def await_others(self, worker: Incarnation, pace: Pace, until: float) -> str:
        """Waits until `until` (time.monotonic) for nobody to be too far behind. For whom it waits still; empty: for
        nobody. Raises InvalidRequest where it would wait for ever."""
        if pace.ahead > self.bound:
            raise InvalidRequest(
                f"values that worker {worker} uses {pace.ahead} steps later, with a bound of {self.bound}",
                why="all workers would wait for each other",
                todo="set worker.window to no more than job.consistency.staleness",
            )
        with self._changed:
            while (found := self._clocks.behind(worker, pace)) is not None:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return self._explain(pace, *found)
            return ""

    def _explain(self, pace: Pace, slowest: Incarnation, clock: int) -> str:
        if clock == UNHEARD:
            return f"worker {slowest}, which has work and has not said here how far it is"
        wanted = pace.clock + pace.ahead - self.bound
        return f"worker {slowest}, which has taken {clock} steps, to have taken {wanted} (staleness {self.bound})"

    @property
    def staleness_max(self) -> int:
        """The most steps of a worker that were missing in values that were given to another one."""
        with self._changed:
            return self._clocks.staleness_max
