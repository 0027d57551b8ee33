"""Allocates rows in memory, and slots in the file for rows that memory has no room for.

Owns: the lists of free rows and slots. Invariants: a row lies in memory or in the file; a row in the file can be read
there, and moves into memory before it changes; rows with a number of `LIMIT` or more are allocated last, so that the
memory beyond the limit can be given back once they are free. Must not know: ids, when rows move.
"""

from __future__ import annotations

import numpy as np

from shardyard.domain.compiling import compiled
from shardyard_ps_server.tables.memory.intrinsics import try_lock, unlock
from shardyard_ps_server.tables.memory.layout import (
    COLD_ROWS,
    FREE_HIGH,
    FREE_ROW,
    FREED,
    HEAP_LOCK,
    HIGH_FREED,
    LIMIT,
    NEXT_ROW,
    NEXT_SLOT,
    SLOTS_FREE,
    Numbers,
    TableMemory,
    signed,
)


@compiled
def take_row(memory: TableMemory) -> int:
    """Allocates a row in memory."""
    _lock(memory.shared)
    row = _take(memory)
    unlock(memory.shared, HEAP_LOCK)
    return row


@compiled
def take_low(memory: TableMemory) -> int:
    """Allocates a row below the limit. -1: there is none."""
    _lock(memory.shared)
    row = _take_low(memory)
    unlock(memory.shared, HEAP_LOCK)
    return row


@compiled
def free_row(memory: TableMemory, row: int) -> None:
    """Frees a row, in memory or in the file."""
    shared = memory.shared
    _lock(shared)
    if row >= memory.cold:
        shared[COLD_ROWS] -= 1
        _push_slot(memory, row - memory.cold)
    else:
        _link(memory, row)
    unlock(shared, HEAP_LOCK)


@compiled
def raise_row(memory: TableMemory, row: int) -> int:
    """Moves a row of the file into memory, under the lock of its stripe. Returns its new number."""
    shared = memory.shared
    _lock(shared)
    hot = _take(memory)
    shared[COLD_ROWS] -= 1
    unlock(shared, HEAP_LOCK)
    for d in range(memory.slab.shape[1]):
        memory.slab[hot, d] = memory.slab[row, d]
    _lock(shared)
    _push_slot(memory, row - memory.cold)
    unlock(shared, HEAP_LOCK)
    return hot


@compiled
def lower_row(memory: TableMemory, row: int) -> None:
    """Frees a row in memory whose values are in the file now."""
    _lock(memory.shared)
    memory.shared[COLD_ROWS] += 1
    _link(memory, row)
    unlock(memory.shared, HEAP_LOCK)


@compiled
def take_slots(memory: TableMemory, slots: Numbers, end: int) -> int:
    """Allocates slots below `end`, those first that were freed last. Returns how many."""
    shared, n = memory.shared, 0
    _lock(shared)
    while n < slots.size and shared[SLOTS_FREE] > 0:
        shared[SLOTS_FREE] -= 1
        slots[n] = signed(memory.slots[shared[SLOTS_FREE]])
        n += 1
    while n < slots.size and shared[NEXT_SLOT] < end:
        slots[n] = shared[NEXT_SLOT]
        shared[NEXT_SLOT] += 1
        n += 1
    unlock(shared, HEAP_LOCK)
    return n


@compiled
def free_slots(memory: TableMemory, slots: Numbers) -> None:
    """Frees slots."""
    _lock(memory.shared)
    for k in range(slots.size):
        _push_slot(memory, slots[k])
    unlock(memory.shared, HEAP_LOCK)


@compiled
def set_limit(memory: TableMemory, limit: int) -> None:
    shared = memory.shared
    _lock(shared)
    low, high = shared[FREE_ROW], shared[FREE_HIGH]
    shared[FREE_ROW], shared[FREED], shared[FREE_HIGH], shared[HIGH_FREED] = 0, 0, 0, 0
    shared[LIMIT] = limit
    for first in (low, high):
        row = first - 1
        while row >= 0:
            after = signed(memory.links[row, 0]) - 1
            _link(memory, row)
            row = after
    unlock(shared, HEAP_LOCK)


@compiled
def rows_of(shared: Numbers) -> int:
    """How many rows are allocated, in memory and in the file. `shared`: of a TableMemory. To give a compiled
    function all of it is slow."""
    _lock(shared)
    found = shared[NEXT_ROW] - shared[FREED] - shared[HIGH_FREED] + shared[COLD_ROWS]
    unlock(shared, HEAP_LOCK)
    return int(found)


@compiled
def cut_off(memory: TableMemory) -> None:
    """Forgets the rows beyond the limit, all of which are free."""
    shared = memory.shared
    _lock(shared)
    shared[NEXT_ROW], shared[FREE_HIGH], shared[HIGH_FREED] = shared[LIMIT], 0, 0
    unlock(shared, HEAP_LOCK)


@compiled
def _lock(shared: Numbers) -> None:
    while not try_lock(shared, HEAP_LOCK):
        pass


@compiled
def _take(memory: TableMemory) -> int:
    shared = memory.shared
    row = _take_low(memory)
    if row < 0:
        row = shared[FREE_HIGH] - 1
        if row >= 0:
            shared[FREE_HIGH] = signed(memory.links[row, 0])
            shared[HIGH_FREED] -= 1
        else:
            row = shared[NEXT_ROW]
            shared[NEXT_ROW] = row + 1
    return int(row)


@compiled
def _take_low(memory: TableMemory) -> int:
    shared = memory.shared
    row = shared[FREE_ROW] - 1
    if row >= 0:
        shared[FREE_ROW] = signed(memory.links[row, 0])
        shared[FREED] -= 1
    elif shared[NEXT_ROW] < shared[LIMIT]:
        row = shared[NEXT_ROW]
        shared[NEXT_ROW] = row + 1
    return int(row)


@compiled
def _link(memory: TableMemory, row: int) -> None:
    shared = memory.shared
    if row >= shared[LIMIT]:
        memory.links[row, 0] = np.int32(shared[FREE_HIGH])
        shared[FREE_HIGH] = row + 1
        shared[HIGH_FREED] += 1
    else:
        memory.links[row, 0] = np.int32(shared[FREE_ROW])
        shared[FREE_ROW] = row + 1
        shared[FREED] += 1


@compiled
def _push_slot(memory: TableMemory, slot: int) -> None:
    shared = memory.shared
    memory.slots[shared[SLOTS_FREE]] = np.int32(slot)
    shared[SLOTS_FREE] += 1
