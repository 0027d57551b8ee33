"""A wait that says what it waits for (promise 7: never a mystery hang).

Owns: when a wait is explained, and in which words. Invariants: a wait shorter than limits.EXPLAIN_WAIT_MS logs nothing;
a longer one logs a warning every so many milliseconds, and a line when it is over.
Must not know: how one waits. The caller waits in slices and calls `tick` between them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from shardyard.ground import limits
from shardyard.runtime.clock import SystemClock

_CLOCK: Final = SystemClock()
_VIGIL_MS: Final = 500
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


class Vigil:
    """Explains the waits of a thread that blocks and so cannot tick itself. One wait at a time; a thread of its own
    looks after it, from the first wait until `close`. Beginning and ending a wait costs next to nothing."""

    def __init__(self, *, logger: logging.Logger = _logger) -> None:
        self._logger = logger
        self._describe: Callable[[], str] | None = None
        self._begin_ms = 0
        self._explained_ms: int | None = None
        self._closed = threading.Event()
        self._runs = False

    def over(self, describe: Callable[[], str]) -> Self:
        """A wait, for a `with` block."""
        self._begin_ms = _CLOCK.now_ms()
        self._explained_ms = None
        self._describe = describe
        return self

    def __enter__(self) -> None:
        if not self._runs:
            self._runs = True
            threading.Thread(target=self._run, name="vigil", daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._describe = None
        if self._explained_ms is not None:
            end = "the wait is over" if kind is None else f"the wait was given up ({kind.__name__})"
            self._logger.info("%s after %s", end, _seconds(_CLOCK.now_ms() - self._begin_ms))

    def close(self) -> None:
        """Ends the thread. Safe from any thread, and to repeat."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_VIGIL_MS / 1000):
            describe, begin_ms = self._describe, self._begin_ms
            now_ms = _CLOCK.now_ms()
            since_ms = begin_ms if self._explained_ms is None else self._explained_ms
            if describe is not None and now_ms - since_ms >= limits.EXPLAIN_WAIT_MS:
                text = describe()
                if describe is self._describe:  # else it ended meanwhile
                    self._explained_ms = now_ms
                    self._logger.warning("waiting for %s, for %s so far", text, _seconds(now_ms - begin_ms))


def _seconds(duration_ms: int) -> str:
    return f"{duration_ms / 1000:.1f} s"
