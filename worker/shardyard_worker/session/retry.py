"""Retries calls: with a budget, and a growing pause with jitter (docs/reference/protocol.md, "Retries").

Invariant: only calls that are safe to repeat go through here: reads, and writes with a name. Must not know: what is
called.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from shardyard.domain import errors

R = TypeVar("R")

PAUSE_MS = 20
PAUSE_MS_MAX = 500
MOVING_MS = 50
"""The pause while a partition moves, which takes a second or so."""


class RetryPolicy:
    """Repeats a call while the peer does not answer or is not ready.

    `check` raises when a retry has become pointless (the job has failed). After `budget_ms` without an answer
    Unavailable is raised, unless `worthwhile` gives a reason to go on, in words. NotReady is an answer: it is retried
    for as long as `check` allows. While a partition moves to another server, `refresh` is called before each retry. The
    caller explains the wait with `explanation`.
    """

    def __init__(
        self,
        budget_ms: int,
        check: Callable[[], None],
        waiting_for: str,
        *,
        worthwhile: Callable[[], str] = lambda: "",
        refresh: Callable[[], None] = lambda: None,
        pause_ms_max: int = PAUSE_MS_MAX,
    ) -> None:
        self._refresh = refresh
        self._pause_ms_max = pause_ms_max
        self._worthwhile = worthwhile
        self._budget_ms = budget_ms
        self._check = check
        self._waiting_for = waiting_for
        self._last = ""
        # jitter only spreads retries over time, so it needs no seed
        self._random = random.Random()  # noqa: S311

    @property
    def explanation(self) -> str:
        """Says what is waited for, why the last attempt failed, and why it goes on. Any thread may ask."""
        hope = self._worthwhile()
        return self._waiting_for + (f" ({self._last})" if self._last else "") + (f"; {hope}" if hope else "")

    def call(self, attempt: Callable[[], R]) -> R:
        pause_ms = PAUSE_MS
        silent_since = time.monotonic()
        while True:
            self._check()
            try:
                return attempt()
            except errors.NotReady as error:
                self._last = error.what
                silent_since = time.monotonic()
                if errors.SEALED in error.facts:
                    pause_ms = MOVING_MS
                    self._refresh()
            except errors.Unavailable as error:
                self._last = error.what
                self._check()
                if self._worthwhile():
                    silent_since = time.monotonic()
                if (time.monotonic() - silent_since) * 1000 >= self._budget_ms:
                    raise
            time.sleep(pause_ms * self._random.uniform(0.5, 1.0) / 1000)
            pause_ms = min(2 * pause_ms, self._pause_ms_max)
