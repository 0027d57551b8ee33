"""Shared memory through which rows pass between this worker and a server on the same machine.

Owns: the layout: first the pushed rows and the ids that are looked up, then the rows that the server writes.
Invariants: memory of a stream that broke off is not reused, since its server may still read or write it; an unused page
takes no memory; what does not fit travels over the stream. Used during an exchange, by its thread. Must not know: what
rows are for, servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from shardyard.domain.limits import ROWS_ROOM_BYTES
from shardyard.domain.pulls import ShmHandle
from shardyard.transport.shared_memory import SharedMemory

_PUSHED_AT: Final = 0
_WANTED_AT: Final = ROWS_ROOM_BYTES


class ShmRows:
    """The memory of one stream. Raises NotShareable, TooLarge."""

    def __init__(self) -> None:
        self._memory = SharedMemory(2 * ROWS_ROOM_BYTES, read_only=False)
        self._pushed = self._memory.bytes[:_WANTED_AT]
        self._wanted = self._memory.bytes[_WANTED_AT:].data

    def ticket(self) -> ShmHandle:
        return self._memory.ticket()

    def descriptor(self) -> int:
        """Returns another descriptor of the memory, which the caller closes."""
        return self._memory.descriptor()

    def close(self) -> None:
        """From now on no other process can open the memory."""
        self._memory.close()

    def put(self, pieces: Sequence[memoryview]) -> int | None:
        """Puts these in, one after the other. Returns where they begin; None: they do not fit."""
        total = sum([len(piece) for piece in pieces])
        if not pieces or total > ROWS_ROOM_BYTES:
            return None
        at = 0
        for piece in pieces:
            self._pushed[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        return _PUSHED_AT

    @staticmethod
    def place(places: Sequence[memoryview]) -> int | None:
        """Where the server must put the rows for `places`; None: they do not fit."""
        total = sum([len(place) for place in places])
        return _WANTED_AT if places and total <= ROWS_ROOM_BYTES else None

    def take(self, places: Sequence[memoryview]) -> None:
        """Copies the server's rows into `places`, one after the other."""
        at = 0
        for place in places:
            place[:] = self._wanted[at : at + len(place)]
            at += len(place)
