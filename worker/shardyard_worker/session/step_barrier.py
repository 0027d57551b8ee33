"""Where the steps of a job end before its data does, as one worker has heard it (docs/internals/ledger.md, rules B8 to
B10).

Owns: the stop, and the halt, that this worker was told of, how far it has come in a synchronous job, and how many
pushes of its own it has begun in an asynchronous one. Invariant: from the moment at which it has heard of one until
that is settled it begins no step, so that what it has said of itself stays true; behind a halt that is settled it
begins none for as long as that lasts, and none of its own while one drains. Must not know: who decides, how it is told,
what a step does.
"""

from __future__ import annotations

import threading

from shardyard.domain.consistency import Stop, SwitchPoint


class StepBarrier:
    """Of one worker in one job. One thread contributes; safe for others beside it."""

    def __init__(self) -> None:
        self._taking = threading.Lock()
        self._reached = 0
        self._own = 0
        self._stop: Stop | None = None
        self._halt: SwitchPoint | None = None

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
        stop = self._stop
        return self._reached if stop is not None and not stop.settled else None

    @property
    def halted(self) -> tuple[int, int] | None:
        """As `heard`, of a halt, with its number before; of one that drains, how many pushes of its own this worker has
        begun."""
        with self._taking:
            halt = self._halt
            if halt is None or halt.settled:
                return None
            return halt.number, self._own if halt.drains else self._reached

    @property
    def drains(self) -> bool:
        """Whether the job is to go over to steps, for which nothing is begun."""
        halt = self._halt
        return halt is not None and halt.drains

    @property
    def halts(self) -> bool:
        """Whether it is settled before which step the job goes over to another mode, which then takes a checkpoint."""
        return self._halt is not None and self._halt.settled

    def take_halt(self, halt: SwitchPoint | None) -> None:
        """The coordinator has said so. None: there is none, or no more."""
        with self._taking:
            self._halt = halt

    def begin_own(self) -> bool:
        """Whether this worker may begin a push of its own now, which it does then."""
        with self._taking:
            if self.drains:
                return False
            self._own += 1
            return True

    def take(self, stop: Stop) -> None:
        """The coordinator has said so; what is settled stays so."""
        with self._taking:
            if self._stop is None or not self._stop.settled:
                self._stop = stop

    def permits(self, step: int) -> bool | None:
        """Whether a step of a synchronous job is computed. None: that is not settled yet."""
        stop, halt = self._stop, self._halt
        if halt is not None and halt.drains:
            halt = None  # over where there are steps
        if stop is not None and not stop.settled:
            return None
        if stop is not None and step >= stop.step:
            return False
        return True if halt is None or (halt.settled and step < halt.step) else None

    def may_begin(self, step: int) -> bool | None:
        """As `permits`, where this worker contributes to the step at once if it is."""
        # first said, then looked at: who has seen no stop is in what is said once there is one
        self._reached = max(self._reached, step + 1)
        return self.permits(step)
