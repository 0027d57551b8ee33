"""Where the versions of a job's partitions stand, so that workers on the same machine can read them without a copy.

Owns: regions of shared memory, cut into buffers from front to back. Invariants: nobody but this process can write to
them; a buffer begins at a page, so that a reader can drop its own copy of one without touching another's; pages are
asked for when a buffer is taken, so memory that is not there is a TooLarge, never a signal. Where the system has no
shared memory, buffers are private to the process and streams carry their contents. Must not know: versions, readers.
"""

from __future__ import annotations

import logging
import mmap
import threading

from shardyard.domain.errors import NotShareable, TooLarge
from shardyard.domain.pulls import ShmHandle, ShmLocation
from shardyard.transport.shared_memory import SharedMemory, available
from shardyard_ps_server.values.versions import Bytes, aligned_empty

log = logging.getLogger("shardyard.server")

VERSIONS_PER_REGION = 8


class ShmRegions:
    """The memory of one job on one server. `nbytes`: what one version of all its partitions takes. Safe for several
    threads."""

    def __init__(self, nbytes: int, *, shareable: bool = True) -> None:
        self._region_bytes = VERSIONS_PER_REGION * max(nbytes, mmap.PAGESIZE)
        self.shareable = shareable and available()
        """False: what is taken from now on has no place."""
        self._lock = threading.Lock()
        self._regions: list[SharedMemory] = []
        self._taken = 0

    def take(self, nbytes: int) -> tuple[Bytes, ShmLocation | None]:
        """A buffer of uninitialised bytes, and its place. Raises TooLarge."""
        if not self.shareable or nbytes == 0:
            return aligned_empty(nbytes), None
        room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            if not self._regions or self._taken + room > self._regions[-1].nbytes:
                try:
                    self._regions.append(SharedMemory(max(self._region_bytes, room), read_only=True))
                except NotShareable as error:
                    # as where a container forbids it; nothing is lost but speed
                    log.info("versions stand in private memory: %s", error.what)
                    self.shareable = False
                    return aligned_empty(nbytes), None
                self._taken = 0
            region = self._regions[-1]
            place = ShmLocation(len(self._regions) - 1, self._taken)
            self._taken += room
        try:
            region.populate(place.at, room)  # takes long, and others take theirs meanwhile
        except TooLarge:
            with self._lock:
                if region is self._regions[-1] and self._taken == place.at + room:
                    self._taken = place.at
            raise
        return region.bytes[place.at : place.at + nbytes], place

    def tickets(self, *, known: int = 0) -> tuple[ShmHandle, ...]:
        """All regions from number `known` on."""
        with self._lock:
            return tuple(self._regions[number].ticket(number) for number in range(known, len(self._regions)))

    def close(self) -> None:
        """Nobody can attach from now on."""
        with self._lock:
            for region in self._regions:
                region.close()
