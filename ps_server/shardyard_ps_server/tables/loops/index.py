"""The index: from ids to buckets, by linear probing in stripes that grow and split.

Owns: hashing, searching, inserting and removing, and stripes. Invariants: an entry lies at its home or after it, with
no empty bucket in between (so when an entry is removed, later ones move up); a stripe is written under its lock only;
the seeds are random for each table, and private. Must not know: what a row is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from shardyard.domain.compiling import compiled
from shardyard.domain.tables.prefetch import prefetch
from shardyard_ps_server.tables.memory.intrinsics import fence, give_way, load, pointer, try_lock, unlock
from shardyard_ps_server.tables.memory.layout import (
    ADDRESS,
    AGE_SHIFT,
    BASE,
    BOUND,
    DEPTH,
    EMPTY,
    ENTRIES,
    FIELDS,
    HIGH,
    HOMES,
    LENGTH,
    LOCK,
    LOW,
    ROW,
    S32,
    SLOT_SHIFT,
    SLOTS,
    TAIL_WORD,
    WINDOW_UNITS,
    LoopBatch,
    Numbers,
    TableMemory,
    Words,
    signed,
)

array_at: Any = carray
_FIRST = np.uint64(0xD6E8FEB86659FD93)
_SECOND = np.uint64(0xC2B2AE3D27D4EB4F)
_S29 = np.uint64(29)
WRITTEN = -1
"""No lock has this value."""


@compiled
def hashed(number: np.int64, first: np.uint64, second: np.uint64) -> np.uint64:
    """One-to-one for each pair of seeds."""
    word = np.uint64(number) ^ first
    word = (word ^ (word >> S32)) * _FIRST + second
    word = (word ^ (word >> _S29)) * _SECOND
    return word ^ (word >> S32)


@compiled
def home_of(word: np.uint64, depth: np.uint64, homes: np.uint64) -> int:
    return int(signed(((word << depth) >> S32) * homes >> S32))


@compiled
def first_hash(home: int, low: int, depth: int, homes: int) -> np.uint64:
    """The smallest hash of a stripe whose home is `home` or later."""
    scaled = (np.uint64(home << 32) + np.uint64(homes - 1)) // np.uint64(homes)
    return (np.uint64(low) << SLOT_SHIFT) + (scaled << np.uint64(32 - depth))


@compiled
def buckets_of(stripes: Numbers, stripe: int) -> Words:
    at = stripe * FIELDS
    buckets: Words = array_at(pointer(stripes[at + ADDRESS]), (2 * stripes[at + LENGTH],), np.uint64)
    return buckets


@compiled
def lock(stripes: Numbers, stripe: int) -> None:
    tries = 0
    while not try_lock(stripes, stripe * FIELDS + LOCK):
        tries += 1
        if tries % 64 == 0:
            give_way()


@compiled
def release(stripes: Numbers, stripe: int) -> None:
    unlock(stripes, stripe * FIELDS + LOCK)


@compiled
def lock_of(memory: TableMemory, word: np.uint64) -> tuple[int, int]:
    """Locks the stripe of a hash. Returns the stripe, and the hash's home in it."""
    stripes = memory.stripes
    while True:
        slot = signed(word >> SLOT_SHIFT)
        stripe = signed(memory.directory[slot])
        lock(stripes, stripe)
        at = stripe * FIELDS
        if stripes[at + LOW] <= slot < stripes[at + HIGH]:
            return stripe, home_of(word, np.uint64(stripes[at + DEPTH]), np.uint64(stripes[at + HOMES]))
        release(stripes, stripe)


# ---- without a lock


@compiled
def prefetch_homes(memory: TableMemory, ids: Numbers, hashes: Words) -> None:
    """Prefetches the buckets at which a search for these ids begins, and sets their hashes."""
    first, second = memory.seeds[0], memory.seeds[1]
    directory, stripes = memory.directory, memory.stripes
    for k in range(ids.size):
        word = hashed(ids[k], first, second)
        at = signed(directory[signed(word >> SLOT_SHIFT)]) * FIELDS
        home = home_of(word, np.uint64(stripes[at + DEPTH]), np.uint64(stripes[at + HOMES]))
        prefetch(array_at(pointer(stripes[at + ADDRESS]), (1,), np.uint64), 2 * home)
        hashes[k] = word


@compiled
def peek(memory: TableMemory, number: np.int64, word: np.uint64) -> tuple[int, int, int]:
    """Reads an entry without its stripe's lock: (row, the place of the lock, its value before). The row is -1 if the id
    has none. It is right if the lock still has that value after the row was read. The value is WRITTEN if the stripe
    was being written."""
    directory, stripes = memory.directory, memory.stripes
    slot = signed(word >> SLOT_SHIFT)
    at = signed(directory[slot]) * FIELDS
    version = load(stripes, at + LOCK)
    address, homes, depth = stripes[at + ADDRESS], stripes[at + HOMES], stripes[at + DEPTH]
    moved = signed(directory[slot]) * FIELDS != at
    fence()
    # these must belong together, or the search would run past the last bucket
    if version & 1 or moved or load(stripes, at + LOCK) != version:
        return -1, at + LOCK, WRITTEN
    buckets = array_at(pointer(address), (2 * homes,), np.uint64)
    b = find(buckets, number, home_of(word, np.uint64(depth), np.uint64(homes)))
    return int(signed(buckets[2 * b + 1] & ROW) - 1), at + LOCK, version


