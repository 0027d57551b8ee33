"""Batches of ids, sorted by stripe. Each thread keeps its memory for them from call to call."""

from __future__ import annotations

import threading

import numpy as np

from shardyard.domain.tables.row_ids import Ids, writable
from shardyard_ps_server.tables.loops import index
from shardyard_ps_server.tables.memory.layout import SLOTS, LoopBatch, TableMemory, TableRoom

_IDS_KEPT_MAX = 1 << 20


class Batches(threading.local):
    def __init__(self) -> None:
        self._room = _room_for(0)

    def room(self, n: int) -> TableRoom:
        """Returns memory for a batch of n ids, valid until this thread calls again."""
        room = self._room if self._room.ids.size >= n else _room_for(n)
        if n <= _IDS_KEPT_MAX:
            self._room = room
        return room

    def arrange(self, memory: TableMemory, ids: Ids, stripes: int) -> LoopBatch:
        """Returns the ids in the order of their stripes, valid until this thread calls again."""
        room = self.room(ids.size)
        batch = batch_in(room, ids.size, stripes)
        index.arrange(memory, writable(ids), stripes, batch, room.which)
        return batch


def batch_in(room: TableRoom, n: int, stripes: int) -> LoopBatch:
    return LoopBatch(room.ids[:n], room.hashes[:n], room.order[:n], room.at[:stripes], room.ends[:stripes], room.slots)


def _room_for(n: int) -> TableRoom:
    size = 1 << max(n - 1, 255).bit_length()
    return TableRoom(
        np.empty(size, np.int64),
        np.empty(size, np.uint64),
        np.empty(size, np.int32),
        np.empty(size, np.int16),
        np.zeros(SLOTS, np.int64),
        np.zeros(SLOTS, np.int64),
        np.zeros(SLOTS, np.int16),
    )
