"""How a table lies in memory: words of a bucket, fields of a stripe, and the arrays that loops get.

A bucket is two words: the id, and a word that is 0 in an empty bucket:

    bits  0-29  number of the row, plus one; 0: the id is counted and has no row yet; rows from `TableMemory.cold` on
                are in a file
    bit     30  the mark: whether the present cut has a copy of this entry (tables.cuts)
    bit     31  changed since the last cut
    bits 32-47  frequency: how often the id was pushed, at most 65,535
    bits 48-63  when it was pushed last, in units of ages after the stripe's `BASE`

The hash of an id has 64 bits. The upper 12 bits are a slot of the directory, which has the number of the stripe. A
stripe has 2**(12 - depth) slots; the 32 bits after the upper `depth` bits, scaled to the stripe's number of homes, are
the id's home. So buckets are in the order of hashes, except displaced entries, and a position in that order stays valid
when stripes grow and split.
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
"""The time of an id's last push is exact if it is at most this long ago."""

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
"""A word as a signed number: arithmetic that mixes signed and unsigned numbers would be in floating point."""

# fields of a stripe; a look-up reads only the first cache line
LOCK: Final = 0
ADDRESS: Final = 1
HOMES: Final = 2
DEPTH: Final = 3
LENGTH: Final = 8
"""Buckets: `HOMES`, and a tail for entries that are displaced at the end. The last one stays empty."""
ENTRIES: Final = 9
BOUND: Final = 10
"""Entries at which it must grow."""
LOW: Final = 11
HIGH: Final = 12
"""Its slots, [LOW, HIGH)."""
BASE: Final = 13
FIELDS: Final = 16

TAIL_WORD: Final = -3
"""Among a stripe's words, the last that an entry can use. If it is not empty, the tail is full."""

# words that all stripes share
HEAP_LOCK: Final = 0
NEXT_ROW: Final = 8
FREE_ROW: Final = 9
"""The first free row, plus one. The first element of a free row is the next one, plus one."""
FREED: Final = 10
LIMIT: Final = 11
"""How many rows memory should hold. Rows with this number or a higher one are allocated last, and freed first."""
FREE_HIGH: Final = 12
HIGH_FREED: Final = 13
"""FREE_ROW and FREED of the rows from LIMIT on."""
NEXT_SLOT: Final = 14
SLOTS_FREE: Final = 15
"""Slots of the file that were ever used, and how many of them are free: a stack, `TableMemory.slots`."""
SIDE: Final = 16
"""The mark of an entry that needs no copy: 0 or `MARK`."""
FILE: Final = 17
"""The descriptor of the file with colder rows, if there is one."""
LOGGED: Final = 18
COLD_ROWS: Final = 19
"""Rows in the file."""
ADMITTED: Final = 20
"""Rows that pushes have made."""
SHARED_WORDS: Final = 24


class TableMemory(NamedTuple):
    """A table's memory, as loops get it. `slab[row]`: values, then state; `links`: the same as int32. Rows from `cold`
    on lie in a file that is mapped there for reading; `slots`: those of them that are free. `log_words` (three words
    for each entry: id, word, base) and `log_rows` are the log of the present cut. `fresh`: the state of a new row."""

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


class RowFormat(NamedTuple):
    """What tables with the same settings have in common: the numbers in a row, and the rest as in `TableMemory`."""

    stride: int
    fresh: Floats
    initial_kind: int
    initial_scale: np.float64
    initial_key: Any


# fields of a table's record, `record_of`
SEEDS_AT: Final = 0
DIRECTORY_AT: Final = 1
STRIPES_AT: Final = 2
SHARED_AT: Final = 3
SLAB_AT: Final = 4
SLAB_ROWS: Final = 5
COLD: Final = 6
SLOTS_AT: Final = 7
SLOT_COUNT: Final = 8
LOG_WORDS_AT: Final = 9
LOG_ROWS_AT: Final = 10
LOG_ENTRIES: Final = 11
RECORD_WORDS: Final = 12

# and what a loop over several tables gets beside each record
IDS_AT: Final = 12
ID_COUNT: Final = 13
OUT_AT: Final = 14
READ_WORDS: Final = 15
GRADIENTS_AT: Final = 14
COUNTS_AT: Final = 15
ESTIMATES_AT: Final = 16
UNIT: Final = 17
STRIPE_COUNT: Final = 18
FIRST_STRIPE: Final = 19
PUSH_WORDS: Final = 20


def record_of(memory: TableMemory) -> Numbers:
    """Where a table's memory is: with its `RowFormat`, all that a loop needs."""
    arrays: dict[int, npt.NDArray[Any]] = {
        SEEDS_AT: memory.seeds,
        DIRECTORY_AT: memory.directory,
        STRIPES_AT: memory.stripes,
        SHARED_AT: memory.shared,
        SLAB_AT: memory.slab,
        SLOTS_AT: memory.slots,
        LOG_WORDS_AT: memory.log_words,
        LOG_ROWS_AT: memory.log_rows,
    }
    record = np.empty(RECORD_WORDS, np.int64)
    for field, array in arrays.items():
        record[field] = array.ctypes.data
    record[SLAB_ROWS], record[COLD] = len(memory.slab), memory.cold
    record[SLOT_COUNT], record[LOG_ENTRIES] = memory.slots.size, len(memory.log_rows)
    return record


class TableRoom(NamedTuple):
    """Memory for a batch, with room for more ids and stripes than it has. `which`: the run of each id while ids are
    sorted. The rest is as in `LoopBatch`."""

    ids: Numbers
    hashes: Words
    order: npt.NDArray[np.int32]
    which: npt.NDArray[np.int16]
    at: Numbers
    ends: Numbers
    slots: npt.NDArray[np.int16]


class LoopBatch(NamedTuple):
    """Ids in the order of their stripes. `order[p]`: the place of ids[p] in the caller's arrays. Run r has the ids
    [at[r], ends[r]), which are still to be done."""

    ids: Numbers
    hashes: Words
    order: npt.NDArray[np.int32]
    at: Numbers
    ends: Numbers
    slots: npt.NDArray[np.int16]
    """The directory at the time when ids were sorted."""
