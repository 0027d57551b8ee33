"""The readers of a job: processes that read its values and are not its workers, such as evaluators.

Owns: which readers reported, and when; on which servers values stay for them. Invariants: while the job lasts, nothing
waits for a reader. The values of a finished job stay on the servers for readers that reported within SILENT_MS, until
they have left, for at most END_MS. A restarted coordinator waits just as long for the readers that it has forgotten. At
most limits.READERS_MAX are known. Must not know: what is read, the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shardyard.domain import limits
from shardyard.domain.errors import TooLarge
from shardyard_coordinator.placement.placement import Server

SILENT_MS: Final = 10_000
"""A reader that has sent nothing for this long is inactive. Readers ask every second."""
END_MS: Final = 120_000
"""For so long a finished job keeps its values on the servers for readers, so that they evaluate the final state."""


class Readers:
    def __init__(self) -> None:
        self._heard_ms: dict[bytes, int] = {}
        self._forgotten_ms: int | None = None
        self._end_ms: int | None = None
        self._keeping: list[Server] = []

    def __len__(self) -> int:
        return len(self._heard_ms)

    @property
    def may_be_active(self) -> bool:
        """Whether a reader was known at the last `expire`, or one may exist that has not reported since a restart."""
        return bool(self._heard_ms) or self._forgotten_ms is not None

    def forget(self, now_ms: int) -> None:
        """The coordinator was restarted. Readers will report again."""
        self._forgotten_ms = now_ms

    def report(self, reader: bytes, now_ms: int) -> None:
        """Raises TooLarge."""
        self.expire(now_ms)
        if reader not in self._heard_ms and len(self._heard_ms) >= limits.READERS_MAX:
            raise TooLarge(f"{len(self._heard_ms)} readers follow the job; at most {limits.READERS_MAX} may")
        self._heard_ms[reader] = now_ms

    def leave(self, reader: bytes) -> None:
        self._heard_ms.pop(reader, None)

    def expire(self, now_ms: int) -> None:
        """Forgets inactive readers, and all of them once END_MS is over."""
        late = self._end_ms is not None and now_ms - self._end_ms >= END_MS
        self._heard_ms = {
            reader: at_ms for reader, at_ms in self._heard_ms.items() if now_ms - at_ms < SILENT_MS and not late
        }
        if self._forgotten_ms is not None and now_ms - self._forgotten_ms >= SILENT_MS:
            self._forgotten_ms = None

    # ---- when the job is finished

    @property
    def keep_values(self) -> bool:
        """Whether servers keep the values of the finished job for readers."""
        return bool(self._keeping)

    def keep(self, servers: Sequence[Server]) -> None:
        """Makes these servers keep their values while readers are active."""
        self._keeping = [*servers]

    def lose_server(self, server: Server) -> None:
        self._keeping = [each for each in self._keeping if each.incarnation != server.incarnation]

    def release_if_read(self, now_ms: int) -> list[Server]:
        """The servers that may drop the values now. Empty while an active reader has time left."""
        if not self._keeping:
            return []
        if self._end_ms is None:
            self._end_ms = now_ms
        self.expire(now_ms)
        return [] if self.may_be_active else self.release()

    def release(self) -> list[Server]:
        """The servers that were keeping values. From now on they need not."""
        released, self._keeping = self._keeping, []
        return released
