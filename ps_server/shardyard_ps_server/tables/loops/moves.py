"""Rows on their way between memory and the file.

Owns: bringing pages of the file into memory before they are needed under a lock, writing rows there, and changing
where an entry says that its row lies. Invariants: a disk is waited for while no lock is held; an entry whose row moves
is the same entry: nothing else of it changes; a row that has changed since it was written to the file stays. Must not
know: which rows move, and when.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardyard.domain.compiling import compiled
from shardyard.domain.tables.prefetch import prefetch
from shardyard_ps_server.tables.loops.index import array_at, buckets_of, find, hashed, home_of, let_go, lock_of
from shardyard_ps_server.tables.loops.walks import leave
from shardyard_ps_server.tables.memory.heap import free_row, lower_row, take_low
from shardyard_ps_server.tables.memory.intrinsics import fence, load, pointer, will_need, write_at
from shardyard_ps_server.tables.memory.layout import (
    ADDRESS,
    AGE_SHIFT,
    BASE,
    CHANGED,
    COLD_ROWS,
    DEPTH,
    EMPTY,
    FIELDS,
    FILE,
    FREQUENCY,
    FREQUENCY_SHIFT,
    HOMES,
    LIMIT,
    LOCK,
    MARK,
    ROW,
    SIDE,
    SLOT_SHIFT,
    Floats,
    Numbers,
    TableMemory,
    signed,
)

_CHUNK = 256
_PAGE_VALUES = 1_024
_HOTTEST = (1 << 63) - 1


# ---- out of the file


@compiled
def bring(memory: TableMemory, ids: Numbers) -> int:
    """Reads the pages of the file that hold rows of these ids; how many of them have no row in memory. It takes no
    lock, as loops.look_up, so a row that moves meanwhile may be missed. What was replaced must stay mapped."""
    rows, hashes = np.empty(_CHUNK, np.int64), np.empty(_CHUNK, np.uint64)
    first, second = memory.seeds[0], memory.seeds[1]
    directory, stripes = memory.directory, memory.stripes
    elsewhere = 0
    for chunk in range(0, ids.size, _CHUNK):
        n, cold = min(_CHUNK, ids.size - chunk), 0
        for k in range(n):
            word = hashed(ids[chunk + k], first, second)
            at = signed(directory[signed(word >> SLOT_SHIFT)]) * FIELDS
            home = home_of(word, np.uint64(stripes[at + DEPTH]), np.uint64(stripes[at + HOMES]))
            prefetch(array_at(pointer(stripes[at + ADDRESS]), (1,), np.uint64), 2 * home)
            hashes[k] = word
        for k in range(n):
            row = _row_of(memory, ids[chunk + k], hashes[k])
            elsewhere += row < 0 or row >= memory.cold
            if row >= memory.cold:
                rows[cold] = row
                cold += 1
        read(memory, rows, cold)
    return elsewhere


@compiled
def _row_of(memory: TableMemory, number: np.int64, word: np.uint64) -> int:
    """-1: it has none, or somebody is writing there."""
    directory, stripes = memory.directory, memory.stripes
    slot = signed(word >> SLOT_SHIFT)
    at = signed(directory[slot]) * FIELDS
    version = load(stripes, at + LOCK)
    address, homes, depth = stripes[at + ADDRESS], stripes[at + HOMES], stripes[at + DEPTH]
    moved = signed(directory[slot]) * FIELDS != at
    fence()
    # these belong together, or a bucket would be sought beyond the last one
    if version & 1 or moved or load(stripes, at + LOCK) != version:
        return -1
    buckets = array_at(pointer(address), (2 * homes,), np.uint64)
    b = find(buckets, number, home_of(word, np.uint64(depth), np.uint64(homes)))
    return int(signed(buckets[2 * b + 1] & ROW) - 1)


@compiled
def read(memory: TableMemory, rows: Numbers, n: int) -> None:
    """The first n of these rows, which lie in the file, are in memory then. `rows` holds nothing any more."""
    stride = memory.slab.shape[1]
    for k in range(n):
        will_need(memory.shared[FILE], (rows[k] - memory.cold) * stride * 4, stride * 4)
    total = 0
    for k in range(n):
        for d in range(0, stride, _PAGE_VALUES):
            total ^= signed(memory.links[rows[k], d])
        total ^= signed(memory.links[rows[k], stride - 1])
    # or the compiler would see that nobody wants to know it
    if n > 0:
        rows[0] = total


@compiled
def bring_some(
    memory: TableMemory, cursor: np.uint64, homes: int, not_copied: bool, only_changed: bool, rows: Numbers
) -> int:
    """Reads the pages of rows of the next `homes` homes: all, or those that the cut being taken needs. `rows` has room
    for as many numbers as are read at once."""
    stripe, home = lock_of(memory, cursor)
    at = stripe * FIELDS
    side = np.uint64(memory.shared[SIDE])
    buckets = buckets_of(memory.stripes, stripe)
    stop = min(home + homes, memory.stripes[at + HOMES])
    b, n = home, 0
    while n < rows.size and (b < stop or buckets[2 * b + 1] != EMPTY):
        word = buckets[2 * b + 1]
        row = signed(word & ROW) - 1
        copied = (word & MARK) == side or (only_changed and (word & CHANGED) == EMPTY)
        if row >= memory.cold and not (not_copied and copied):
            rows[n] = row
            n += 1
        b += 1
    let_go(memory.stripes, stripe)
    read(memory, rows, n)
    return n


def bring_window(memory: TableMemory, cursor: np.uint64, homes: int, *, not_copied: bool, only_changed: bool) -> None:
    """What a walk is about to read under a lock is in memory, as far as can be told beforehand."""
    if memory.shared[COLD_ROWS] > 0:
        bring_some(memory, cursor, homes, not_copied, only_changed, np.empty(2 * homes, np.int64))


# ---- into the file


@compiled
def hot_some(
    memory: TableMemory, cursor: np.uint64, homes: int, ids: Numbers, keys: Numbers, rows: Numbers
) -> tuple[int, np.uint64, bool]:
    """The ids of the next `homes` homes whose rows are in memory, and these rows; the smaller a key, the longer ago
    the id was pushed, then the less often. Rows from the limit on are put below it where there is room, or have keys
    below all others. How many there are, the cursor, and whether that was all."""
    stripe, home = lock_of(memory, cursor)
    at = stripe * FIELDS
    base, limit = memory.stripes[at + BASE], memory.shared[LIMIT]
    buckets = buckets_of(memory.stripes, stripe)
    stop = min(home + homes, memory.stripes[at + HOMES])
    b, n = home, 0
    while b < stop or buckets[2 * b + 1] != EMPTY:
        word = buckets[2 * b + 1]
        row = signed(word & ROW) - 1
        if 0 <= row < memory.cold and n < ids.size:
            key = ((base + signed(word >> AGE_SHIFT)) << 16) + signed((word >> FREQUENCY_SHIFT) & FREQUENCY)
            if row >= limit:
                low = take_low(memory)
                if low >= 0:
                    for d in range(memory.slab.shape[1]):
                        memory.slab[low, d] = memory.slab[row, d]
                    buckets[2 * b + 1] = (word & ~ROW) | np.uint64(low + 1)
                    free_row(memory, row)
                    row = low
                else:
                    key -= _HOTTEST
            ids[n], keys[n], rows[n] = signed(buckets[2 * b]), key, row
            n += 1
        b += 1
    after, over = leave(memory, stripe, stop)
    return n, after, over


@compiled
def write(memory: TableMemory, slots: Numbers, records: Floats) -> int:
    """Writes records[k] to slots[k], neighbours at once; how many were written before the first that was not."""
    nbytes = records.shape[1] * 4
    begin = 0
    while begin < slots.size:
        end = begin + 1
        while end < slots.size and slots[end] == slots[end - 1] + 1:
            end += 1
        place = signed(records.ctypes.data) + begin * nbytes
        written = write_at(memory.shared[FILE], place, (end - begin) * nbytes, slots[begin] * nbytes)
        if written < (end - begin) * nbytes:
            return int(begin + max(written, 0) // nbytes)
        begin = end
    return begin


@compiled
def settle(memory: TableMemory, ids: Numbers, rows: Numbers, slots: Numbers, records: Any, moved: Any) -> None:
    """The row of ids[k] lies in slots[k] from now on, if it is still rows[k] in memory, and is what was written:
    `records`, as int32. moved[k]: whether it does."""
    first, second = memory.seeds[0], memory.seeds[1]
    for k in range(ids.size):
        word = hashed(ids[k], first, second)
        stripe, home = lock_of(memory, word)
        buckets = buckets_of(memory.stripes, stripe)
        b = find(buckets, ids[k], home)
        entry = buckets[2 * b + 1]
        if signed(entry & ROW) - 1 == rows[k] and _is_same(memory.links[rows[k]], records[k]):
            buckets[2 * b + 1] = (entry & ~ROW) | np.uint64(memory.cold + slots[k] + 1)
            lower_row(memory, rows[k])
            moved[k] = True
        let_go(memory.stripes, stripe)


@compiled
def _is_same(one: Any, other: Any) -> bool:
    differ = 0
    for d in range(one.size):
        differ |= one[d] ^ other[d]
    return differ == 0
