"""Runs actions between two pushes, when the error feedback has whole pushes only.

Owns: whether a push is in flight. Invariants: actions of other threads run between two pushes, in the order in which
they were requested. If no push is in flight, an action runs at once; otherwise the training thread runs it when the
push ends. No push begins while an action runs. Must not know: what is pushed, what an action does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

R = TypeVar("R")


class PushBoundary:
    """The training thread calls `begin`, `end` and `held`; any thread may call the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = False
        self._due: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._closed = False

    def begin(self) -> None:
        """A push begins to change the error feedback. A push that was never ended counts as ended."""
        with self._lock:
            self._carry_out()
            self._under_way = True

    def end(self) -> None:
        """The push counts, or is undone. Does nothing if there is none."""
        with self._lock:
            self._under_way = False
            self._carry_out()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No action runs inside this context. The training thread may use it during a push too."""
        with self._lock:
            yield

    def when_free(self, action: Callable[[], R]) -> Future[R]:
        """Runs an action between two pushes. `close` cancels it."""
        done: Future[R] = Future()
        with self._lock:
            if self._closed:
                done.cancel()
                done.set_running_or_notify_cancel()
            else:
                self._due.append((done, action))
                if not self._under_way:
                    self._carry_out()
        return done

    def close(self) -> None:
        """Cancels all actions, and any that is requested later."""
        with self._lock:
            self._closed = True
            due, self._due = self._due, []
        for done, _ in due:
            done.cancel()
            done.set_running_or_notify_cancel()

    def _carry_out(self) -> None:
        due, self._due = self._due, []
        for done, action in due:
            try:
                done.set_result(action())
            except Exception as error:  # noqa: BLE001 - the error belongs to the thread that asked
                done.set_exception(error)
