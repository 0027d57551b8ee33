"""Batches against a table: look-ups, pushes, removals, and rows that are put in as they were.

Owns: one loop for each; those that change something go through a batch stripe by stripe, those that are free first.
Invariants: a look-up changes nothing; an entry that the cut being taken needs is copied before it changes; what becomes
of a row depends on what is said of its id, in that order, and on nothing else in the batch. A loop that finds a stripe
full gives its number, after all that fits, and goes on from there when it is called again; -1: all is done. Must not
know: settings, limits, threads.
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
    hashed,
    home_of,
    let_go,
    lock_of,
    prefetch_home,
    take_out,
    take_turn,
    units_in,
)
from shardyard_ps_server.tables.memory.heap import free_row, raise_row, take_row
from shardyard_ps_server.tables.memory.intrinsics import add, fence, load, pointer, will_need
from shardyard_ps_server.tables.memory.layout import (
    ADDRESS,
    ADMITTED,
    AGE_SHIFT,
    BASE,
    BOUND,
    CHANGED,
    DEPTH,
    EMPTY,
    ENTRIES,
    FIELDS,
    FILE,
    FREQUENCY,
    FREQUENCY_SHIFT,
    HOMES,
    LENGTH,
    LOCK,
    LOGGED,
    MARK,
    ROW,
    SIDE,
    SLOT_SHIFT,
    Floats,
    LoopBatch,
    Numbers,
    TableMemory,
    TableRoom,
    Words,
    signed,
)

# not so many that what the first pass over them has asked for leaves the cache before the second
_CHUNK = 256
_CHUNK_LEAST = 16
_CHUNK_VALUES = 4_096
_LINE = 16
_TRIES = 2
# no lock's value: somebody was writing
_WRITTEN = -1

# how ids are admitted
ALL = 0
BY_COUNT = 1
BY_CHANCE = 2
BY_ESTIMATE = 3


class AdmissionRule(NamedTuple):
    """Which ids get a row: by code; from so many pushes on; by chance, below `share` of 2**64."""

    code: int
    threshold: int
    share: Any
    """np.uint64"""
    key: Any
    """np.uint64: of the draws of this step."""


class Pushed(NamedTuple):
    """What a push brings: a rule and whether it `updates` rows, addresses of gradients (n, dim) and of how often each
    id occurred (int64; 0: once), the unit of steps, and about how often ids were there before (int64; empty unless they
    are admitted by that)."""

    code: int
    updates: bool
    scalars: Floats
    gradients: int
    counts: int
    unit: int
    estimates: Numbers


# ---- look-ups


@compiled
def look_up(memory: TableMemory, ids: Numbers, dim: int, out: Floats, zeros: bool) -> None:
    """out[i]: the values of the row of ids[i]; where it has none the initial ones, or zeros. It takes no lock: it
    reads, and again under the lock where somebody has written meanwhile. What was replaced must stay mapped."""
    rows, places = np.empty(_CHUNK, np.int64), np.empty(_CHUNK, np.int64)
    hashes, versions = np.empty(_CHUNK, np.uint64), np.empty(_CHUNK, np.int64)
    first, second = memory.seeds[0], memory.seeds[1]
    directory, stripes, slab, stride = memory.directory, memory.stripes, memory.slab, memory.slab.shape[1]
    many = max(_CHUNK_LEAST, min(_CHUNK, _CHUNK_VALUES // dim))
    for chunk in range(0, ids.size, many):
        n = min(many, ids.size - chunk)
        for k in range(n):
            word = hashed(ids[chunk + k], first, second)
            at = signed(directory[signed(word >> SLOT_SHIFT)]) * FIELDS
            home = home_of(word, np.uint64(stripes[at + DEPTH]), np.uint64(stripes[at + HOMES]))
            prefetch(array_at(pointer(stripes[at + ADDRESS]), (1,), np.uint64), 2 * home)
            hashes[k] = word
        for k in range(n):
            slot = signed(hashes[k] >> SLOT_SHIFT)
            at = signed(directory[slot]) * FIELDS
            version = load(stripes, at + LOCK)
            address, homes, depth = stripes[at + ADDRESS], stripes[at + HOMES], stripes[at + DEPTH]
            moved = signed(directory[slot]) * FIELDS != at
            fence()
            places[k], rows[k], versions[k] = at + LOCK, -1, version
            # these belong together, or a bucket would be sought beyond the last one
            if version & 1 or moved or load(stripes, at + LOCK) != version:
                versions[k] = _WRITTEN
                continue
            buckets = array_at(pointer(address), (2 * homes,), np.uint64)
            b = find(buckets, ids[chunk + k], home_of(hashes[k], np.uint64(depth), np.uint64(homes)))
            row = signed(buckets[2 * b + 1] & ROW) - 1
            rows[k] = row
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
    """The row of an id, or -1; its values are in out[i]. One in the file is read without the lock first."""
    tries = 0
    while True:
        stripe, home = lock_of(memory, word)
        at = stripe * FIELDS + LOCK
        buckets = buckets_of(memory.stripes, stripe)
        row = signed(buckets[2 * find(buckets, number, home) + 1] & ROW) - 1
        alone = row < memory.cold or tries == _TRIES
        version = memory.stripes[at] + 1
        if not alone:
            let_go(memory.stripes, stripe)
        if row >= 0:
            for d in range(dim):
                out[i, d] = memory.slab[row, d]
        if alone:
            let_go(memory.stripes, stripe)
            return int(row)
        fence()
        if load(memory.stripes, at) == version:
            return int(row)
        tries += 1


@compiled
def find_missing(memory: TableMemory, batch: LoopBatch, missing: Any) -> None:
    """missing[i]: whether ids[i] has no row. The batch is as it was then."""
    begins = batch.at.copy()
    run, stripe, end = take_turn(memory, batch, 0)
    while run >= 0:
        at = stripe * FIELDS
        depth, homes = np.uint64(memory.stripes[at + DEPTH]), np.uint64(memory.stripes[at + HOMES])
        buckets = buckets_of(memory.stripes, stripe)
        for p in range(batch.at[run], end):
            b = find(buckets, batch.ids[p], home_of(batch.hashes[p], depth, homes))
            missing[batch.order[p]] = (buckets[2 * b + 1] & ROW) == EMPTY
        let_go(memory.stripes, stripe)
        batch.at[run] = end
        run, stripe, end = take_turn(memory, batch, run + 1)
    for run in range(begins.size):
        batch.at[run] = begins[run]


# ---- pushes


@compiled
def push_all(
    memory: TableMemory,
    room: TableRoom,
    ids: Numbers,
    stripes: int,
    dim: int,
    pushed: Pushed,
    entrance: AdmissionRule,
    start: int,
) -> int:
    """Puts the ids into a batch, in `room`, of so many runs, and pushes it."""
    n = ids.size
    batch = LoopBatch(room.ids[:n], room.hashes[:n], room.order[:n], room.at[:stripes], room.ends[:stripes], room.slots)
    arrange(memory, ids, stripes, batch, room.which)
    return push(memory, batch, dim, pushed, entrance, start)


@compiled
def push(memory: TableMemory, batch: LoopBatch, dim: int, pushed: Pushed, entrance: AdmissionRule, start: int) -> int:
    """Counts the ids, makes the rows of those that are admitted, and updates rows by their gradients."""
    rows = np.empty(_CHUNK, np.int64)
    run, stripe, end = take_turn(memory, batch, start)
    while run >= 0:
        done = _write(memory, batch, stripe, batch.at[run], end, dim, pushed, entrance, rows)
        let_go(memory.stripes, stripe)
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
    entrance: AdmissionRule,
    rows: Numbers,
) -> int:
    """Up to where it is done: `end`, unless the stripe is full."""
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
                before = signed(0) if entrance.code != BY_ESTIMATE else pushed.estimates[i]
                if not _counts(entrance, batch.ids[p], before + times):
                    rows[p - chunk] = -1
                    continue
                if _is_full(memory, stripe, b):
                    done = p
                    break
                buckets[2 * b] = np.uint64(batch.ids[p])
                memory.stripes[at + ENTRIES] += 1
                # marked: a cut that is being taken does not have it
                word = np.uint64(memory.shared[SIDE]) | (np.uint64(min(before, FREQUENCY_MAX)) << FREQUENCY_SHIFT)
            elif (word & MARK) != np.uint64(memory.shared[SIDE]):
                keep(memory, stripe, buckets[2 * b], word)
            row = signed(word & ROW) - 1
            if row >= memory.cold:
                row = raise_row(memory, row)
            frequency = np.uint64(min(signed((word >> FREQUENCY_SHIFT) & FREQUENCY) + times, FREQUENCY_MAX))
            if row < 0 and (entrance.code != BY_COUNT or signed(frequency) >= entrance.threshold):
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
def _counts(entrance: AdmissionRule, number: np.int64, times: int) -> Any:
    """Whether an id that is not there yet gets an entry: a row, or a count."""
    if entrance.code == BY_CHANCE:
        return is_drawn(number, entrance.key, entrance.share)
    return entrance.code != BY_ESTIMATE or times >= entrance.threshold


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
    """Copies an entry, and its row, for the cut that is being taken."""
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
    """gone[i]: whether ids[i] was there."""
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
        let_go(memory.stripes, stripe)
        batch.at[run] = end
        run, stripe, end = take_turn(memory, batch, run + 1)
    return -1


@compiled
def drop(memory: TableMemory, stripe: int, buckets: Words, b: int) -> None:
    """The entry of a bucket is no more, and its row is free."""
    word = buckets[2 * b + 1]
    if (word & MARK) != np.uint64(memory.shared[SIDE]):
        keep(memory, stripe, buckets[2 * b], word)
    row = signed(word & ROW) - 1
    take_out(memory, stripe, buckets, b)
    if row >= 0:
        free_row(memory, row)


# ---- rows as they were


@compiled
def restore(
    memory: TableMemory, batch: LoopBatch, records: Floats, frequencies: Numbers, units: Numbers, start: int
) -> int:
    """Puts entries in, with records[i] (values and state) as the row of ids[i]; without one where there are fewer
    records."""
    run, stripe, end = take_turn(memory, batch, start)
    while run >= 0:
        done = _put_in(memory, batch, stripe, batch.at[run], end, records, frequencies, units)
        let_go(memory.stripes, stripe)
        batch.at[run] = done
        if done < end:
            return stripe
        run, stripe, end = take_turn(memory, batch, run + 1)
    return -1


@compiled
def _put_in(
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
