"""Waits that say what they wait for (promise 7: never a mystery hang).

A wait that is shorter than limits.EXPLAIN_WAIT_MS logs nothing. A longer one logs a warning each time that these
milliseconds have passed, and a line when it is over. `ExplainedWait` is for callers that wait in slices and call `tick`
between them. `WaitRegistry` is for callers that block. docs/reference/waits.md lists all waits.
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
    """Explains a wait of a caller that waits in slices.

    with ExplainedWait(lambda: f"server 3 to apply step {step}") as wait:
        while not condition.wait(min(slice_ms, wait.tick()) / 1000):
            ...

    `describe` says what is missing (role, id, step, sequence, partition). It is called again for each line, and must
    not block. Only one thread calls `tick`; any thread may read `description` and `waited_ms`.
    """

    def __init__(
        self,
        describe: Callable[[], str],
        *,
        after_ms: int | None = None,
        clock_ms: Callable[[], int] = _CLOCK.now_ms,
        logger: logging.Logger = _logger,
    ) -> None:
        """`after_ms`: when the first warning is due, if not after limits.EXPLAIN_WAIT_MS."""
        self._describe = describe
        self._after_ms = after_ms
        self._clock_ms = clock_ms
        self._logger = logger
        self._begin_ms: int | None = None
        self._due_ms = 0
        self._explained = False

    def __enter__(self) -> Self:
        self._begin_ms = self._clock_ms()
        self._due_ms = self._begin_ms + (self._after_ms or limits.EXPLAIN_WAIT_MS)
        self._explained = False
        return self

    def tick(self) -> int:
        """Logs a warning if one is due. Returns the milliseconds until the next one is due, at least 1."""
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
        """What the wait is for; None outside of the `with` block."""
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
            self._logger.info("%s after %s", _ending(kind), _seconds(waited_ms))


class WaitRegistry:
    """Explains waits of threads that block, and reports what they wait for. Any number of threads may wait at a time.

    with wait_registry.over(lambda: f"server 3 to apply push {name}"):
        peer.call(...)

    A background thread logs the warnings; it runs while there are waits, and a moment longer. To begin and end a wait
    costs almost nothing. Safe for several threads. The background thread calls `describe`, as for ExplainedWait.
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
        """The waits that have lasted longer than limits.SHOW_WAIT_MS, the longest first; empty if there are none. At
        most limits.WAITS_CHARACTERS_MAX characters."""
        now_ms = _CLOCK.now_ms()
        found = [
            f"{wait.describe()}, for {_seconds(now_ms - wait.begin_ms)}"
            for wait in list(self._waits)
            if now_ms - wait.begin_ms >= limits.SHOW_WAIT_MS
        ]
        return "; ".join(found)[: limits.WAITS_CHARACTERS_MAX]

    def close(self) -> None:
        """Ends the background thread. Later waits are not explained. Any other thread may call this, also again."""
        self._closed.set()
        with self._starting:
            thread = self._thread
        if thread is not None:
            thread.join(_CHECK_MS / 1000)

    def _start(self) -> None:
        with self._starting:
            if not self._runs:
                self._runs = True
                self._thread = threading.Thread(target=self._run, name="wait_registry", daemon=True)
                self._thread.start()

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
                    if wait in self._waits:  # it has not ended meanwhile
                        wait.explained_ms, wait.said = now_ms, text
                        self._logger.warning("waiting for %s, for %s so far", text, _seconds(now_ms - wait.begin_ms))

    def _is_done(self) -> bool:
        """Whether the thread may end. A wait that begins after this starts another thread."""
        with self._starting:
            self._runs = False
            # a wait that began meanwhile may have seen this thread, and started none
            self._runs = bool(self._waits)
            return not self._runs


class _Waiting:
    """One wait in a WaitRegistry, for a `with` block."""

    __slots__ = ("_wait_registry", "begin_ms", "describe", "explained_ms", "said")

    def __init__(self, wait_registry: WaitRegistry, describe: Callable[[], str]) -> None:
        self._wait_registry = wait_registry
        self.describe = describe
        self.begin_ms = 0
        self.explained_ms: int | None = None
        self.said = ""

    def __enter__(self) -> None:
        self.begin_ms = _CLOCK.now_ms()
        registry = self._wait_registry
        registry._waits[self] = None
        registry._begun += 1
        if not registry._runs:
            registry._start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del self._wait_registry._waits[self]
        if self.explained_ms is not None:
            logger, waited = self._wait_registry._logger, _seconds(_CLOCK.now_ms() - self.begin_ms)
            logger.info("%s after %s: %s", _ending(kind), waited, self.said)


def _ending(kind: type[BaseException] | None) -> str:
    return "the wait is over" if kind is None else f"the wait was given up ({kind.__name__})"


def _seconds(duration_ms: int) -> str:
    return f"{duration_ms / 1000:.1f} s"
