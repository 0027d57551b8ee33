"""Frees memory that was replaced, when no look-up can still read it (epoch-based reclamation).

Owns: how many look-ups read, and the memory that waits for them. Invariants: retired memory stays until all look-ups
that were running have ended, which is so after two epochs; no thread waits; a look-up frees nothing itself, since
unmapping would wait for pages that come elsewhere. Must not know: what the memory is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class EpochReclaim:
    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._epoch = 0
        self._readers = [0, 0]
        """How many look-ups run that began in the even, and in the odd epoch."""
        self._retired: list[tuple[int, Any]] = []
        self._gone: list[Any] = []
        """Memory that no look-up reads any more, and that is not freed yet."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        epoch = self.begin()
        try:
            yield
        finally:
            self.end(epoch)

    def begin(self) -> int:
        """A look-up begins. `end` must follow, with the number that this returns."""
        with self._changing:
            epoch = self._epoch
            self._readers[epoch & 1] += 1
        return epoch

    def end(self, epoch: int) -> None:
        with self._changing:
            self._readers[epoch & 1] -= 1
            if self._retired:
                self._pass()

    def retire(self, memory: Any) -> None:
        with self._changing:
            self._retired.append((self._epoch, memory))
            self._pass()
        del memory
        self.free()

    def free(self) -> None:
        """Frees what no look-up reads any more. Pushes call it now and then."""
        if self._gone:
            with self._changing:
                _gone, self._gone = self._gone, []  # freed after the lock is released

    @property
    def kept(self) -> int:
        """How many pieces of memory look-ups may still read."""
        return len(self._retired)

    def _pass(self) -> None:
        """Begins the next epoch if no look-up of the one before is left."""
        for _ in range(2):
            if self._readers[(self._epoch + 1) & 1] == 0:
                self._epoch += 1
        self._gone += [memory for epoch, memory in self._retired if epoch + 2 <= self._epoch]
        self._retired = [each for each in self._retired if each[0] + 2 > self._epoch]
