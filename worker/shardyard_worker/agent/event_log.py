"""The events of a launch, numbered, for any number of watchers.

Owns: the bounded log of a launch's events, and the wait for new ones. Invariants: numbers grow by one from 0; when
there are too many events, the oldest are dropped; the event that ends the launch is never dropped. Must not know:
processes, gRPC.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from shardyard.domain import limits
from shardyard_worker.agent.supervision import Happening, LaunchEnded, ProcessOutput

OUTPUT_CHARACTERS_MAX: Final = 16 * limits.MIB
"""Characters of output lines kept of a launch, all together."""


class EventLog:
    """Safe for several threads."""

    def __init__(
        self, *, events_max: int = limits.LAUNCH_EVENTS_MAX, characters_max: int = OUTPUT_CHARACTERS_MAX
    ) -> None:
        self._events_max = events_max
        self._characters_max = characters_max
        self._kept: deque[Happening] = deque()
        self._first = 0
        self._characters = 0
        self._ended = False
        self._changed = threading.Condition()

    @property
    def ended(self) -> bool:
        with self._changed:
            return self._ended

    def append(self, happening: Happening) -> None:
        with self._changed:
            self._kept.append(happening)
            self._characters += _characters(happening)
            self._ended = self._ended or isinstance(happening, LaunchEnded)
            while len(self._kept) > 1 and (
                len(self._kept) > self._events_max or self._characters > self._characters_max
            ):
                self._characters -= _characters(self._kept.popleft())
                self._first += 1
            self._changed.notify_all()

    def after(self, number: int, *, wait_ms: int, batch_max: int = 256) -> list[tuple[int, Happening]]:
        """Returns events from `number` on (or from the oldest kept), with their numbers. Waits at most `wait_ms` for
        one; returns an empty list if none came."""
        with self._changed:
            self._changed.wait_for(lambda: number < self._first + len(self._kept) or self._ended, wait_ms / 1000)
            begin = max(number - self._first, 0)
            end = min(begin + batch_max, len(self._kept))
            return [(self._first + place, self._kept[place]) for place in range(begin, end)]


def _characters(happening: Happening) -> int:
    return len(happening.line) if isinstance(happening, ProcessOutput) else 0
