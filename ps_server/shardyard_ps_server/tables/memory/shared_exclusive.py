"""Who changes a table, and who needs a moment in which nobody does.

Owns: the two ways in. Invariant: nobody is inside beside one who is alone; whoever wants to be alone waits only for
those who are inside. Must not know: what they do there.
"""

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
        """Enters beside any number of other threads."""
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
        """Enters when no other thread is inside, and keeps others out."""
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