# ---- batches


@compiled
def arrange(memory: TableMemory, ids: Numbers, stripes: int, batch: LoopBatch, which: Any) -> None:
    """Sorts `ids` into the batch: one run for each of so many stripes; within a run ids keep their order."""
    first, second = memory.seeds[0], memory.seeds[1]
    at, ends = batch.at, batch.ends
    for slot in range(memory.directory.size):
        batch.slots[slot] = memory.directory[slot]
    for s in range(stripes):
        ends[s] = 0
    for i in range(ids.size):
        # an id of a stripe that is newer than `stripes` may be in any run, since `_enter` looks where its ids are
        stripe = min(batch.slots[signed(hashed(ids[i], first, second) >> SLOT_SHIFT)], stripes - 1)
        which[i] = stripe
        ends[stripe] += 1
    total = 0
    for s in range(stripes):
        at[s] = total
        total += ends[s]
        ends[s] = at[s]
    for i in range(ids.size):
        stripe = which[i]
        p = ends[stripe]
        ends[stripe] = p + 1
        batch.order[p] = i
        batch.ids[p] = ids[i]
        batch.hashes[p] = hashed(ids[i], first, second)


@compiled
def _enter(memory: TableMemory, batch: LoopBatch, run: int) -> tuple[int, int]:
    """Locks the stripe of the run's next id. Returns the stripe, and where the run's ids of this stripe end. (-1, 0):
    another thread holds the stripe."""
    stripes, hashes = memory.stripes, batch.hashes
    begin, end = batch.at[run], batch.ends[run]
    stripe = signed(memory.directory[signed(hashes[begin] >> SLOT_SHIFT)])
    if not try_lock(stripes, stripe * FIELDS + LOCK):
        return -1, 0
    low = np.uint64(stripes[stripe * FIELDS + LOW])
    width = np.uint64(stripes[stripe * FIELDS + HIGH]) - low
    if (hashes[begin] >> SLOT_SHIFT) - low >= width:  # the stripe has split since the directory was read
        release(stripes, stripe)
        return -1, 0
    outside = 0
    for p in range(begin, end):
        outside += (hashes[p] >> SLOT_SHIFT) - low >= width
    if outside > 0:
        end = _divide(batch, begin, end, low, width, outside)
    return stripe, end


@compiled
def take_turn(memory: TableMemory, batch: LoopBatch, turn: int) -> tuple[int, int, int]:
    """Finds the first run, from `turn` on, that is not done and whose stripe is free, and locks the stripe. Returns
    (run, stripe, end); (-1, -1, 0): all runs are done."""
    runs = batch.at.size
    while True:
        left = False
        for k in range(turn, turn + runs):
            run = k % runs
            if batch.at[run] < batch.ends[run]:
                left = True
                stripe, end = _enter(memory, batch, run)
                if stripe >= 0:
                    return run, stripe, end
        if not left:
            return -1, -1, 0
        give_way()


@compiled
def _divide(batch: LoopBatch, begin: int, end: int, low: np.uint64, width: np.uint64, outside: int) -> int:
    """Moves ids of this stripe to the front; within both groups ids keep their order."""
    ids, hashes, order = np.empty(outside, np.int64), np.empty(outside, np.uint64), np.empty(outside, np.int32)
    to, others = begin, 0
    for p in range(begin, end):
        if (batch.hashes[p] >> SLOT_SHIFT) - low >= width:
            ids[others], hashes[others], order[others] = batch.ids[p], batch.hashes[p], batch.order[p]
            others += 1
        else:
            batch.ids[to], batch.hashes[to], batch.order[to] = batch.ids[p], batch.hashes[p], batch.order[p]
            to += 1
    for k in range(outside):
        batch.ids[to + k], batch.hashes[to + k], batch.order[to + k] = ids[k], hashes[k], order[k]
    return to


# ---- buckets


@compiled
def find(buckets: Words, number: np.int64, home: int) -> int:
    """The bucket of the id, or the empty bucket where the search ends."""
    key = np.uint64(number)
    b = home
    while buckets[2 * b + 1] != EMPTY and buckets[2 * b] != key:
        b += 1
    return b


@compiled
def prefetch_home(buckets: Words, word: np.uint64, depth: np.uint64, homes: np.uint64) -> None:
    prefetch(buckets, 2 * home_of(word, depth, homes))


@compiled
def remove_entry(memory: TableMemory, stripe: int, buckets: Words, b: int) -> None:
    """Removes the entry of bucket `b`. Later entries move up."""
    at = stripe * FIELDS
    depth, homes = np.uint64(memory.stripes[at + DEPTH]), np.uint64(memory.stripes[at + HOMES])
    first, second = memory.seeds[0], memory.seeds[1]
    hole, b = b, b + 1
    while buckets[2 * b + 1] != EMPTY:
        if home_of(hashed(signed(buckets[2 * b]), first, second), depth, homes) <= hole:
            buckets[2 * hole], buckets[2 * hole + 1] = buckets[2 * b], buckets[2 * b + 1]
            hole = b
        b += 1
    buckets[2 * hole], buckets[2 * hole + 1] = EMPTY, EMPTY
    memory.stripes[at + ENTRIES] -= 1


