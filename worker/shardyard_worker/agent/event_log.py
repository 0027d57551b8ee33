"""The events of a launch, numbered, for any number of watchers.

Owns: the bounded log of a launch's events, and the wait for new ones. Invariants: numbers grow by one; when
there are too many events, the oldest are dropped; the event that ends the launch is never dropped. Must not know:
processes, gRPC.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from shardyard.domain import limits
from shardyard.wire.v1 import agent_pb2 as wire

OUTPUT_CHARACTERS_MAX: Final = 16 * limits.MIB
"""Characters of output lines kept of a launch, all together."""


class EventLog:
    """Safe for several threads. `first`: the number of the first event."""

    def __init__(
        self, *, first: int = 0, events_max: int = limits.LAUNCH_EVENTS_MAX, characters_max: int = OUTPUT_CHARACTERS_MAX
    ) -> None:
        self._events_max = events_max
        self._characters_max = characters_max
        self._kept: deque[wire.LaunchEvent] = deque()
        self._first = first
        self._characters = 0
        self._ended = False
        self._changed = threading.Condition()

    @property
    def ended(self) -> bool:
        with self._changed:
            return self._ended

    @property
    def next_number(self) -> int:
        with self._changed:
            return self._first + len(self._kept)

    def append(self, event: wire.LaunchEvent) -> None:
        """Numbers the event and keeps it."""
        with self._changed:
            event.number = self._first + len(self._kept)
            self._kept.append(event)
            self._characters += len(event.output.line)
            self._ended = self._ended or event.HasField("ended")
            while len(self._kept) > 1 and (
                len(self._kept) > self._events_max or self._characters > self._characters_max
            ):
                self._characters -= len(self._kept.popleft().output.line)
                self._first += 1
            self._changed.notify_all()

    def after(self, number: int, *, wait_ms: int, batch_max: int = 256) -> list[wire.LaunchEvent]:
        """Returns events from `number` on, or from the oldest kept. Waits at most `wait_ms` for one; returns an empty
        list if none came."""
        with self._changed:
            self._changed.wait_for(lambda: number < self._first + len(self._kept) or self._ended, wait_ms / 1000)
            begin = max(number - self._first, 0)
            return [self._kept[place] for place in range(begin, min(begin + batch_max, len(self._kept)))]
