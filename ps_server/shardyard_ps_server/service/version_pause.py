"""A pull's wait for a version that another worker's push makes.

The thread that makes the version carries the pull on, so a synchronous step needs no thread to wake up between the last
push and the answers. Must not know: what the pull does with the version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shardyard.transport.interfaces import Pause
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.reads import await_version, is_to_come


class VersionPause(Pause):
    """A pull of this version of some partitions, or a later one, until it is there. `until`: at most (time.monotonic).
    A step that needs a verdict is not waited for, as in `reads.hold_version`."""

    def __init__(self, partitions: Sequence[Partition], number: int, until: float) -> None:
        self._partitions, self._number = partitions, number
        self.until = until
        self._at: Partition | None = None

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until or self._lacking() is None

    def _lacking(self) -> Partition | None:
        """The first partition that is waited for."""
        for partition in self._partitions:
            with partition.lock:
                if is_to_come(partition, self._number):
                    return partition
        return None

    def begin(self, go_on: Callable[[], None]) -> bool:
        for partition in self._partitions:
            with partition.lock:
                if is_to_come(partition, self._number):
                    partition.awaited[self] = go_on
                    self._at = partition
                    return True
        return False

    def end(self) -> None:
        partition, self._at = self._at, None
        if partition is not None:
            with partition.lock:
                partition.awaited.pop(self, None)

    def wait(self) -> None:
        partition = self._lacking()
        if partition is not None:
            with partition.lock:
                await_version(partition, self._number, self.until)
