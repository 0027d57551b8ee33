"""Shared memory for the versions of a job's partitions, so that workers on the same machine read them without a copy.

Owns: regions of shared memory, cut into buffers from front to back. Invariants: only this process can write to them; a
buffer begins at a page, so that a reader can drop its mapping of one buffer without touching another's; pages are
allocated when a buffer is taken, so missing memory is a TooLarge, never a signal. If the system has no shared memory,
buffers are private to the process, and streams carry their contents. Must not know: versions, readers.
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
    """The memory of one job on one server. `nbytes`: of one version of all its partitions. Safe for several threads."""

    def __init__(self, nbytes: int, *, shareable: bool = True) -> None:
        self._region_bytes = VERSIONS_PER_REGION * max(nbytes, mmap.PAGESIZE)
        self.shareable = shareable and available()
        """False: buffers that are taken from now on are private."""
        self._lock = threading.Lock()
        self._regions: list[SharedMemory] = []
        self._taken = 0

    def take(self, nbytes: int) -> tuple[Bytes, ShmLocation | None]:
        """Returns a buffer of uninitialised bytes, and its place if it is shared. Raises TooLarge."""
        if not self.shareable or nbytes == 0:
            return aligned_empty(nbytes), None
        room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            if not self._regions or self._taken + room > self._regions[-1].nbytes:
                try:
                    self._regions.append(SharedMemory(max(self._region_bytes, room), read_only=True))
                except NotShareable as error:
                    # for instance a container forbids it; only speed is lost
                    log.info("versions are in private memory: %s", error.what)
                    self.shareable = False
                    return aligned_empty(nbytes), None
                self._taken = 0
            region = self._regions[-1]
            place = ShmLocation(len(self._regions) - 1, self._taken)
            self._taken += room
        try:
            region.populate(place.at, room)  # takes long; other threads take buffers meanwhile
        except TooLarge:
            with self._lock:
                if region is self._regions[-1] and self._taken == place.at + room:
                    self._taken = place.at
            raise
        return region.bytes[place.at : place.at + nbytes], place

    def tickets(self, *, known: int = 0) -> tuple[ShmHandle, ...]:
        """Returns handles of all regions from number `known` on, whose descriptors the caller closes."""
        if known == len(self._regions):
            return ()
        with self._lock:
            return tuple(
                ShmHandle(region.nbytes, known + number, region.descriptor())
                for number, region in enumerate(self._regions[known:])
            )

    def close(self) -> None:
        """No worker can attach from now on."""
        with self._lock:
            for region in self._regions:
                region.close()
