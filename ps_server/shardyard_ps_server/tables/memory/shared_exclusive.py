"""A lock that threads hold together, or one thread alone. A thread that wants to be alone waits only for the threads
that are inside: new ones wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SharedExclusiveLock:
    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._alone = False
        self.together = _Together(self)
        """Inside a block of it other threads may be inside such blocks too."""

    def enter(self) -> None:
        """Begins what a block of `together` does. `leave` must follow."""
        with self._changed:
            while self._alone:
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            if self._alone and self._inside == 0:
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block no other thread is inside."""
        with self._changed:
            while self._alone:
                self._changed.wait()
            self._alone = True
            while self._inside:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


class _Together:
    """An object, because each push of a table enters one, and a context manager made of a generator is slower."""

    def __init__(self, lock: SharedExclusiveLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.enter()

    def __exit__(self, *_: object) -> None:
        self._lock.leave()
