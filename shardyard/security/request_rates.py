"""How many requests a second one caller may make.

Each caller has requests for a second at once, and gets new ones at a constant rate: the generic cell rate algorithm
(ITU-T I.371), which keeps one number for each caller. Safe for several threads. Must not know: what a request is, how
its caller is told.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from shardyard.domain.errors import NotReady

log = logging.getLogger("shardyard.serving")

BURST_S: Final = 1.0
TELL_EVERY_S: Final = 60.0
_KNOWN_MAX: Final = 4_096


class RequestRates:
    """`per_s`: requests a second of each caller. `what`: their name in the log. `now_s`: a clock that never goes back.

    >>> rates = RequestRates(10, now_s=lambda: 5.0)
    >>> sum(rates.admits("worker a") for _ in range(100))
    10
    >>> rates.due_s("worker a")
    5.1
    """

    def __init__(
        self,
        per_s: int,
        what: str = "requests a second (quotas.requests_per_s_max)",
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.per_s = per_s
        self._what = what
        self._now_s = now_s
        self._lock = threading.Lock()
        self._next_s: dict[str, float] = {}
        """When the next request of a caller would be due, had it made them evenly."""
        self._tell_s: dict[str, float] = {}
        """When the log may say again that a caller makes too many."""

    def admits(self, caller: str) -> bool:
        """Whether the caller may make a request now. If so, it is counted."""
        with self._lock:
            now_s = self._now_s()
            next_s = max(self._next_s.get(caller, 0.0), now_s)
            if next_s + 1 / self.per_s > now_s + BURST_S + 1e-9:
                self._tell(caller, now_s)
                return False
            self._note(caller, next_s, now_s)
            return True

    def due_s(self, caller: str) -> float:
        """Counts a request, and returns when it may be served, on the clock: now or later."""
        with self._lock:
            now_s = self._now_s()
            next_s = max(self._next_s.get(caller, 0.0), now_s)
            self._note(caller, next_s, now_s)
            due_s = max(now_s, next_s + 1 / self.per_s - BURST_S)
            if due_s > now_s:
                self._tell(caller, now_s)
            return due_s

    def check(self, caller: str) -> None:
        """Counts a request. Raises NotReady if the caller has made too many."""
        if not self.admits(caller):
            raise NotReady(
                f"{caller} makes more than {self.per_s} requests a second",
                why="quotas.requests_per_s_max leaves the rest for others",
                todo="ask again in a moment; the processes of a job do so by themselves",
            )

    def _tell(self, caller: str, now_s: float) -> None:
        if now_s >= self._tell_s.get(caller, 0.0):
            if len(self._tell_s) >= _KNOWN_MAX:
                self._tell_s.clear()
            self._tell_s[caller] = now_s + TELL_EVERY_S
            log.warning("%s is held to %d %s", caller or "a caller", self.per_s, self._what)

    def _note(self, caller: str, next_s: float, now_s: float) -> None:
        if len(self._next_s) >= _KNOWN_MAX and caller not in self._next_s:
            self._next_s = {each: at_s for each, at_s in self._next_s.items() if at_s > now_s}
        self._next_s[caller] = next_s + 1 / self.per_s
