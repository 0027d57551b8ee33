"""Who reads a job's values without being its worker: evaluators.

Owns: which readers were heard, and when; on which servers values stay for them. Invariants: nobody waits for a reader
while the job lasts; the values of a finished job stay on the servers for readers that were heard within SILENT_MS,
until they have left, at most END_MS; a coordinator that was started again waits as long to hear from those that it has
forgotten; at most limits.READERS_MAX are known. Must not know: what is read, the network.
"""

from __future__ import annotations

from typing import Final

from shardyard.domain import limits
from shardyard.domain.errors import TooLarge
from shardyard_coordinator.core.effects import DropJob
from shardyard_coordinator.placement.placement import Server

SILENT_MS: Final = 10_000
"""A reader that was not heard for so long is gone. They ask every second."""
END_MS: Final = 120_000
"""So long does a finished job's memory stay for readers: the final state is evaluated meanwhile."""


class Readers:
    """Of one job."""

    def __init__(self) -> None:
        self._heard_ms: dict[bytes, int] = {}
        self._forgotten_ms: int | None = None
        self._end_ms: int | None = None
        self._kept: list[DropJob] = []

    def __len__(self) -> int:
        return len(self._heard_ms)

    @property
    def may_be_there(self) -> bool:
        """Whether somebody reads, or is not known not to, as far as `expire` was told the time."""
        return bool(self._heard_ms) or self._forgotten_ms is not None

    def forget(self, now_ms: int) -> None:
        """The coordinator was started again: who has read before will say so."""
        self._forgotten_ms = now_ms

    def hear(self, reader: bytes, now_ms: int) -> None:
        """Raises TooLarge."""
        self.expire(now_ms)
        if reader not in self._heard_ms and len(self._heard_ms) >= limits.READERS_MAX:
            raise TooLarge(f"{len(self._heard_ms)} readers follow the job; at most {limits.READERS_MAX} may")
        self._heard_ms[reader] = now_ms

    def leave(self, reader: bytes) -> None:
        self._heard_ms.pop(reader, None)

    def expire(self, now_ms: int) -> None:
        """Forgets those that are gone; with the job at its end for long, all."""
        late = self._end_ms is not None and now_ms - self._end_ms >= END_MS
        self._heard_ms = {
            reader: at_ms for reader, at_ms in self._heard_ms.items() if now_ms - at_ms < SILENT_MS and not late
        }
        if self._forgotten_ms is not None and now_ms - self._forgotten_ms >= SILENT_MS:
            self._forgotten_ms = None

    # ---- when the job is finished

    @property
    def keep_values(self) -> bool:
        """Whether values stay on servers for them though the job is finished."""
        return bool(self._kept)

    def keep(self, drops: list[DropJob]) -> None:
        """What is to be said to servers stays unsaid while somebody reads."""
        self._kept = drops

    def lose_server(self, server: Server) -> None:
        self._kept = [each for each in self._kept if each.server != server]

    def drop_when_read(self, now_ms: int) -> list[DropJob]:
        """What is to be said now: nothing for as long as somebody is there who has what is left of END_MS."""
        if not self._kept:
            return []
        if self._end_ms is None:
            self._end_ms = now_ms
        self.expire(now_ms)
        return [] if self.may_be_there else self.drop()

    def drop(self) -> list[DropJob]:
        """What is to be said, whoever reads."""
        drops, self._kept = self._kept, []
        return drops
