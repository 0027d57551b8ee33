"""A wait that says what it waits for (promise 7: never a mystery hang).

Owns: when a wait is explained, and in which words. Invariants: a wait shorter than limits.EXPLAIN_WAIT_MS logs nothing;
a longer one logs a warning every so many milliseconds, and a line when it is over.
Must not know: how one waits. The caller waits in slices and calls `tick` between them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from shardyard.ground import limits
from shardyard.runtime.clock import SystemClock

_CLOCK: Final = SystemClock()
_logger = logging.getLogger(__name__)


class ExplainedWait:
    """Explains a wait while it lasts.

    with ExplainedWait(lambda: f"server 3 to apply step {step}") as wait:
        while not condition.wait(min(slice_ms, wait.tick()) / 1000):
            ...

    `describe` says what is missing (role, id, step, sequence, partition); it is asked anew for each line and must not
    block. One thread ticks; any thread may read `description` and `waited_ms`.
    """

    def __init__(
        self,
        describe: Callable[[], str],
        *,
        clock_ms: Callable[[], int] = _CLOCK.now_ms,
        logger: logging.Logger = _logger,
    ) -> None:
        self._describe = describe
        self._clock_ms = clock_ms
        self._logger = logger
        self._begin_ms: int | None = None
        self._due_ms = 0
        self._explained = False

    def __enter__(self) -> Self:
        self._begin_ms = self._clock_ms()
        self._due_ms = self._begin_ms + limits.EXPLAIN_WAIT_MS
        self._explained = False
        return self

    def tick(self) -> int:
        """Logs a warning if one is due. Returns the milliseconds, at least 1, until the next is."""
        assert self._begin_ms is not None, "tick belongs inside the with block"
        now_ms = self._clock_ms()
        if now_ms >= self._due_ms:
            self._due_ms = now_ms + limits.EXPLAIN_WAIT_MS
            self._explained = True
            waited_ms = now_ms - self._begin_ms
            self._logger.warning("waiting for %s, for %s so far", self._describe(), _seconds(waited_ms))
        return self._due_ms - now_ms

    @property
    def description(self) -> str | None:
        """What is waited for now; None before and after."""
        return None if self._begin_ms is None else self._describe()

    @property
    def waited_ms(self) -> int:
        begin_ms = self._begin_ms
        return 0 if begin_ms is None else self._clock_ms() - begin_ms

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        waited_ms = self.waited_ms
        self._begin_ms = None
        if self._explained:
            end = "the wait is over" if kind is None else f"the wait was given up ({kind.__name__})"
            self._logger.info("%s after %s", end, _seconds(waited_ms))


def _seconds(duration_ms: int) -> str:
    return f"{duration_ms / 1000:.1f} s"
