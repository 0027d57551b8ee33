"""Whether a dead process is started again, and when: a role of a yard, a training process, an evaluator.

Owns: the budget (so many restarts of one process within a window of time) and the back-off between them. Invariants: a
process is restarted at most `restarts_max` times within any `window_ms`. The pause before a restart doubles with each
restart still in the window, up to BACKOFF_MS_MAX. A process that was given up stays given up. Must not know: processes,
clocks, what a process does.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final

LEFT_IN_ORDER: Final = 128 + signal.SIGTERM
"""The exit code of a training process that was told to leave before its work was done. It is not started again."""
BACKOFF_MS: Final = 200
"""The pause before the first restart."""
BACKOFF_MS_MAX: Final = 5_000


@dataclass(frozen=True, slots=True)
class RestartAt:
    """Start the process at `at_ms`: its restart `number` (from 1) of those that the window allows."""

    at_ms: int
    number: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The process is not started any more. `why` says so in words."""

    why: str


class RestartPolicy:
    """The budget of each of several processes, by name. For one thread. `setting`: the setting that gives
    `restarts_max`, for the words."""

    def __init__(self, *, restarts_max: int, window_ms: int, setting: str) -> None:
        self._setting = setting
        self._restarts_max = restarts_max
        self._window_ms = window_ms
        self._restarted_ms: dict[str, list[int]] = {}
        self._given_up: dict[str, GivenUp] = {}

    def died(self, name: str, now_ms: int) -> RestartAt | GivenUp:
        """The process ended unexpectedly, or could not be started."""
        if name in self._given_up:
            return self._given_up[name]
        # a restart that is decided takes place, so it counts from now on
        recent = [at_ms for at_ms in self._restarted_ms.get(name, ()) if at_ms > now_ms - self._window_ms]
        if len(recent) >= self._restarts_max:
            self._given_up[name] = GivenUp(self._reason(len(recent)))
            return self._given_up[name]
        pause_ms = min(BACKOFF_MS_MAX, BACKOFF_MS << min(len(recent), 16))
        again = RestartAt(now_ms + pause_ms, len(recent) + 1)
        self._restarted_ms[name] = [*recent, again.at_ms]
        return again

    def _reason(self, recent: int) -> str:
        if not recent:
            return f"restarts are off ({self._setting} is 0)"
        times = "once" if recent == 1 else f"{recent} times"
        return f"it was restarted {times} within {self._window_ms / 1000:g} s ({self._setting})"
