"""The memory of a table's stripes: when a stripe grows or splits, and how large it is then.

Owns: the arrays of buckets. Invariants:
- A stripe has at most `ENTRIES_MAX` entries, unless it has a single slot, so that moving them takes a few milliseconds.
- In a stripe that was split, at least 0.48 of the buckets are used: less than 34 bytes an entry.
- Compact stripes use 0.6 of their buckets, 27 bytes an entry. Those of a large table split one after the other, not all
  with the same push, so that rows can leave memory before (`nbytes_soon`).
- One stripe grows at a time. Replaced memory is retired, since look-ups read without locks.

Must not know: rows.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np

from shardyard_ps_server.tables.loops import index
from shardyard_ps_server.tables.memory.address_space import HUGE_BYTES, populate, reserve
from shardyard_ps_server.tables.memory.epoch_reclaim import EpochReclaim
from shardyard_ps_server.tables.memory.layout import (
    BOUND,
    EMPTY,
    ENTRIES,
    FIELDS,
    HIGH,
    HOMES,
    LOW,
    SLOTS,
    TAIL_WORD,
    TableMemory,
    Words,
)

ENTRIES_MAX: Final = 250_000
LOAD: Final = 0.75
LOAD_SPREAD: Final = 0.05
LOAD_AFTER: Final = 0.625
SPLIT_SPREAD: Final = 0.25
SOON: Final = 0.9
"""A stripe grows soon if it has this share of the entries at which it grows."""
SOON_STRIPES: Final = 4
"""There should be room for the growth of this many stripes; any others grow later."""
HOMES_FIRST: Final = 64
PARALLEL_STRIPES: Final = 16
"""A table of some ten thousand entries has this many stripes already, for threads that run at the same time."""
PARALLEL_ENTRIES: Final = 1_024
BUCKET_BYTES: Final = 16
_DOUBLED_HOMES: Final = 1 << 14
_HUGE_FROM_BYTES: Final = HUGE_BYTES * 3 // 4
_TAIL_SHARE: Final = 64
_TAIL_LEAST: Final = 32


class Stripes:
    """Loops lock stripes themselves (loops.index). `compact`: memory is scarce."""

    def __init__(self, memory: TableMemory, reclaim: EpochReclaim, *, compact: bool = False) -> None:
        self._memory, self._reclaim, self._compact = memory, reclaim, compact
        self._growing = threading.Lock()
        first = _room(HOMES_FIRST)
        self._rooms = [first]
        self._nbytes = first.nbytes
        index.found(memory, first, HOMES_FIRST, bound_of(HOMES_FIRST, 0))

    @property
    def count(self) -> int:
        return len(self._rooms)

    @property
    def entries(self) -> int:
        return int(self._memory.stripes.reshape(SLOTS, FIELDS)[: self.count, ENTRIES].sum())

    @property
    def homes(self) -> int:
        return int(self._memory.stripes.reshape(SLOTS, FIELDS)[: self.count, HOMES].sum())

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def nbytes_soon(self) -> int:
        """`nbytes` after the largest of the stripes that grow soon have grown."""
        fields = self._memory.stripes.reshape(SLOTS, FIELDS)[: self.count]
        growing = fields[:, ENTRIES] > SOON * fields[:, BOUND]
        largest: list[int] = np.sort(fields[growing, HOMES])[-SOON_STRIPES:].tolist()
        return self.nbytes + BUCKET_BYTES * sum(more_homes(homes) - homes for homes in largest)

    def make_room(self, stripe: int) -> None:
        """Called after a loop has found that stripe full: makes room for at least one more entry."""
        with self._growing:
            fields = self._memory.stripes[stripe * FIELDS : (stripe + 1) * FIELDS]
            entries, bound, homes = int(fields[ENTRIES]), int(fields[BOUND]), int(fields[HOMES])
            if entries < bound and self._rooms[stripe][TAIL_WORD] == EMPTY:
                # another thread has made room. Check it now: after new memory is reserved, the other thread may have
                # filled the stripe again, and then it should split, not double
                return
            can_split = int(fields[HIGH] - fields[LOW]) > 1
            too_few = self.count < PARALLEL_STRIPES and entries >= PARALLEL_ENTRIES
            most = most_of(stripe) if self._compact else ENTRIES_MAX
            if entries >= bound and can_split and (entries >= most or too_few):
                self._split(stripe, entries)
            else:
                self._grow(stripe, homes, limit=most if can_split else 1 << 62)

    def _grow(self, stripe: int, homes: int, *, limit: int) -> None:
        while True:
            homes = self._fitted(more_homes(homes))
            room = _room(homes)
            done = index.grow(self._memory, stripe, room, homes, min(bound_of(homes, stripe), limit))
            if done >= 0:
                break
        if done:
            self._replace(stripe, room)

    def _split(self, stripe: int, entries: int) -> None:
        # the halves differ by a few times the root of their size
        homes = self._fitted(int((entries / 2 + 4 * entries**0.5) / LOAD_AFTER))
        while True:
            left, right = _room(homes), _room(homes)
            if index.split(self._memory, stripe, self.count, left, right, homes, bound_of(homes, 0)):
                break
            homes = self._fitted(more_homes(homes))
        self._replace(stripe, left)
        self._rooms.append(right)
        self._nbytes += right.nbytes

    def _replace(self, stripe: int, room: Words) -> None:
        former, self._rooms[stripe] = self._rooms[stripe], room
        self._nbytes += room.nbytes - former.nbytes
        self._reclaim.retire(former)

    def _fitted(self, homes: int) -> int:
        return homes if self._compact else fitted(homes)


def more_homes(homes: int) -> int:
    """Twice as many; for a large stripe a fifth more."""
    return 2 * homes if homes < _DOUBLED_HOMES else homes * 6 // 5


def fitted(homes: int) -> int:
    """At least as many: as many as fill the last huge page. In small pages each look-up would miss the TLB."""
    nbytes = length_of(homes) * BUCKET_BYTES
    if nbytes < _HUGE_FROM_BYTES:
        return homes
    length = -(-nbytes // HUGE_BYTES) * HUGE_BYTES // BUCKET_BYTES
    return (length - _TAIL_LEAST) * _TAIL_SHARE // (_TAIL_SHARE + 1)


def bound_of(homes: int, stripe: int) -> int:
    """The number of entries at which a stripe grows. It differs a little, so that not all stripes grow at once."""
    return int(homes * (LOAD - LOAD_SPREAD * _share(stripe)))


def most_of(stripe: int) -> int:
    """The number of entries at which a compact stripe splits. It differs, so that not all stripes split at once."""
    return int(ENTRIES_MAX * (1 - SPLIT_SPREAD * _share(stripe)))


def _share(stripe: int) -> float:
    """A number in [0, 1) that differs between adjacent stripes."""
    return stripe * 7 % 16 / 16


def length_of(homes: int) -> int:
    """The number of buckets: `homes` and a tail for entries that are displaced at the end."""
    return homes + homes // _TAIL_SHARE + _TAIL_LEAST


def _room(homes: int) -> Words:
    """Empty buckets. Their pages come now, since the stripe is locked while its entries move."""
    length = length_of(homes)
    if length * BUCKET_BYTES < _HUGE_FROM_BYTES:
        return np.zeros(2 * length, np.uint64)
    room = reserve(length * BUCKET_BYTES, np.uint64, small_bytes=0)
    populate(room, 0, room.nbytes)
    return room
