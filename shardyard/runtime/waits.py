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

from shardyard.domain import limits
from shardyard.runtime.clock import SystemClock

_CLOCK: Final = SystemClock()
_CHECK_MS: Final = 500
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


class WaitRegistry:
    """Explains waits of threads that block and so cannot tick themselves, any number of them at a time, and tells what
    is waited for now.

    with wait_registry.over(lambda: f"server 3 to apply push {name}"):
        peer.call(...)

    A thread of its own looks after them, while there are any and for a moment longer. Beginning and ending a wait costs
    next to nothing. Safe for several threads. `describe` as for ExplainedWait, but asked by that thread.
    """

    def __init__(self, *, logger: logging.Logger = _logger) -> None:
        self._logger = logger
        self._waits: dict[_Waiting, None] = {}
        self._closed = threading.Event()
        self._starting = threading.Lock()
        self._runs = False
        self._thread: threading.Thread | None = None
        self._begun = 0

    def over(self, describe: Callable[[], str]) -> _Waiting:
        """A wait, for one `with` block."""
        return _Waiting(self, describe)

    @property
    def waiting_for(self) -> str:
        """What has been waited for longer than limits.SHOW_WAIT_MS, the longest wait first; empty where nothing is. At
        most limits.WAITS_CHARACTERS_MAX characters."""
        now_ms = _CLOCK.now_ms()
        found = [
            f"{wait.describe()}, for {_seconds(now_ms - wait.begin_ms)}"
            for wait in list(self._waits)
            if now_ms - wait.begin_ms >= limits.SHOW_WAIT_MS
        ]
        return "; ".join(found)[: limits.WAITS_CHARACTERS_MAX]

    def close(self) -> None:
        """Ends the thread. Safe from any other thread, and to repeat; waits that begin later are not explained."""
        self._closed.set()
        with self._starting:
            thread = self._thread
        if thread is not None:
            thread.join(_CHECK_MS / 1000)

    def _begin(self, wait: _Waiting) -> None:
        self._waits[wait] = None
        self._begun += 1
        if not self._runs:
            with self._starting:
                if not self._runs:
                    self._runs = True
                    self._thread = threading.Thread(target=self._run, name="wait_registry", daemon=True)
                    self._thread.start()

    def _end(self, wait: _Waiting, kind: type[BaseException] | None) -> None:
        del self._waits[wait]
        if wait.explained_ms is not None:
            end = "the wait is over" if kind is None else f"the wait was given up ({kind.__name__})"
            self._logger.info("%s after %s: %s", end, _seconds(_CLOCK.now_ms() - wait.begin_ms), wait.said)

    def _run(self) -> None:
        seen = -1
        while not self._closed.wait(_CHECK_MS / 1000):
            if not self._waits and self._begun == seen and self._is_done():
                return
            seen = self._begun
            for wait in list(self._waits):
                now_ms = _CLOCK.now_ms()
                since_ms = wait.begin_ms if wait.explained_ms is None else wait.explained_ms
                if now_ms - since_ms >= limits.EXPLAIN_WAIT_MS:
                    text = wait.describe()
                    if wait in self._waits:  # else it ended meanwhile
                        wait.explained_ms, wait.said = now_ms, text
                        self._logger.warning("waiting for %s, for %s so far", text, _seconds(now_ms - wait.begin_ms))

    def _is_done(self) -> bool:
        """Whether the thread may end: a wait that begins from now on starts another."""
        with self._starting:
            self._runs = False
            # one that began meanwhile may still have seen that it runs
            self._runs = bool(self._waits)
            return not self._runs


class _Waiting:
    """One wait under a wait_registry; for a `with` block."""

    __slots__ = ("_wait_registry", "begin_ms", "describe", "explained_ms", "said")

    def __init__(self, wait_registry: WaitRegistry, describe: Callable[[], str]) -> None:
        self._wait_registry = wait_registry
        self.describe = describe
        self.begin_ms = 0
        self.explained_ms: int | None = None
        self.said = ""

    def __enter__(self) -> None:
        self.begin_ms = _CLOCK.now_ms()
        self._wait_registry._begin(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._wait_registry._end(self, kind)


def _seconds(duration_ms: int) -> str:
    return f"{duration_ms / 1000:.1f} s"
