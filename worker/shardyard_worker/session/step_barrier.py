"""The step at which a job stops or changes its mode, as one worker knows it (docs/internals/ledger.md, rules B8 to
B10).

Owns: the stop and the switch point that this worker knows of, how far it has come in a synchronous job, and how many
own pushes it has begun in an asynchronous one. Invariants: from the moment at which this worker learns of a stop or
switch point until it is settled, it begins no step, so that what it has reported stays true. It begins no step after a
settled switch point while that lasts. Before steps begin, it begins no push of its own. Must not know: which process
decides, how the decision comes here, what a step does.
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
        self._switch_point: SwitchPoint | None = None
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
    def switch_report(self) -> tuple[int, int] | None:
        """The same for a switch point, after its number. If the job switches to steps: how many pushes of its own this
        worker has begun."""
        with self._lock:
            point = self._switch_point
            if point is None or point.settled:
                return None
            return point.number, self._own if point.to_steps else self._reached

    @property
    def to_steps(self) -> bool:
        """Whether the job is about to change to synchronous steps."""
        point = self._switch_point
        return point is not None and point.to_steps

    @property
    def switches(self) -> bool:
        """Whether the step is settled before which the job changes its mode. It then takes a checkpoint."""
        point = self._switch_point
        return point is not None and point.settled

    def is_at_switch(self, step: int) -> bool:
        """Whether the job changes before this step, and the step is fixed. Then all workers stop there."""
        point = self._switch_point
        return point is not None and point.settled and not point.to_steps and step >= point.step

    def take_switch_point(self, point: SwitchPoint | None) -> None:
        """Takes the coordinator's switch point. None: there is none, or the switch is over."""
        with self._lock:
            self._switch_point = point

    def take_stop(self, stop: Stop) -> None:
        """Takes the coordinator's stop. A settled stop does not change."""
        with self._lock:
            if self.stop is None or not self.stop.settled:
                self.stop = stop

    def begin_own(self) -> bool:
        """Begins a push of this worker's own, if that is allowed now. Returns whether it is."""
        with self._lock:
            if self.to_steps:
                return False
            self._own += 1
            return True

    def permits(self, step: int) -> bool | None:
        """Whether a step of a synchronous job is computed. None: not settled yet."""
        stop, point = self.stop, self._switch_point
        if point is not None and point.to_steps:
            point = None  # over where there are steps
        if stop is not None and not stop.settled:
            return None
        if stop is not None and step >= stop.step:
            return False
        return True if point is None or (point.settled and step < point.step) else None

    def may_begin(self, step: int) -> bool | None:
        """As `permits`, for a worker that contributes at once if the answer is True."""
        # note the step before looking: a worker that sees no stop is then included in what it reports once there is one
        self._reached = max(self._reached, step + 1)
        return self.permits(step)
