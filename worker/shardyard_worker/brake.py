"""Where the job ends before its data does, as one worker has heard it (docs/ledger.md, rule B9).

Owns: the stop that this worker was told of, and how far it has come in a synchronous job. Invariant: from the moment at
which it has heard of a stop until that is settled it begins no step, so that what it has said of itself stays true.
Must not know: who decides, how it is told, what a step does.
"""

from __future__ import annotations

import threading

from shardyard.ground.types import Stop


class Brake:
    """Of one worker in one job. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reached = 0
        self._stop: Stop | None = None

    @property
    def stop(self) -> Stop | None:
        return self._stop

    @property
    def end(self) -> int | None:
        """The step before which a synchronous job ends, once that is settled."""
        stop = self._stop
        return stop.step if stop is not None and stop.settled else None

    @property
    def heard(self) -> int | None:
        """What the coordinator waits for: the first step to which this worker has not contributed. None where it waits
        for nothing."""
        with self._lock:
            return self._reached if self._stop is not None and not self._stop.settled else None

    def take(self, stop: Stop) -> None:
        """The coordinator has said so; what is settled stays so."""
        with self._lock:
            if self._stop is None or not self._stop.settled:
                self._stop = stop

    def permits(self, step: int) -> bool | None:
        """Whether a step of a synchronous job is computed. None: that is not settled yet."""
        with self._lock:
            return self._permits(step)

    def may_begin(self, step: int) -> bool | None:
        """As `permits`, where this worker contributes to the step at once if it is."""
        with self._lock:
            permitted = self._permits(step)
            if permitted:
                self._reached = max(self._reached, step + 1)
            return permitted

    def _permits(self, step: int) -> bool | None:
        stop = self._stop
        if stop is None:
            return True
        if stop.settled:
            return step < stop.step
        return True if step < self._reached else None
