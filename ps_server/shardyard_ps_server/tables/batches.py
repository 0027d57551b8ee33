"""Batches of ids on their way through the stripes.

Owns: each thread's memory for them, which is kept from call to call. Must not know: what is done with a batch.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from shardyard.ground.row_ids import Ids, writable
from shardyard_ps_server.tables import index
from shardyard_ps_server.tables.layout import SLOTS, Batch, Memory

_IDS_KEPT_MAX = 1 << 20


class Batches(threading.local):
    """`which`: the run of each id, while they are put in order."""

    def __init__(self) -> None:
        self._at, self._ends = np.zeros(SLOTS, np.int64), np.zeros(SLOTS, np.int64)
        self._slots = np.zeros(SLOTS, np.int16)
        self._room = _Room(0)

    def arrange(self, memory: Memory, ids: Ids, stripes: int) -> Batch:
        """The ids in the order of the stripes; good until this thread asks for another."""
        n = ids.size
        room = self._room if self._room.size >= n else _Room(1 << max(n - 1, 255).bit_length())
        if n <= _IDS_KEPT_MAX:
            self._room = room
        batch = Batch(
            room.ids[:n], room.hashes[:n], room.order[:n], self._at[:stripes], self._ends[:stripes], self._slots
        )
        index.arrange(memory, writable(ids), stripes, batch, room.which)
        return batch


class _Room:
    def __init__(self, size: int) -> None:
        self.size = size
        self.ids: npt.NDArray[np.int64] = np.empty(size, np.int64)
        self.hashes: npt.NDArray[np.uint64] = np.empty(size, np.uint64)
        self.order: npt.NDArray[np.int32] = np.empty(size, np.int32)
        self.which: npt.NDArray[np.int16] = np.empty(size, np.int16)
