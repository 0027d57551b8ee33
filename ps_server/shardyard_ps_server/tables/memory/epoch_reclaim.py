"""Memory that a look-up may still read after it was replaced.

Owns: who reads, and what waits for them. Invariants: what is retired stays until all who were reading then have left
(two epochs: whoever comes in the next one cannot have seen it); nobody waits, and who reads lets nothing go, since
memory is not unmapped while pages of any other come. Must not know: what the memory is.
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
        """Of the even and the odd epoch."""
        self._retired: list[tuple[int, Any]] = []
        self._gone: list[Any] = []
        """Memory that no look-up reads any more."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._changing:
            epoch = self._epoch
            self._readers[epoch & 1] += 1
        try:
            yield
        finally:
            with self._changing:
                self._readers[epoch & 1] -= 1
                if self._retired:
                    self._pass()

    def retire(self, memory: Any) -> None:
        with self._changing:
            self._retired.append((self._epoch, memory))
            self._pass()
        del memory
        self.let_go()

    def let_go(self) -> None:
        """Of what nobody reads any more. Called now and then by who writes."""
        if self._gone:
            with self._changing:
                _gone, self._gone = self._gone, []  # unmapped after the lock

    @property
    def kept(self) -> int:
        """That somebody may read."""
        return len(self._retired)

    def _pass(self) -> None:
        """Begins the next epoch when no look-up of the one before is left."""
        for _ in range(2):
            if self._readers[(self._epoch + 1) & 1] == 0:
                self._epoch += 1
        self._gone += [memory for epoch, memory in self._retired if epoch + 2 <= self._epoch]
        self._retired = [each for each in self._retired if each[0] + 2 > self._epoch]
