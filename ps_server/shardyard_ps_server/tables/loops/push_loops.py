"""Look-ups, pushes and removals of batches of ids, and rows that are loaded.

Owns: one loop for each. Loops that change something go through a batch stripe by stripe, free stripes first.
Invariants: a look-up changes nothing; an entry is copied before it changes if the present cut still needs it; a row
depends only on the gradients of its id, in their order, and on nothing else in the batch. A loop returns -1 when all is
done. If a stripe is full, it returns the stripe's number, and continues there when it is called again. Must not know:
settings, limits, threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shardyard.domain.compiling import compiled
from shardyard.domain.limits import FREQUENCY_MAX
from shardyard.domain.tables import row_rules
from shardyard.domain.tables.prefetch import prefetch
from shardyard.domain.tables.row_admission import is_drawn
from shardyard.domain.tables.row_values import fill_row
from shardyard_ps_server.tables.loops.index import (
    arrange,
    array_at,
    buckets_of,
    find,
    home_of,
    lock_of,
    peek,
    prefetch_home,
    prefetch_homes,
    release,
    remove_entry,
    take_turn,
    units_in,
)
from shardyard_ps_server.tables.memory.heap import free_row, raise_row, take_row
from shardyard_ps_server.tables.memory.intrinsics import add, fence, load, pointer, will_need
from shardyard_ps_server.tables.memory.layout import (
    ADMITTED,
    AGE_SHIFT,
    BASE,
    BOUND,
    CHANGED,
    COLD,
    COUNTS_AT,
    DEPTH,
    DIRECTORY_AT,
    EMPTY,
    ENTRIES,
    ESTIMATES_AT,
    FIELDS,
    FILE,
    FIRST_STRIPE,
    FREQUENCY,
    FREQUENCY_SHIFT,
    GRADIENTS_AT,
    HOMES,
    ID_COUNT,
    IDS_AT,
    LENGTH,
    LOCK,
    LOG_ENTRIES,
    LOG_ROWS_AT,
    LOG_WORDS_AT,
    LOGGED,
    MARK,
    OUT_AT,
    ROW,
    SEEDS_AT,
    SHARED_AT,
    SHARED_WORDS,
    SIDE,
    SLAB_AT,
    SLAB_ROWS,
    SLOT_COUNT,
    SLOTS,
    SLOTS_AT,
    STRIPE_COUNT,
    STRIPES_AT,
    UNIT,
    Floats,
    LoopBatch,
    Numbers,
    RowFormat,
    TableMemory,
    TableRoom,
    Words,
    signed,
)

# few enough that what the first pass has prefetched is still in the cache in the second
_CHUNK = 256
_CHUNK_LEAST = 16
_CHUNK_VALUES = 4_096
_LINE = 16
_TRIES = 2

# how ids are admitted
ALL = 0
BY_COUNT = 1
BY_CHANCE = 2
BY_ESTIMATE = 3


class AdmissionRule(NamedTuple):
    """Which ids get a row. `code`: one of the above. `threshold`: from this many pushes on. `share`: with this chance,
    of 2**64."""

    code: int
    threshold: int
    share: Any
    """np.uint64"""
    key: Any
    """np.uint64, for the draws of this step."""


class Pushed(NamedTuple):
    """What a push contains: an update rule and whether it `updates` rows; the addresses of gradients (n, dim) and of
    how often each id occurred (int64; 0: once); the present unit of ages; and estimates of how often ids were pushed
    before (int64; empty unless ids are admitted by estimate)."""

    code: int
    updates: bool
    scalars: Floats
    gradients: int
    counts: int
    unit: int
    estimates: Numbers


@compiled
def memory_of(format_: RowFormat, record: Numbers) -> TableMemory:
    """The memory of a table, from its record (`record_of`)."""
    stride, log = format_.stride, record[LOG_ENTRIES]
    return TableMemory(
        array_at(pointer(record[SEEDS_AT]), (2,), np.uint64),
        array_at(pointer(record[DIRECTORY_AT]), (SLOTS,), np.int16),
        array_at(pointer(record[STRIPES_AT]), (SLOTS * FIELDS,), np.int64),
        array_at(pointer(record[SHARED_AT]), (SHARED_WORDS,), np.int64),
        array_at(pointer(record[SLAB_AT]), (record[SLAB_ROWS], stride), np.float32),
        array_at(pointer(record[SLAB_AT]), (record[SLAB_ROWS], stride), np.int32),
        record[COLD],
        array_at(pointer(record[SLOTS_AT]), (record[SLOT_COUNT],), np.int32),
        array_at(pointer(record[LOG_WORDS_AT]), (3 * log,), np.uint64),
        array_at(pointer(record[LOG_ROWS_AT]), (log, stride), np.float32),
        format_.fresh,
        format_.initial_kind,
        format_.initial_scale,
        format_.initial_key,
    )


# ---- look-ups


@compiled
def look_up_in(format_: RowFormat, parts: Numbers, dim: int, zeros: bool) -> None:
    """Looks up in several tables with the same settings. `parts`: shape (tables, READ_WORDS)."""
    for p in range(parts.shape[0]):
        part = parts[p]
        ids = array_at(pointer(part[IDS_AT]), (part[ID_COUNT],), np.int64)
        out = array_at(pointer(part[OUT_AT]), (part[ID_COUNT], dim), np.float32)
        look_up(memory_of(format_, part), ids, dim, out, zeros)


@compiled
def look_up(memory: TableMemory, ids: Numbers, dim: int, out: Floats, zeros: bool) -> None:
    """Sets out[i] to the values of the row of ids[i], or to initial values, or zeros. Takes no lock: what was written
    meanwhile is read again under the lock. Memory that was replaced must stay mapped."""
    rows, places = np.empty(_CHUNK, np.int64), np.empty(_CHUNK, np.int64)
    hashes, versions = np.empty(_CHUNK, np.uint64), np.empty(_CHUNK, np.int64)
    stripes, slab, stride = memory.stripes, memory.slab, memory.slab.shape[1]
    many = max(_CHUNK_LEAST, min(_CHUNK, _CHUNK_VALUES // dim))
    for chunk in range(0, ids.size, many):
        n = min(many, ids.size - chunk)
        prefetch_homes(memory, ids[chunk : chunk + n], hashes)
        for k in range(n):
            row, place, version = peek(memory, ids[chunk + k], hashes[k])
            rows[k], places[k], versions[k] = row, place, version
            if row >= memory.cold:
                will_need(memory.shared[FILE], (row - memory.cold) * stride * 4, dim * 4)
            elif row >= 0:
                for d in range(0, dim, _LINE):
                    prefetch(slab, row * stride + d)
        for k in range(n):
            row, i = rows[k], chunk + k
            if row >= 0:
                for d in range(dim):
                    out[i, d] = slab[row, d]
        fence()
        for k in range(n):
            row, i = rows[k], chunk + k
            if load(stripes, places[k]) != versions[k]:
                row = _read_alone(memory, hashes[k], ids[i], dim, out, i)
            if row < 0:
                if zeros:
                    for d in range(dim):
                        out[i, d] = 0
                else:
                    fill_row(out[i], memory.initial_kind, memory.initial_scale, memory.initial_key, ids[i])


@compiled
def _read_alone(memory: TableMemory, word: np.uint64, number: np.int64, dim: int, out: Floats, i: int) -> int:
    """Copies the row of an id into out[i]. Returns the row, or -1. A row in the file is first read without the lock."""
    tries = 0
    while True:
        stripe, home = lock_of(memory, word)
        at = stripe * FIELDS + LOCK
        buckets = buckets_of(memory.stripes, stripe)
        row = signed(buckets[2 * find(buckets, number, home) + 1] & ROW) - 1
        alone = row < memory.cold or tries == _TRIES
        version = memory.stripes[at] + 1
        if not alone:
            release(memory.stripes, stripe)
        if row >= 0:
            for d in range(dim):
                out[i, d] = memory.slab[row, d]
        if alone:
            release(memory.stripes, stripe)
            return int(row)
        fence()
        if load(memory.stripes, at) == version:
            return int(row)
        tries += 1


@compiled
def find_missing(memory: TableMemory, batch: LoopBatch, missing: Any) -> None:
    """Sets missing[i] to whether ids[i] has no row. The batch can be used again."""
    begins = batch.at.copy()
    run, stripe, end = take_turn(memory, batch, 0)
    while run >= 0:
        at = stripe * FIELDS
        depth, homes = np.uint64(memory.stripes[at + DEPTH]), np.uint64(memory.stripes[at + HOMES])
        buckets = buckets_of(memory.stripes, stripe)
        for p in range(batch.at[run], end):
            b = find(buckets, batch.ids[p], home_of(batch.hashes[p], depth, homes))
            missing[batch.order[p]] = (buckets[2 * b + 1] & ROW) == EMPTY
        release(memory.stripes, stripe)
        batch.at[run] = end
        run, stripe, end = take_turn(memory, batch, run + 1)
    for run in range(begins.size):
        batch.at[run] = begins[run]


# ---- pushes


@compiled
def push_in(
    format_: RowFormat,
    parts: Numbers,
    begin: int,
    room: TableRoom,
    dim: int,
    pushed: Pushed,
    admission: AdmissionRule,
) -> int:
    """Pushes to several tables with the same settings, from number `begin` on. `parts`: shape (tables, PUSH_WORDS);
    `pushed`: what all have in common. Returns the number of the table in which a stripe was full: its batch, in `room`,
    is not done yet. -1: all are done."""
    for p in range(begin, parts.shape[0]):
        part = parts[p]
        n = part[ID_COUNT]
        ids = array_at(pointer(part[IDS_AT]), (n,), np.int64)
        estimates = array_at(pointer(part[ESTIMATES_AT]), (n,), np.int64)
        mine = Pushed(
            pushed.code, pushed.updates, pushed.scalars, part[GRADIENTS_AT], part[COUNTS_AT], part[UNIT], estimates
        )
        memory, stripes = memory_of(format_, part), part[STRIPE_COUNT]
        if push_all(memory, room, ids, stripes, dim, mine, admission, part[FIRST_STRIPE]) >= 0:
            return p
    return -1


@compiled
def push_all(
    memory: TableMemory,
    room: TableRoom,
    ids: Numbers,
    stripes: int,
    dim: int,
    pushed: Pushed,
    admission: AdmissionRule,
    start: int,
) -> int:
    """Sorts the ids into a batch, in `room`, for so many stripes, and pushes the batch."""
    n = ids.size
    batch = LoopBatch(room.ids[:n], room.hashes[:n], room.order[:n], room.at[:stripes], room.ends[:stripes], room.slots)
    arrange(memory, ids, stripes, batch, room.which)
    return push(memory, batch, dim, pushed, admission, start)


@compiled
def push(memory: TableMemory, batch: LoopBatch, dim: int, pushed: Pushed, admission: AdmissionRule, start: int) -> int:
    """Counts the ids, makes the rows of those that are admitted, and updates rows by their gradients."""
    rows = np.empty(_CHUNK, np.int64)
    run, stripe, end = take_turn(memory, batch, start)
    while run >= 0:
        done = _write(memory, batch, stripe, batch.at[run], end, dim, pushed, admission, rows)
        release(memory.stripes, stripe)
        batch.at[run] = done
        if done < end:
            return stripe
        run, stripe, end = take_turn(memory, batch, run + 1)
    return -1


@compiled
def _write(
    memory: TableMemory,
    batch: LoopBatch,
    stripe: int,
    begin: int,
    end: int,
    dim: int,
    pushed: Pushed,
    admission: AdmissionRule,
    rows: Numbers,
) -> int:
    """Returns up to where the run is done: `end`, unless the stripe is full."""
    at = stripe * FIELDS
    depth, homes = np.uint64(memory.stripes[at + DEPTH]), np.uint64(memory.stripes[at + HOMES])
    buckets = buckets_of(memory.stripes, stripe)
    units = np.uint64(units_in(memory, stripe, pushed.unit))
    counts = array_at(pointer(pushed.counts), (batch.order.size,), np.int64)
    gradients = array_at(pointer(pushed.gradients), (batch.order.size, dim), np.float32)
    chunk = begin
    while chunk < end:
        stop = min(chunk + _CHUNK, end)
        for p in range(chunk, stop):
            prefetch_home(buckets, batch.hashes[p], depth, homes)
        done = stop
        for p in range(chunk, stop):
            i = batch.order[p]
            times = signed(1) if pushed.counts == 0 else counts[i]
            b = find(buckets, batch.ids[p], home_of(batch.hashes[p], depth, homes))
            word = buckets[2 * b + 1]
            if word == EMPTY:
                before = signed(0) if admission.code != BY_ESTIMATE else pushed.estimates[i]
                if not _is_admitted(admission, batch.ids[p], before + times):
                    rows[p - chunk] = -1
                    continue
                if _is_full(memory, stripe, b):
                    done = p
                    break
                buckets[2 * b] = np.uint64(batch.ids[p])
                memory.stripes[at + ENTRIES] += 1
                # marked as copied, since the present cut does not contain it
                word = np.uint64(memory.shared[SIDE]) | (np.uint64(min(before, FREQUENCY_MAX)) << FREQUENCY_SHIFT)
            elif (word & MARK) != np.uint64(memory.shared[SIDE]):
                keep(memory, stripe, buckets[2 * b], word)
            row = signed(word & ROW) - 1
            if row >= memory.cold:
                row = raise_row(memory, row)
            frequency = np.uint64(min(signed((word >> FREQUENCY_SHIFT) & FREQUENCY) + times, FREQUENCY_MAX))
            if row < 0 and (admission.code != BY_COUNT or signed(frequency) >= admission.threshold):
                row = take_row(memory)
                add(memory.shared, ADMITTED, 1)
                _fill(memory, row, dim, batch.ids[p], pushed)
            last = max(word >> AGE_SHIFT, units)
            buckets[2 * b + 1] = (
                np.uint64(row + 1)
                | np.uint64(memory.shared[SIDE])
                | CHANGED
                | (frequency << FREQUENCY_SHIFT)
                | (last << AGE_SHIFT)
            )
            rows[p - chunk] = row
        if pushed.updates:
            row_rules.apply(
                pushed.code,
                pushed.scalars,
                memory.slab,
                rows[: done - chunk],
                batch.order[chunk:done],
                gradients,
                dim,
            )
        chunk = done
        if done < stop:
            break
    return chunk


@compiled
def _is_admitted(admission: AdmissionRule, number: np.int64, times: int) -> Any:
    """Whether a new id gets an entry: a row, or a count."""
    if admission.code == BY_CHANCE:
        return is_drawn(number, admission.key, admission.share)
    return admission.code != BY_ESTIMATE or times >= admission.threshold


@compiled
def _is_full(memory: TableMemory, stripe: int, b: int) -> Any:
    at = stripe * FIELDS
    return memory.stripes[at + ENTRIES] >= memory.stripes[at + BOUND] or b >= memory.stripes[at + LENGTH] - 1


@compiled
def _fill(memory: TableMemory, row: int, dim: int, number: np.int64, pushed: Pushed) -> None:
    values = memory.slab[row]
    fill_row(values[:dim], memory.initial_kind, memory.initial_scale, memory.initial_key, number)
    for k in range(memory.fresh.size):
        values[dim + k] = memory.fresh[k]
    row_rules.begin(pushed.code, pushed.scalars, values, dim)


@compiled
def keep(memory: TableMemory, stripe: int, key: np.uint64, word: np.uint64) -> None:
    """Copies an entry and its row to the log of the present cut."""
    k = add(memory.shared, LOGGED, 1)
    memory.log_words[3 * k], memory.log_words[3 * k + 1] = key, word
    memory.log_words[3 * k + 2] = np.uint64(memory.stripes[stripe * FIELDS + BASE])
    row = signed(word & ROW) - 1
    if row >= 0:
        for d in range(memory.slab.shape[1]):
            memory.log_rows[k, d] = memory.slab[row, d]


# ---- removals


@compiled
def remove(memory: TableMemory, batch: LoopBatch, gone: Any, start: int) -> int:
    """Sets gone[i] to whether ids[i] was there."""
    run, stripe, end = take_turn(memory, batch, start)
    while run >= 0:
        at = stripe * FIELDS
        depth, homes = np.uint64(memory.stripes[at + DEPTH]), np.uint64(memory.stripes[at + HOMES])
        buckets = buckets_of(memory.stripes, stripe)
        for p in range(batch.at[run], end):
            b = find(buckets, batch.ids[p], home_of(batch.hashes[p], depth, homes))
            gone[batch.order[p]] = buckets[2 * b + 1] != EMPTY
            if buckets[2 * b + 1] != EMPTY:
                drop(memory, stripe, buckets, b)
        release(memory.stripes, stripe)
        batch.at[run] = end
        run, stripe, end = take_turn(memory, batch, run + 1)
    return -1


@compiled
def drop(memory: TableMemory, stripe: int, buckets: Words, b: int) -> None:
    """Removes the entry of a bucket, and frees its row."""
    word = buckets[2 * b + 1]
    if (word & MARK) != np.uint64(memory.shared[SIDE]):
        keep(memory, stripe, buckets[2 * b], word)
    row = signed(word & ROW) - 1
    remove_entry(memory, stripe, buckets, b)
    if row >= 0:
        free_row(memory, row)


# ---- rows that are loaded


@compiled
def load_batch(
    memory: TableMemory, batch: LoopBatch, records: Floats, frequencies: Numbers, units: Numbers, start: int
) -> int:
    """Sets entries, with records[i], values and state, as the row of ids[i]. Ids beyond the last record get no row."""
    run, stripe, end = take_turn(memory, batch, start)
    while run >= 0:
        done = _load(memory, batch, stripe, batch.at[run], end, records, frequencies, units)
        release(memory.stripes, stripe)
        batch.at[run] = done
        if done < end:
            return stripe
        run, stripe, end = take_turn(memory, batch, run + 1)
    return -1


@compiled
def _load(
    memory: TableMemory,
    batch: LoopBatch,
    stripe: int,
    begin: int,
    end: int,
    records: Floats,
    frequencies: Numbers,
    units: Numbers,
) -> int:
    at = stripe * FIELDS
    depth, homes = np.uint64(memory.stripes[at + DEPTH]), np.uint64(memory.stripes[at + HOMES])
    buckets = buckets_of(memory.stripes, stripe)
    for p in range(begin, end):
        i = batch.order[p]
        b = find(buckets, batch.ids[p], home_of(batch.hashes[p], depth, homes))
        word = buckets[2 * b + 1]
        if word == EMPTY:
            if _is_full(memory, stripe, b):
                return p
            buckets[2 * b] = np.uint64(batch.ids[p])
            memory.stripes[at + ENTRIES] += 1
        elif (word & MARK) != np.uint64(memory.shared[SIDE]):
            keep(memory, stripe, buckets[2 * b], word)
        row = signed(word & ROW) - 1
        if i < records.shape[0]:
            if row >= memory.cold:
                free_row(memory, row)
                row = signed(-1)
            if row < 0:
                row = take_row(memory)
            for d in range(memory.slab.shape[1]):
                memory.slab[row, d] = records[i, d]
        elif row >= 0:
            free_row(memory, row)
            row = -1
        last = np.uint64(units_in(memory, stripe, units[i]))
        buckets[2 * b + 1] = (
            np.uint64(row + 1)
            | np.uint64(memory.shared[SIDE])
            | CHANGED
            | (np.uint64(frequencies[i]) << FREQUENCY_SHIFT)
            | (last << AGE_SHIFT)
        )
    return end