@compiled
def units_in(memory: TableMemory, stripe: int, unit: int) -> int:
    """The unit of ages, counted from the stripe's base. If it would not fit, the base moves first."""
    at = stripe * FIELDS
    if unit - memory.stripes[at + BASE] > 0xFFFF:
        base = unit - WINDOW_UNITS
        past = np.uint64(base - memory.stripes[at + BASE])
        buckets = buckets_of(memory.stripes, stripe)
        for b in range(memory.stripes[at + LENGTH]):
            word = buckets[2 * b + 1]
            age = word >> AGE_SHIFT
            buckets[2 * b + 1] = word - (min(age, past) << AGE_SHIFT)
        memory.stripes[at + BASE] = base
    return max(unit - int(memory.stripes[at + BASE]), 0)


# ---- growth


@compiled
def _put(buckets: Words, length: int, key: np.uint64, word: np.uint64, home: int) -> bool:
    b = home
    while buckets[2 * b + 1] != EMPTY:
        b += 1
    if b >= length - 1:
        return False
    buckets[2 * b], buckets[2 * b + 1] = key, word
    return True


@compiled
def grow(memory: TableMemory, stripe: int, room: Words, homes: int, bound: int) -> int:
    """Moves a stripe's entries into `room`, which is empty. Returns 1; 0 if the stripe is not full any more; -1 if the
    entries do not fit so many homes."""
    stripes, at = memory.stripes, stripe * FIELDS
    lock(stripes, stripe)
    buckets, length = buckets_of(stripes, stripe), room.size // 2
    if stripes[at + ENTRIES] < stripes[at + BOUND] and buckets[TAIL_WORD] == EMPTY:
        release(stripes, stripe)
        return 0
    first, second = memory.seeds[0], memory.seeds[1]
    depth = np.uint64(stripes[at + DEPTH])
    for b in range(stripes[at + LENGTH]):
        word = buckets[2 * b + 1]
        if word != EMPTY:
            key = buckets[2 * b]
            if not _put(room, length, key, word, home_of(hashed(signed(key), first, second), depth, np.uint64(homes))):
                release(stripes, stripe)
                return -1
    _place(stripes, stripe, room, homes, bound)
    release(stripes, stripe)
    return 1


@compiled
def _place(stripes: Numbers, stripe: int, room: Words, homes: int, bound: int) -> None:
    at = stripe * FIELDS
    stripes[at + ADDRESS] = signed(room.ctypes.data)
    stripes[at + HOMES], stripes[at + LENGTH], stripes[at + BOUND] = homes, room.size // 2, bound


@compiled
def split(memory: TableMemory, stripe: int, young: int, left: Words, right: Words, homes: int, bound: int) -> bool:
    """Gives the upper half of a stripe's slots to the new stripe `young`. Each half moves to a room of its own. Returns
    whether they fit."""
    stripes, at, other = memory.stripes, stripe * FIELDS, young * FIELDS
    lock(stripes, stripe)
    buckets, length = buckets_of(stripes, stripe), left.size // 2
    first, second = memory.seeds[0], memory.seeds[1]
    depth = stripes[at + DEPTH] + 1
    middle = (stripes[at + LOW] + stripes[at + HIGH]) // 2
    moved = 0
    for b in range(stripes[at + LENGTH]):
        word = buckets[2 * b + 1]
        if word != EMPTY:
            key = buckets[2 * b]
            place = hashed(signed(key), first, second)
            upper = signed(place >> SLOT_SHIFT) >= middle
            moved += upper
            home = home_of(place, np.uint64(depth), np.uint64(homes))
            if not _put(right if upper else left, length, key, word, home):
                release(stripes, stripe)
                return False
    # other threads that need the young stripe wait until it is complete
    lock(stripes, young)
    _place(stripes, young, right, homes, bound)
    stripes[other + ENTRIES], stripes[other + DEPTH], stripes[other + BASE] = moved, depth, stripes[at + BASE]
    stripes[other + LOW], stripes[other + HIGH] = middle, stripes[at + HIGH]
    _place(stripes, stripe, left, homes, bound)
    stripes[at + ENTRIES] -= moved
    stripes[at + DEPTH], stripes[at + HIGH] = depth, middle
    for slot in range(stripes[other + LOW], stripes[other + HIGH]):
        memory.directory[slot] = young
    release(stripes, young)
    release(stripes, stripe)
    return True


@compiled
def found(memory: TableMemory, room: Words, homes: int, bound: int) -> None:
    """Makes the first stripe, which has all slots."""
    _place(memory.stripes, 0, room, homes, bound)
    memory.stripes[LOW], memory.stripes[HIGH], memory.stripes[DEPTH] = 0, SLOTS, 0
