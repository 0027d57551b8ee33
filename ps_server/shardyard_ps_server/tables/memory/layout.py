"""How a table lies in memory: words of a bucket, fields of a stripe, and the arrays that loops are given.

A bucket is two words: the id, and a word that is 0 in an empty bucket:

    bits  0-29  number of the row, plus one; 0: the id is counted, and has no row yet; from `TableMemory.cold` on: in
                a file
    bit     30  the mark: whether the cut that is being taken has this entry already (tables.cuts)
    bit     31  changed since the last cut
    bits 32-47  frequency: how often the id was pushed, at most 65,535
    bits 48-63  when it was pushed last, in units of steps after the stripe's `BASE`

The hash of an id has 64 bits. Its upper 12 are the slot of the directory that names the stripe; in a stripe that has
2**(12 - depth) slots the 32 bits after the upper `depth` ones are scaled to its number of homes. So buckets are in the
order of hashes but for what was displaced, and a place in that order outlives growth and splits.

Owns: names of places. Must not know: what is done there.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

SLOT_BITS: Final = 12
SLOTS: Final = 1 << SLOT_BITS
"""The most stripes that a table can have."""
WINDOW_UNITS: Final = 1 << 15
"""So far back the step of an id's last push is told exactly."""

ROW: Final = np.uint64((1 << 30) - 1)
MARK: Final = np.uint64(1 << 30)
CHANGED: Final = np.uint64(1 << 31)
FREQUENCY_SHIFT: Final = np.uint64(32)
FREQUENCY: Final = np.uint64(0xFFFF)
AGE_SHIFT: Final = np.uint64(48)
EMPTY: Final = np.uint64(0)
SLOT_SHIFT: Final = np.uint64(64 - SLOT_BITS)
S32: Final = np.uint64(32)

signed: Any = np.int64
"""A word as a number that may be negative: loops that mix the two would compute in floating point."""

# fields of a stripe; a look-up reads the first cache line alone
LOCK: Final = 0
ADDRESS: Final = 1
HOMES: Final = 2
DEPTH: Final = 3
LENGTH: Final = 8
"""Buckets, `HOMES` and a tail for what is displaced at the end; the last one stays empty."""
ENTRIES: Final = 9
BOUND: Final = 10
"""Entries at which it must grow."""
LOW: Final = 11
HIGH: Final = 12
"""Its slots, [LOW, HIGH)."""
BASE: Final = 13
FIELDS: Final = 16

TAIL_WORD: Final = -3
"""Among a stripe's words, the last one that an entry can have: when it is taken, its tail is full."""

# words that all stripes share
HEAP_LOCK: Final = 0
NEXT_ROW: Final = 8
FREE_ROW: Final = 9
"""The first freed row, and one; the next one stands in its first element."""
FREED: Final = 10
LIMIT: Final = 11
"""Rows that memory is to hold: those numbered from here on are taken last, and given up first."""
FREE_HIGH: Final = 12
HIGH_FREED: Final = 13
"""The same as FREE_ROW and FREED, of rows from LIMIT on."""
NEXT_SLOT: Final = 14
SLOTS_FREE: Final = 15
"""Slots of the file that were ever taken, and those of them that are free: a stack, `TableMemory.slots`."""
SIDE: Final = 16
"""What the mark of an entry is that needs no copy: 0 or `MARK`."""
FILE: Final = 17
"""The descriptor of the file with colder rows, where there is one."""
LOGGED: Final = 18
COLD_ROWS: Final = 19
"""Rows in the file."""
ADMITTED: Final = 20
"""Rows that pushes have made."""
SHARED_WORDS: Final = 24


class TableMemory(NamedTuple):
    """A table's memory, as loops take it. `slab[row]`: values, then state; `links`: the same as int32. Rows from `cold`
    on lie in a file that is mapped there, to be read alone; `slots`: those of them that are free. `log_words`
    (three words an entry: id, word, base) and `log_rows` are the cut's. `fresh`: how state begins."""

    seeds: Words
    directory: npt.NDArray[np.int16]
    stripes: Numbers
    shared: Numbers
    slab: Floats
    links: npt.NDArray[np.int32]
    cold: int
    slots: npt.NDArray[np.int32]
    log_words: Words
    log_rows: Floats
    fresh: Floats
    initial_kind: int
    initial_scale: np.float64
    initial_key: Any
    """np.uint64"""


class TableRoom(NamedTuple):
    """TableMemory for a batch, of more ids and stripes than it has. `which`: the run of each id, while they are put in
    order; the rest as in `LoopBatch`."""

    ids: Numbers
    hashes: Words
    order: npt.NDArray[np.int32]
    which: npt.NDArray[np.int16]
    at: Numbers
    ends: Numbers
    slots: npt.NDArray[np.int16]


class LoopBatch(NamedTuple):
    """Ids in the order of their stripes. `order[p]`: the place in the caller's arrays of what stands at p; run r is
    [at[r], ends[r]) and has what is still to be done."""

    ids: Numbers
    hashes: Words
    order: npt.NDArray[np.int32]
    at: Numbers
    ends: Numbers
    slots: npt.NDArray[np.int16]
    """The directory when they were put in order."""
