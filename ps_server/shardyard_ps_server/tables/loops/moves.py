"""Moves rows between memory and the file.

Owns: reading pages of the file before they are needed under a lock, writing rows to the file, and changing where an
entry says that its row lies. Invariants: no lock is held while a disk is waited for; when a row moves, nothing else of
its entry changes; a row that has changed since it was written to the file stays in memory. Must not know: which rows
move, and when.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardyard.domain.compiling import compiled
from shardyard_ps_server.tables.loops.index import buckets_of, find, hashed, lock_of, peek, prefetch_homes, release
from shardyard_ps_server.tables.loops.walks import leave
from shardyard_ps_server.tables.memory.heap import free_row, lower_row, take_low
from shardyard_ps_server.tables.memory.intrinsics import will_need, write_at
from shardyard_ps_server.tables.memory.layout import (
    AGE_SHIFT,
    BASE,
    CHANGED,
    COLD_ROWS,
    EMPTY,
    FIELDS,
    FILE,
    FREQUENCY,
    FREQUENCY_SHIFT,
    HOMES,
    LIMIT,
    MARK,
    ROW,
    SIDE,
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
    """Reads the pages of the file that hold rows of these ids. Returns how many of the ids have no row in memory. Takes
    no lock, so it may miss a row that moves meanwhile. Memory that was replaced must stay mapped."""
    rows, hashes = np.empty(_CHUNK, np.int64), np.empty(_CHUNK, np.uint64)
    elsewhere = 0
    for chunk in range(0, ids.size, _CHUNK):
        n, cold = min(_CHUNK, ids.size - chunk), 0
        prefetch_homes(memory, ids[chunk : chunk + n], hashes)
        for k in range(n):
            row, _, _ = peek(memory, ids[chunk + k], hashes[k])
            elsewhere += row < 0 or row >= memory.cold
            if row >= memory.cold:
                rows[cold] = row
                cold += 1
        read(memory, rows, cold)
    return elsewhere


@compiled
def read(memory: TableMemory, rows: Numbers, n: int) -> None:
    """Reads the pages of the first n rows, which lie in the file. Changes `rows`."""
    stride = memory.slab.shape[1]
    for k in range(n):
        will_need(memory.shared[FILE], (rows[k] - memory.cold) * stride * 4, stride * 4)
    total = 0
    for k in range(n):
        for d in range(0, stride, _PAGE_VALUES):
            total ^= signed(memory.links[rows[k], d])
        total ^= signed(memory.links[rows[k], stride - 1])
    # otherwise the compiler would remove the reads
    if n > 0:
        rows[0] = total


@compiled
def bring_some(
    memory: TableMemory, cursor: np.uint64, homes: int, not_copied: bool, only_changed: bool, rows: Numbers
) -> int:
    """Reads the pages of the rows of the next `homes` homes: of all, or of those that the present cut needs. At most as
    many as `rows` has room for."""
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
    release(memory.stripes, stripe)
    read(memory, rows, n)
    return n


def bring_window(memory: TableMemory, cursor: np.uint64, homes: int, *, not_copied: bool, only_changed: bool) -> None:
    """Reads what a walk is about to read under a lock, as far as that is known."""
    if memory.shared[COLD_ROWS] > 0:
        bring_some(memory, cursor, homes, not_copied, only_changed, np.empty(2 * homes, np.int64))


# ---- into the file


@compiled
def hot_some(
    memory: TableMemory, cursor: np.uint64, homes: int, ids: Numbers, keys: Numbers, rows: Numbers
) -> tuple[int, np.uint64, bool]:
    """Finds the ids of the next `homes` homes whose rows are in memory, and these rows. A smaller key means that the id
    was pushed longer ago, or at the same time but less often. Rows beyond the limit move below it if there is room;
    otherwise their keys are below all others. Returns how many there are, the cursor, and whether that was the end of
    the table."""
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
    """Writes records[k] to slots[k], adjacent slots at once. Returns how many were written before the first failure."""
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
def confirm(memory: TableMemory, ids: Numbers, rows: Numbers, slots: Numbers, records: Any, moved: Any) -> None:
    """Makes slots[k] the place of the row of ids[k], if the row is still rows[k] in memory and unchanged since it was
    written: `records`, as int32. Sets moved[k] to whether it does."""
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
        release(memory.stripes, stripe)


@compiled
def _is_same(one: Any, other: Any) -> bool:
    differ = 0
    for d in range(one.size):
        differ |= one[d] ^ other[d]
    return differ == 0
