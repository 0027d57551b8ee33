"""The index: from ids to buckets, by linear probing in stripes that grow and split.

Owns: hashing, finding, putting in and taking out, and stripes. Invariants: an entry lies at its home or after it, with
no empty bucket between (so one that is taken out is filled from behind, and nothing is left where it stood); a stripe
is read and written under its lock alone; the seeds are drawn anew for each table, and known to nobody. Must not know:
what a row is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from shardyard.domain.compiling import compiled
from shardyard.domain.tables.prefetch import prefetch
from shardyard_ps_server.tables.memory.intrinsics import give_way, pointer, try_lock, unlock
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
    S32,
    SLOT_BITS,
    SLOT_SHIFT,
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
    """The smallest hash of a stripe that is at home at `home` or after it."""
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
def let_go(stripes: Numbers, stripe: int) -> None:
    unlock(stripes, stripe * FIELDS + LOCK)


@compiled
def lock_of(memory: TableMemory, word: np.uint64) -> tuple[int, int]:
    """Locks the stripe of a hash; gives it, and its home there."""
    stripes = memory.stripes
    while True:
        slot = signed(word >> SLOT_SHIFT)
        stripe = signed(memory.directory[slot])
        lock(stripes, stripe)
        at = stripe * FIELDS
        if stripes[at + LOW] <= slot < stripes[at + HIGH]:
            return stripe, home_of(word, np.uint64(stripes[at + DEPTH]), np.uint64(stripes[at + HOMES]))
        let_go(stripes, stripe)


# ---- batches


@compiled
def arrange(memory: TableMemory, ids: Numbers, stripes: int, batch: LoopBatch, which: Any) -> None:
    """Puts `ids` into the batch, in so many runs: one for each stripe, as they are now, ids of a run in their order."""
    first, second = memory.seeds[0], memory.seeds[1]
    at, ends = batch.at, batch.ends
    for slot in range(memory.directory.size):
        batch.slots[slot] = memory.directory[slot]
    for s in range(stripes):
        ends[s] = 0
    for i in range(ids.size):
        # any run will do, since `_enter` looks where its ids are: also for a stripe that has come since
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
    """Locks the stripe of what the run has next; gives it, and where those of the run end that it has. (-1, 0) where
    another thread has it."""
    stripes, hashes = memory.stripes, batch.hashes
    begin, end = batch.at[run], batch.ends[run]
    stripe = signed(memory.directory[signed(hashes[begin] >> SLOT_SHIFT)])
    if not try_lock(stripes, stripe * FIELDS + LOCK):
        return -1, 0
    low = np.uint64(stripes[stripe * FIELDS + LOW])
    width = np.uint64(stripes[stripe * FIELDS + HIGH]) - low
    if (hashes[begin] >> SLOT_SHIFT) - low >= width:  # it has been split since the directory was read
        let_go(stripes, stripe)
        return -1, 0
    outside = 0
    for p in range(begin, end):
        outside += (hashes[p] >> SLOT_SHIFT) - low >= width
    if outside > 0:
        end = _divide(batch, begin, end, low, width, outside)
    return stripe, end


@compiled
def take_turn(memory: TableMemory, batch: LoopBatch, turn: int) -> tuple[int, int, int]:
    """The first run from `turn` on that has something left and whose stripe is free: (run, stripe, end), the stripe
    locked. (-1, -1, 0): nothing is left."""
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
    """Ids of this stripe first, then the others, each in their order."""
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
    """The bucket of the id, or the empty one where its search ends."""
    key = np.uint64(number)
    b = home
    while buckets[2 * b + 1] != EMPTY and buckets[2 * b] != key:
        b += 1
    return b


@compiled
def prefetch_home(buckets: Words, word: np.uint64, depth: np.uint64, homes: np.uint64) -> None:
    prefetch(buckets, 2 * home_of(word, depth, homes))


@compiled
def take_out(memory: TableMemory, stripe: int, buckets: Words, b: int) -> None:
    """The entry of bucket `b` is no more; those behind it move up."""
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
    """The unit of steps after the stripe's base; ages are moved where it would not fit."""
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
    """Moves a stripe's entries into `room`, which is empty. 0: no need, as neither its bound nor its tail is reached;
    -1: they do not fit so many homes; 1: done."""
    stripes, at = memory.stripes, stripe * FIELDS
    lock(stripes, stripe)
    buckets, length = buckets_of(stripes, stripe), room.size // 2
    if stripes[at + ENTRIES] < stripes[at + BOUND] and buckets[TAIL_WORD] == EMPTY:
        let_go(stripes, stripe)
        return 0
    first, second = memory.seeds[0], memory.seeds[1]
    depth = np.uint64(stripes[at + DEPTH])
    for b in range(stripes[at + LENGTH]):
        word = buckets[2 * b + 1]
        if word != EMPTY:
            key = buckets[2 * b]
            if not _put(room, length, key, word, home_of(hashed(signed(key), first, second), depth, np.uint64(homes))):
                let_go(stripes, stripe)
                return -1
    _settle(stripes, stripe, room, homes, bound)
    let_go(stripes, stripe)
    return 1


@compiled
def _settle(stripes: Numbers, stripe: int, room: Words, homes: int, bound: int) -> None:
    at = stripe * FIELDS
    stripes[at + ADDRESS] = signed(room.ctypes.data)
    stripes[at + HOMES], stripes[at + LENGTH], stripes[at + BOUND] = homes, room.size // 2, bound


@compiled
def split(memory: TableMemory, stripe: int, young: int, left: Words, right: Words, homes: int, bound: int) -> bool:
    """Gives the upper half of a stripe's slots to the stripe `young`, which is nobody's yet; each half moves to a room
    of its own. Whether they fit."""
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
                let_go(stripes, stripe)
                return False
    # whoever comes for the young one waits until all of it is there
    lock(stripes, young)
    _settle(stripes, young, right, homes, bound)
    stripes[other + ENTRIES], stripes[other + DEPTH], stripes[other + BASE] = moved, depth, stripes[at + BASE]
    stripes[other + LOW], stripes[other + HIGH] = middle, stripes[at + HIGH]
    _settle(stripes, stripe, left, homes, bound)
    stripes[at + ENTRIES] -= moved
    stripes[at + DEPTH], stripes[at + HIGH] = depth, middle
    for slot in range(stripes[other + LOW], stripes[other + HIGH]):
        memory.directory[slot] = young
    let_go(stripes, young)
    let_go(stripes, stripe)
    return True


@compiled
def found(memory: TableMemory, stripes: int, room_address: Numbers, homes: int, length: int, bound: int) -> None:
    """The first stripes, as many as a power of two, each with its share of the slots."""
    width = (1 << SLOT_BITS) // stripes
    depth = 0
    while (1 << depth) < stripes:
        depth += 1
    for s in range(stripes):
        at = s * FIELDS
        memory.stripes[at + ADDRESS], memory.stripes[at + HOMES] = room_address[s], homes
        memory.stripes[at + LENGTH], memory.stripes[at + BOUND] = length, bound
        memory.stripes[at + LOW], memory.stripes[at + HIGH] = s * width, (s + 1) * width
        memory.stripes[at + DEPTH] = depth
        for slot in range(s * width, (s + 1) * width):
            memory.directory[slot] = s
