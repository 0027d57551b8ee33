"""The values of one partition, by version, so that reading and writing never touch the same memory.

Owns: a small set of equal buffers. Invariants: a buffer that a reader holds, or that one of the last two versions
stands in, is never written (docs/internals/ledger.md, rule B3); so a pull needs no copy and no lock while it is sent,
and version t can be read until t+1 is complete everywhere; a version that a reader wants is held from the moment in
which it is there. Called under the partition's lock, but for `another`. Must not know: what the bytes mean, readers'
names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardyard.domain.errors import TooLarge
from shardyard.domain.ids import Version
from shardyard.domain.limits import BLOCK_ALIGN_BYTES
from shardyard.domain.pulls import ShmLocation

Bytes = npt.NDArray[np.uint8]
KEPT = 2


def aligned_empty(nbytes: int) -> Bytes:
    """Uninitialised bytes that begin at a multiple of BLOCK_ALIGN_BYTES. Raises TooLarge where there is no memory."""
    try:
        raw = np.empty(nbytes + BLOCK_ALIGN_BYTES, dtype=np.uint8)
    except MemoryError:
        raise TooLarge(f"{nbytes} bytes, for which this server has no memory") from None
    start = -raw.ctypes.data % BLOCK_ALIGN_BYTES
    return raw[start : start + nbytes]


def aligned_copy(values: Bytes) -> Bytes:
    """Raises TooLarge where there is no memory."""
    copy = aligned_empty(len(values))
    copy[:] = values
    return copy


NO_BYTES = aligned_empty(0)

Memory = Callable[[int], tuple[Bytes, ShmLocation | None]]
"""Gives so many bytes, aligned, and says where others find them, if they can. Raises TooLarge."""


def private_memory(nbytes: int) -> tuple[Bytes, ShmLocation | None]:
    return aligned_empty(nbytes), None


@dataclass(eq=False)
class VersionPin:
    """A version that a reader has requested. `buffer`: held, once the version exists; `lost`: it will never exist."""

    number: int
    version: Version | None = None
    buffer: Bytes | None = None
    lost: bool = False


class Versions:
    """The last KEPT versions, and the buffers to write the next one into."""

    def __init__(self, nbytes: int, memory: Memory = private_memory) -> None:
        self._nbytes = nbytes
        self._memory = memory
        self._places: dict[int, ShmLocation] = {}
        self._life = 1
        first = self.another()
        first[:] = 0
        self._kept: deque[tuple[int, Bytes]] = deque([(0, first)], maxlen=KEPT)
        self._idle: list[Bytes] = []
        self._readers: dict[int, int] = {}
        self._retired: dict[int, Bytes] = {}
        self._wanted: list[VersionPin] = []
        self.newest = Version(self._life, 0)

    @property
    def values(self) -> Bytes:
        """The newest version's buffer, to read from."""
        return self._kept[-1][1]

    def idle(self) -> Bytes | None:
        """A buffer that nobody reads, to write the next version into, if there is one."""
        return self._idle.pop() if self._idle else None

    def another(self) -> Bytes:
        """One more such buffer. May take long, and needs no lock. Raises TooLarge."""
        buffer, place = self._memory(self._nbytes)
        if place is not None:
            self._places[id(buffer)] = place
        return buffer

    def place(self, buffer: Bytes) -> ShmLocation | None:
        """Where others find the buffer, if they can."""
        return self._places.get(id(buffer))

    def publish(self, buffer: Bytes) -> Version:
        """Makes `buffer` (of `idle` or `another`) the next version."""
        if len(self._kept) == KEPT:
            self._retire(self._kept[0][1])
        self.newest = Version(self._life, self.newest.number + 1)
        self._kept.append((self.newest.number, buffer))
        if self._wanted:
            self._give_wanted(buffer)
        return self.newest

    def _give_wanted(self, buffer: Bytes) -> None:
        for wanted in self._wanted:
            if wanted.version is None and wanted.number == self.newest.number:
                self.hold(buffer)
                wanted.version, wanted.buffer = self.newest, buffer

    @property
    def is_short_of_buffers(self) -> bool:
        """Whether an update could lack memory if one more reader held a version for long."""
        held = sum(wanted.buffer is not None for wanted in self._wanted) if self._wanted else 0
        pending = len(self._wanted) - held
        there = len(self._kept) + len(self._idle) + len(self._retired)
        return there < KEPT + 1 + held + pending + 1

    def want(self, number: int | None) -> VersionPin | None:
        """A reader wants that version, None: the newest; `unwant` must follow. None where it has passed."""
        wanted = VersionPin(self.newest.number if number is None else number)
        buffer = self.find(wanted.number)
        if buffer is not None:
            self.hold(buffer)
            wanted.version, wanted.buffer = Version(self._life, wanted.number), buffer
        elif wanted.number < self.newest.number:
            return None
        self._wanted.append(wanted)
        return wanted

    def unwant(self, wanted: VersionPin) -> None:
        if wanted in self._wanted:
            self._wanted.remove(wanted)
            if wanted.buffer is not None:
                self.release(wanted.buffer)
                wanted.buffer = None

    def give_back(self, buffer: Bytes) -> None:
        """A buffer of `idle` or `another` was not needed."""
        self._idle.append(buffer)

    def restore(self, version: Version, buffer: Bytes) -> None:
        """`buffer` (of `idle` or `another`) is that version, and no earlier one is kept."""
        for _, kept in self._kept:
            self._retire(kept)
        self._kept = deque([(version.number, buffer)], maxlen=KEPT)
        self._life = version.life
        self.newest = version
        for wanted in self._wanted:
            wanted.lost = wanted.version is None

    def find(self, number: int) -> Bytes | None:
        """The buffer of that version, if it is kept."""
        for kept, buffer in self._kept:
            if kept == number:
                return buffer
        return None

    def hold(self, buffer: Bytes) -> None:
        """A reader begins; `release` must follow."""
        self._readers[id(buffer)] = self._readers.get(id(buffer), 0) + 1

    def release(self, buffer: Bytes) -> None:
        left = self._readers[id(buffer)] - 1
        if left:
            self._readers[id(buffer)] = left
            return
        del self._readers[id(buffer)]
        if self._retired.pop(id(buffer), None) is not None:
            self._idle.append(buffer)

    def _retire(self, buffer: Bytes) -> None:
        if id(buffer) in self._readers:
            self._retired[id(buffer)] = buffer
        else:
            self._idle.append(buffer)
