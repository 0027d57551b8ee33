"""Walks through a whole table in the order of hashes, a few hundred buckets at a time, while others push.

Owns: copying what a cut needs, and finding what expires. Invariants: a walk remembers a hash, not a bucket, so between
its steps stripes may grow and split, and entries may come and go; each step holds one stripe's lock; every entry whose
hash is below the cursor has been visited. Must not know: settings, chunks, threads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardyard.domain.compiling import compiled
from shardyard.domain.tables import row_expiry
from shardyard_ps_server.tables.loops.index import buckets_of, first_hash, hashed, home_of, lock_of, release
from shardyard_ps_server.tables.memory.layout import (
    AGE_SHIFT,
    BASE,
    CHANGED,
    DEPTH,
    EMPTY,
    FIELDS,
    FREQUENCY,
    FREQUENCY_SHIFT,
    HIGH,
    HOMES,
    LENGTH,
    LOW,
    MARK,
    ROW,
    SIDE,
    SLOT_SHIFT,
    SLOTS,
    Floats,
    Numbers,
    TableMemory,
    Words,
    signed,
)

_by_age_or_frequency = compiled(row_expiry.expires)


@compiled
def leave(memory: TableMemory, stripe: int, home: int) -> tuple[np.uint64, bool]:
    """Unlocks the stripe. Returns the hash at which the walk continues, and whether it has ended."""
    stripes, at = memory.stripes, stripe * FIELDS
    high, homes = stripes[at + HIGH], stripes[at + HOMES]
    if home < homes:
        cursor, over = first_hash(home, stripes[at + LOW], stripes[at + DEPTH], homes), False
    elif high < SLOTS:
        cursor, over = np.uint64(high) << SLOT_SHIFT, False
    else:
        cursor, over = EMPTY, True
    release(stripes, stripe)
    return cursor, over


@compiled
def copy_some(
    memory: TableMemory, cursor: np.uint64, homes: int, only_changed: bool, clear: bool, words: Words, records: Floats
) -> tuple[int, np.uint64, bool]:
    """Copies those entries of the next `homes` homes that the cut lacks, into `words` (three for each, as in its log)
    and `records`. `clear`: from now on they count as not changed. Returns how many there are, the cursor, and whether
    the walk has ended."""
    stripe, home = lock_of(memory, cursor)
    at = stripe * FIELDS
    side, base = np.uint64(memory.shared[SIDE]), np.uint64(memory.stripes[at + BASE])
    buckets, stride = buckets_of(memory.stripes, stripe), memory.slab.shape[1]
    stop = min(home + homes, memory.stripes[at + HOMES])
    b, n = home, 0
    # entries whose home is before `stop` end at an empty bucket
    while b < stop or buckets[2 * b + 1] != EMPTY:
        word = buckets[2 * b + 1]
        if word != EMPTY and (word & MARK) != side:
            if n == records.shape[0]:
                # the next step begins at the same place, since copied entries are marked
                stop = home
                break
            if not only_changed or (word & CHANGED) != EMPTY:
                words[3 * n], words[3 * n + 1], words[3 * n + 2] = buckets[2 * b], word, base
                row = signed(word & ROW) - 1
                if row >= 0:
                    for d in range(stride):
                        records[n, d] = memory.slab[row, d]
                n += 1
            word ^= MARK
            buckets[2 * b + 1] = word & ~CHANGED if clear else word
        b += 1
    after, over = leave(memory, stripe, stop)
    return n, after, over


class Reasons(NamedTuple):
    """Why an entry expires (shardyard.domain.tables.row_expiry); 0 is no reason. `unit`: the present, in units of ages.
    `fewest`: less frequent rows are too many, and of those with this frequency as many as `ties[0]` says. `besides`:
    ids that stay, ascending."""

    unit: int
    age_units: int
    grace_units: int
    frequency_min: int
    square_norm_min: float
    fewest: int
    ties: Numbers
    besides: Numbers


@compiled
def expire_some(
    memory: TableMemory, cursor: np.uint64, homes: int, dim: int, reasons: Reasons, gone: Numbers
) -> tuple[int, np.uint64, bool]:
    """Writes the ids that expire into `gone`: those whose home is one of the next `homes` homes, each once. Ids for
    which `gone` has no room are found by a later walk. Returns as `copy_some`."""
    stripe, home = lock_of(memory, cursor)
    at = stripe * FIELDS
    base = memory.stripes[at + BASE]
    buckets = buckets_of(memory.stripes, stripe)
    stop = min(home + homes, memory.stripes[at + HOMES])
    depth, all_homes = np.uint64(memory.stripes[at + DEPTH]), np.uint64(memory.stripes[at + HOMES])
    first, second = memory.seeds[0], memory.seeds[1]
    slab, ties, besides = memory.slab, reasons.ties, reasons.besides
    unit, age_units, grace_units = reasons.unit, reasons.age_units, reasons.grace_units
    frequency_min, square_norm_min, fewest = reasons.frequency_min, reasons.square_norm_min, reasons.fewest
    b, n = home, 0
    while b < stop or buckets[2 * b + 1] != EMPTY:
        word = buckets[2 * b + 1]
        if word != EMPTY and _expires(
            slab, word, base, dim, unit, age_units, grace_units, frequency_min, square_norm_min, fewest, ties[0]
        ):
            number = signed(buckets[2 * b])
            at_home = home <= home_of(hashed(number, first, second), depth, all_homes) < stop
            if at_home and not _is_in(besides, number):
                if n == gone.size:
                    break
                if fewest > 0 and signed((word >> FREQUENCY_SHIFT) & FREQUENCY) == fewest:
                    ties[0] -= 1
                gone[n] = number
                n += 1
        b += 1
    after, over = leave(memory, stripe, stop)
    return n, after, over


@compiled
def _expires(
    slab: Floats,
    word: np.uint64,
    base: int,
    dim: int,
    unit: int,
    age_units: int,
    grace_units: int,
    frequency_min: int,
    square_norm_min: float,
    fewest: int,
    ties: int,
) -> bool:
    """Takes single numbers: with a tuple of arrays each call would count references, which takes longer than the
    rest."""
    age = unit - (base + signed(word >> AGE_SHIFT))
    frequency, row = signed((word >> FREQUENCY_SHIFT) & FREQUENCY), signed(word & ROW) - 1
    if _by_age_or_frequency(age, frequency, row >= 0, age_units, grace_units, frequency_min, fewest):
        return True
    if row >= 0 and frequency == fewest and ties > 0:
        return True
    if row >= 0 and square_norm_min > 0 and age >= grace_units:
        total = 0.0
        for d in range(dim):
            total += np.float64(slab[row, d]) ** 2
        return total < square_norm_min
    return False


@compiled
def _is_in(numbers: Numbers, number: np.int64) -> bool:
    low, high = 0, numbers.size
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] < number:
            low = middle + 1
        else:
            high = middle
    return low < numbers.size and numbers[low] == number


@compiled
def count_some(memory: TableMemory, cursor: np.uint64, homes: int, histogram: Numbers) -> tuple[np.uint64, bool]:
    """Counts the frequencies of the rows of the next `homes` homes in `histogram`, which has 65,536 numbers. Returns
    the cursor, and whether the walk has ended. Rows that move meanwhile may be counted twice, or not at all."""
    stripe, home = lock_of(memory, cursor)
    at = stripe * FIELDS
    buckets = buckets_of(memory.stripes, stripe)
    stop = min(home + homes, memory.stripes[at + HOMES])
    end = stop if stop < memory.stripes[at + HOMES] else memory.stripes[at + LENGTH]
    for b in range(home, end):
        word = buckets[2 * b + 1]
        if (word & ROW) != EMPTY:
            histogram[signed((word >> FREQUENCY_SHIFT) & FREQUENCY)] += 1
    return leave(memory, stripe, stop)
