"""The values of one partition, by version, so that reading and writing never touch the same memory.

Owns: a small set of buffers of equal size. Invariants: a buffer that a reader holds, or that has one of the last two
versions, is never written (docs/internals/ledger.md, rule B3). So a pull needs no copy, and no lock while it is sent;
version t can be read until t+1 is complete everywhere; a pinned version is held from the moment in which it exists.
All methods but `allocate` are called under the partition's lock. Must not know: what the bytes mean, readers' names.
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
    """Returns uninitialised bytes that begin at a multiple of BLOCK_ALIGN_BYTES. Raises TooLarge if there is no
    memory."""
    try:
        raw = np.empty(nbytes + BLOCK_ALIGN_BYTES, dtype=np.uint8)
    except MemoryError:
        raise TooLarge(f"{nbytes} bytes, for which this server has no memory") from None
    start = -raw.ctypes.data % BLOCK_ALIGN_BYTES
    return raw[start : start + nbytes]


def aligned_copy(values: Bytes) -> Bytes:
    """Raises TooLarge if there is no memory."""
    copy = aligned_empty(len(values))
    copy[:] = values
    return copy


NO_BYTES = aligned_empty(0)

Memory = Callable[[int], tuple[Bytes, ShmLocation | None]]
"""Returns so many aligned bytes, and the place where workers on this machine find them, if any. Raises TooLarge."""


def private_memory(nbytes: int) -> tuple[Bytes, ShmLocation | None]:
    return aligned_empty(nbytes), None


@dataclass(eq=False)
class VersionPin:
    """A version that a reader keeps. `buffer`: its values, once the version exists; `lost`: it will never exist."""

    number: int
    version: Version | None = None
    buffer: Bytes | None = None
    lost: bool = False


class Versions:
    """The last KEPT versions, pinned ones, and the buffers into which the next one is written."""

    def __init__(self, nbytes: int, memory: Memory = private_memory) -> None:
        self._nbytes = nbytes
        self._memory = memory
        self._places: dict[int, ShmLocation] = {}
        self._life = 1
        first = self.allocate()
        first[:] = 0
        self._kept: deque[tuple[int, Bytes]] = deque([(0, first)], maxlen=KEPT)
        self._idle: list[Bytes] = []
        self._readers: dict[int, int] = {}
        self._retired: dict[int, Bytes] = {}
        self._pins: list[VersionPin] = []
        self.newest = Version(self._life, 0)

    @property
    def values(self) -> Bytes:
        """The newest version's buffer, to read from."""
        return self._kept[-1][1]

    # ---- the next version

    def take_idle(self) -> Bytes | None:
        """Returns a buffer that nobody reads, to write the next version into, if there is one."""
        return self._idle.pop() if self._idle else None

    def allocate(self) -> Bytes:
        """Returns a new buffer, to write the next version into. May take long, and needs no lock. Raises TooLarge."""
        buffer, place = self._memory(self._nbytes)
        if place is not None:
            self._places[id(buffer)] = place
        return buffer

    def return_unused(self, buffer: Bytes) -> None:
        """Takes back a buffer that was not needed."""
        self._idle.append(buffer)

    def place(self, buffer: Bytes) -> ShmLocation | None:
        """Where workers on this machine find the buffer, if they can."""
        return self._places.get(id(buffer))

    def publish(self, buffer: Bytes, number: int | None = None) -> Version:
        """Makes a buffer that was taken or allocated the next version, or the newest version's own, whose values do not
        change. `number`: of a version that skips some."""
        oldest = self._kept[0][1] if len(self._kept) == KEPT else None
        self.newest = Version(self._life, self.newest.number + 1 if number is None else number)
        self._kept.append((self.newest.number, buffer))
        if oldest is not None and self._is_unused(oldest):
            self._retire(oldest)
        for pin in self._pins:
            if pin.version is None and pin.number <= self.newest.number:
                self.hold(buffer)
                pin.version, pin.buffer = self.newest, buffer
        return self.newest

    def replace(self, buffer: Bytes) -> None:
        """Makes a buffer that was taken or allocated the newest version, which keeps its number. Readers go on with the
        buffer that they hold."""
        number, former = self._kept[-1]
        self._kept[-1] = number, buffer
        if self._is_unused(former):
            self._retire(former)

    def restore(self, version: Version, buffer: Bytes) -> None:
        """Makes a buffer that was taken or allocated that version. No earlier version is kept."""
        for kept in {id(kept): kept for _, kept in self._kept}.values():
            self._retire(kept)
        self._kept = deque([(version.number, buffer)], maxlen=KEPT)
        self._life = version.life
        self.newest = version
        for pin in self._pins:
            pin.lost = pin.version is None

    # ---- readers

    def find(self, number: int) -> Bytes | None:
        """Returns the buffer of that version, if it is one of the last KEPT."""
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

    @property
    def is_short_of_buffers(self) -> bool:
        """Whether an update could lack memory if one more reader held a version for long."""
        # each pin holds a buffer beside the kept ones, now or later; the next pin and the next version need one each
        kept = len({id(buffer) for _, buffer in self._kept})
        return kept + len(self._idle) + len(self._retired) < KEPT + 2 + len(self._pins)

    def pin(self, number: int | None) -> VersionPin | None:
        """Keeps that version, None: the newest, until `unpin`, which must follow. Returns None if it has passed."""
        pin = VersionPin(self.newest.number if number is None else number)
        buffer = self.find(pin.number)
        if buffer is not None:
            self.hold(buffer)
            pin.version, pin.buffer = Version(self._life, pin.number), buffer
        elif pin.number < self.newest.number:
            return None
        self._pins.append(pin)
        return pin

    def unpin(self, pin: VersionPin) -> None:
        """Releases a pin. A second call does nothing."""
        if pin in self._pins:
            self._pins.remove(pin)
            if pin.buffer is not None:
                self.release(pin.buffer)
                pin.buffer = None

    def _is_unused(self, buffer: Bytes) -> bool:
        """Whether no kept version has this buffer."""
        return all(kept is not buffer for _, kept in self._kept)

    def _retire(self, buffer: Bytes) -> None:
        if id(buffer) in self._readers:
            self._retired[id(buffer)] = buffer
        else:
            self._idle.append(buffer)
