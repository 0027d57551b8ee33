"""The time between two pushes, when what error feedback remembers is that of a whole number of pushes.

Owns: whether a push is under way. Invariants: what another thread wants to do with the memory is done between two
pushes, in the order in which it was wanted: at once where none is under way, else by the thread that trains when it has
ended; no push begins meanwhile. Must not know: what is pushed, what is remembered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

R = TypeVar("R")


class PushBoundary:
    """`begin`, `end` and `held` are for the thread that trains, the others for any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = False
        self._due: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._closed = False

    def begin(self) -> None:
        """A push begins to change what is remembered. One that was never ended is taken as ended."""
        with self._lock:
            self._carry_out()
            self._under_way = True

    def end(self) -> None:
        """It counts, or is undone. Where none is under way this does nothing."""
        with self._lock:
            self._under_way = False
            self._carry_out()

    @contextmanager
    def held(self) -> Iterator[None]:
        """For what the thread that trains does itself, also in the midst of a push."""
        with self._lock:
            yield

    def when_free(self, action: Callable[[], R]) -> Future[R]:
        """Has this done between two pushes; cancelled where the worker leaves before."""
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
        """What is due is given up, and so is what comes."""
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
            except Exception as error:  # noqa: BLE001 - whoever wanted it done is told, not the thread that trains
                done.set_exception(error)
