"""A lock that threads hold together, or one thread alone. A thread that wants to be alone waits only for the threads
that are inside: new ones wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SharedExclusiveLock:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside the block other threads may be inside `together` too."""
        with self._changed:
            while self._alone:
                self._changed.wait()
            self._inside += 1
        try:
            yield
        finally:
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
