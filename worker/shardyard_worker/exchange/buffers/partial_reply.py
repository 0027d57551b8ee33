"""Values that are still arriving: one server's answer, whose first frame is there.

Owns: which bytes have arrived. Invariants: bytes are written to their place, once, and never outside the given memory;
a waiting thread is woken when its bytes are there, or when they will not come. Must not know: tensors, the sender.
"""

from __future__ import annotations

import threading

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation
from shardyard.wire.frames import Frame, Scatter


class PartialReply:
    """The payload of one answer. One thread adds; any thread may wait."""

    def __init__(self, server: Incarnation, into: memoryview) -> None:
        self.server = server
        self._scatter = Scatter(into, once=True)
        self._changed = threading.Condition()
        self._lost: errors.ShardyardError | None = None

    def add(self, frame: Frame) -> None:
        """Raises MalformedPayload, having written nothing, for bytes outside the payload or that have come before."""
        with self._changed:
            self._scatter.add(frame)
            self._changed.notify_all()

    def lose(self, error: errors.ShardyardError) -> None:
        """The rest will not come."""
        with self._changed:
            self._lost = error
            self._changed.notify_all()

    @property
    def complete(self) -> bool:
        with self._changed:
            return self._scatter.complete

    def has(self, begin: int, end: int) -> bool:
        with self._changed:
            return self._scatter.has(begin, end)

    def wait(self, begin: int, end: int) -> None:
        """Waits until bytes [begin, end) are there. If they are lost, raises Unavailable if they can be asked for
        again, otherwise MalformedPayload or TooLarge."""
        with self._changed:
            self._changed.wait_for(lambda: self._scatter.has(begin, end) or self._lost is not None)
            if self._lost is not None and not self._scatter.has(begin, end):
                raise self._lost.anew()

    def await_end(self) -> None:
        """Waits until all bytes are there or lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._scatter.complete or self._lost is not None)
