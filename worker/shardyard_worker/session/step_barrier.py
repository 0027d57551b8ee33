"""The step at which a job stops or changes its mode, as one worker knows it (docs/internals/ledger.md, rules B8 to
B10).

Owns: the stop and the halt that this worker knows of, how far it has come in a synchronous job, and how many own
pushes it has begun in an asynchronous one. Invariants: from the moment at which this worker learns of a stop or halt
until it is settled, the worker begins no step, so that what it has reported stays true. After a settled halt it begins
no step while the halt lasts. While a halt drains, it begins no push of its own. Must not know: which process decides,
how the decision comes here, what a step does.
"""

from __future__ import annotations

import threading

from shardyard.domain.consistency import Stop, SwitchPoint


class StepBarrier:
    """The barrier of one worker in one job. One thread contributes; other threads may read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reached = 0
        self._own = 0
        self._halt: SwitchPoint | None = None
        self.stop: Stop | None = None

    @property
    def end(self) -> int | None:
        """The step before which a synchronous job ends. None until it is settled."""
        stop = self.stop
        return stop.step if stop is not None and stop.settled else None

    @property
    def stop_report(self) -> int | None:
        """What the coordinator needs to settle the stop: the first step to which this worker has not contributed. None
        if there is nothing to settle."""
        stop = self.stop
        return self._reached if stop is not None and not stop.settled else None

    @property
    def halt_report(self) -> tuple[int, int] | None:
        """The same for a halt, after the halt's number. If the halt drains: how many own pushes this worker has
        begun."""
        with self._lock:
            halt = self._halt
            if halt is None or halt.settled:
                return None
            return halt.number, self._own if halt.drains else self._reached

    @property
    def drains(self) -> bool:
        """Whether the job is draining before it changes to synchronous steps."""
        halt = self._halt
        return halt is not None and halt.drains

    @property
    def halts(self) -> bool:
        """Whether the step is settled before which the job changes its mode. It then takes a checkpoint."""
        halt = self._halt
        return halt is not None and halt.settled

    def take_halt(self, halt: SwitchPoint | None) -> None:
        """Takes the coordinator's halt. None: there is no halt, or it is over."""
        with self._lock:
            self._halt = halt

    def take_stop(self, stop: Stop) -> None:
        """Takes the coordinator's stop. A settled stop does not change."""
        with self._lock:
            if self.stop is None or not self.stop.settled:
                self.stop = stop

    def begin_own(self) -> bool:
        """Begins a push of this worker's own, if that is allowed now. Returns whether it is."""
        with self._lock:
            if self.drains:
                return False
            self._own += 1
            return True

    def permits(self, step: int) -> bool | None:
        """Whether a step of a synchronous job is computed. None: not settled yet."""
        stop, halt = self.stop, self._halt
        if halt is not None and halt.drains:
            halt = None  # over where there are steps
        if stop is not None and not stop.settled:
            return None
        if stop is not None and step >= stop.step:
            return False
        return True if halt is None or (halt.settled and step < halt.step) else None

    def may_begin(self, step: int) -> bool | None:
        """As `permits`, for a worker that contributes at once if the answer is True."""
        # note the step before looking: a worker that sees no stop is then included in what it reports once there is one
        self._reached = max(self._reached, step + 1)
        return self.permits(step)
