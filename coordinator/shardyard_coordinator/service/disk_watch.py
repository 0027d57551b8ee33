"""Whether the disk of the journal is full, while the journal can still be written.

Must not know: what happens when it cannot be written any more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from shardyard_coordinator.service.journal import Journal

log = logging.getLogger("shardyard.coordinator")

FULL_BYTES: Final = 1 << 20
"""A disk with less free room than this counts as full."""
LOOK_MS: Final = 1_000
"""How often the disk is looked at."""


@dataclass(frozen=True, slots=True)
class FullDisk:
    """`room_bytes`: what the journal's files can take without growing."""

    file: str
    free_bytes: int
    room_bytes: int
    since_ms: int


class DiskWatch:
    """Says in time that the journal's disk is full. Not safe for several threads at a time."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._look_ms = 0
        self.full: FullDisk | None = None

    def look(self, now_ms: int) -> None:
        """Looks now and then. Logs when the disk becomes full, and when it has room again."""
        if now_ms < self._look_ms:
            return
        self._look_ms = now_ms + LOOK_MS
        free_bytes, former = self._journal.free_bytes(), self.full
        if free_bytes is None or free_bytes >= FULL_BYTES:
            self.full = None
            if former is not None:
                log.info("the disk of the journal %s has room again", former.file)
            return
        room_bytes = self._journal.room_bytes()
        since_ms = now_ms if former is None else former.since_ms
        self.full = FullDisk(self._journal.name, free_bytes, room_bytes, since_ms)
        if former is None:
            log.warning(
                "the disk of the journal %s is full (%s bytes free); the journal has room for %s bytes, then decisions "
                "wait; make room on the disk",
                self._journal.name,
                f"{free_bytes:,}",
                f"{room_bytes:,}",
            )
