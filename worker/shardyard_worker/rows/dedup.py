"""Finds the unique ids of a batch, and sums the gradients of each id's occurrences.

Owns: the numbering of ids in the order of first occurrence, the order in which unique ids travel, and the order of
sums. Invariants: unique ids are sorted by partition and ascend within each, so a partition's ids are one slice with
small gaps. A sum follows the order of the occurrences, so the same batch gives the same bits. The hash's seed is
random, so nobody can choose colliding ids; no result depends on it. Must not know: what a row is for, where it is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shardyard.domain.compiling import compiled
from shardyard.domain.errors import TooLarge
from shardyard.domain.tables.row_ids import check, writable
from shardyard.domain.tables.row_routing import put_partitions
from shardyard.domain.tables.splitmix_loops import mixed

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]

NUMBERS_MAX: Final = 1 << 30
_SLOTS_MIN: Final = 16
_FREE: Final = -1


@dataclass(frozen=True, slots=True)
class UniqueIds:
    """The unique ids of a batch.

    `ids`: shape (m,), by partition, ascending within each. `places`: shape (n,); the batch is `ids[places]`. `starts`:
    shape (partitions + 1,); partition p has ids[starts[p]:starts[p + 1]].
    """

    ids: Int64s
    places: Int64s
    starts: Int64s


def unique_ids(ids: Int64s, partitions: int = 1) -> UniqueIds:
    """The unique ids of `ids`, shape (n,)."""
    check(ids, partitions)
    met, places = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
    starts = np.zeros(partitions + 1, np.int64)
    slots, seed = _free_slots(max(ids.size, _SLOTS_MIN)), _random_seed()
    count = _find_unique(writable(ids), partitions, slots, seed, met, places, starts)
    return UniqueIds(met[:count], places, starts)


class IdNumbering:
    """Numbers ids from 0 in the order in which they were first added. It grows; no id is ever removed.

    Linear probing at a load of at most 1/2. At most NUMBERS_MAX ids. One thread at a time.
    """

    def __init__(self, expected: int = 0) -> None:
        self._ids = np.empty(max(expected, _SLOTS_MIN), np.int64)
        self._count = 0
        self._seed = _random_seed()
        self._slots = _free_slots(self._ids.size)

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> Int64s:
        """The ids by number: a view, valid until the next `add`."""
        return self._ids[: self._count]

    def find(self, ids: Int64s) -> Int64s:
        """The number of each id, -1 if it has none. Changes nothing."""
        found = np.empty(ids.size, np.int64)
        _find(writable(ids), self._slots, self._seed, self._ids, found)
        return found

    def add(self, ids: Int64s) -> Int64s:
        """The number of each id. Ids without one get the next numbers. Raises TooLarge when it is full."""
        found = np.empty(ids.size, np.int64)
        ids, done = writable(ids), 0
        while True:
            done, self._count = _add(ids, done, self._slots, self._seed, self._ids, self._count, found)
            if done == ids.size:
                return found
            self._grow()

    def _grow(self) -> None:
        if self._count >= NUMBERS_MAX:
            raise TooLarge(f"more than {NUMBERS_MAX} different ids in one process")
        grown = np.empty(min(2 * self._ids.size, NUMBERS_MAX), np.int64)
        grown[: self._count] = self.ids
        self._ids, self._slots = grown, _free_slots(grown.size)
        _place(self.ids, self._slots, self._seed)


def _random_seed() -> np.uint64:
    return np.uint64(int.from_bytes(os.urandom(8), "little"))


def _free_slots(ids: int) -> Int32s:
    """Empty slots for `ids` ids: a power of two, at least twice as many."""
    return np.full(1 << (2 * ids - 1).bit_length(), _FREE, np.int32)


# ---- sums


def sum_rows(gradients: Float32s, places: Int64s, rows: int) -> Float32s:
    """Shape (rows, dim): the sum of each row's gradients, in their order. `gradients`: shape (n, dim); `places`: the
    row of each gradient."""
    sums = np.zeros((rows, gradients.shape[1]), np.float32)
    _sum_rows(gradients, places, sums)
    return sums


# ---- loops


@compiled
def _add(
    ids: Int64s, begin: int, slots: Int32s, seed: np.uint64, known: Int64s, count: int, found: Int64s
) -> tuple[int, int]:
    """Numbers ids[begin:] until all are done or `known` is full. Returns how many of `ids` are done, and how many ids
    are known."""
    mask = np.uint64(slots.size - 1)
    one = np.uint64(1)
    for i in range(begin, ids.size):
        wanted = ids[i]
        at = mixed(np.uint64(wanted) ^ seed) & mask
        while True:
            number = slots[at]
            if number < 0:
                if count == known.size:
                    return i, count
                slots[at] = count
                known[count] = wanted
                found[i] = count
                count += 1
                break
            if known[number] == wanted:
                found[i] = number
                break
            at = (at + one) & mask
    return ids.size, count


@compiled
def _find(ids: Int64s, slots: Int32s, seed: np.uint64, known: Int64s, found: Int64s) -> None:
    mask = np.uint64(slots.size - 1)
    one = np.uint64(1)
    for i in range(ids.size):
        at = mixed(np.uint64(ids[i]) ^ seed) & mask
        number = slots[at]
        while number >= 0 and known[number] != ids[i]:
            at = (at + one) & mask
            number = slots[at]
        found[i] = number


@compiled
def _place(known: Int64s, slots: Int32s, seed: np.uint64) -> None:
    mask = np.uint64(slots.size - 1)
    one = np.uint64(1)
    for number in range(known.size):
        at = mixed(np.uint64(known[number]) ^ seed) & mask
        while slots[at] >= 0:
            at = (at + one) & mask
        slots[at] = number


@compiled
def _find_unique(
    ids: Int64s, partitions: int, slots: Int32s, seed: np.uint64, met: Int64s, places: Int64s, starts: Int64s
) -> int:
    """Sets `places` and `starts` as in UniqueIds, and the first elements of `met` to its ids. Returns how many there
    are."""
    _, count = _add(ids, 0, slots, seed, met, 0, places)
    order, ranks = np.empty(count, np.int64), np.empty(count, np.int64)
    _order(met[:count], partitions, order, starts)
    by_number = met[:count].copy()
    for rank in range(count):
        met[rank] = by_number[order[rank]]
        ranks[order[rank]] = rank
    for i in range(places.size):
        places[i] = ranks[places[i]]
    return count


@compiled
def _order(ids: Int64s, partitions: int, order: Int64s, starts: Int64s) -> None:
    """Writes into `order` the order of unique ids by partition, ascending within each, and into `starts`, zeros at
    first, where each partition's ids begin.

    A radix sort, from the lowest digit of 11 bits to the highest; digits that all ids share are skipped; partitions are
    last.
    """
    digits, mask, one = 6, np.uint64(2047), np.uint64(1)
    # the arrays change roles after each digit: assigning slices would make the compiler format errors, for 2 seconds
    keys, moved_keys = np.empty(ids.size, np.uint64), np.empty(ids.size, np.uint64)
    sorted_, moved = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
    differs = np.uint64(0)
    for i in range(ids.size):
        # flipping the sign bit makes unsigned keys ascend as signed ids do
        keys[i] = np.uint64(ids[i]) ^ (one << np.uint64(63))
        sorted_[i] = i
        differs |= keys[i] ^ keys[0]
    counts = np.empty(2048, np.int64)
    for d in range(digits):
        shift = np.uint64(11 * d)
        if (differs >> shift) & mask == 0:
            continue
        counts[:] = 0
        for i in range(ids.size):
            counts[(keys[i] >> shift) & mask] += 1
        at = 0
        for digit in range(2048):
            at, counts[digit] = at + counts[digit], at
        for i in range(ids.size):
            here = (keys[i] >> shift) & mask
            to = counts[here]
            counts[here] = to + 1
            moved_keys[to], moved[to] = keys[i], sorted_[i]
        keys, moved_keys = moved_keys, keys
        sorted_, moved = moved, sorted_
    if partitions == 1:
        starts[1] = ids.size
        for i in range(ids.size):
            order[i] = sorted_[i]
        return
    owners = np.empty(ids.size, np.int32)
    put_partitions(ids, partitions, owners)
    for i in range(ids.size):
        starts[owners[i] + 1] += 1
    for p in range(1, starts.size):
        starts[p] += starts[p - 1]
    ends = starts.copy()
    for i in range(ids.size):
        owner = owners[sorted_[i]]
        order[ends[owner]] = sorted_[i]
        ends[owner] += 1


@compiled
def _sum_rows(gradients: Float32s, places: Int64s, sums: Float32s) -> None:
    for i in range(places.size):
        row = places[i]
        for c in range(gradients.shape[1]):
            sums[row, c] += gradients[i, c]
