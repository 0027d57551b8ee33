"""A table as it is at one moment, copied while pushes continue.

Each entry has a mark that says whether the cut has its copy. A cut begins when the meaning of the mark is inverted, so
that at once no entry counts as copied. Then a walk copies entry after entry and sets the marks. Whatever is about to
change an entry that has not been copied copies it first, into the cut's log. When the walk ends, each entry was copied
by the walk or is in the log.

A cut for a checkpoint has a generation. The next one may contain only what has changed since, if this cut was read to
its end. If nothing of a cut was read, everything stays as it was before the cut. If a part was read, the next cut
contains the whole table.

Owns: the walk, the copies, and what is known of changes since the last cut. Invariants: one cut at a time; a cut that
is given up finishes its walk, so that the marks agree; the log has no entry twice. Must not know: files, checkpoints.
"""

from __future__ import annotations

import enum
import secrets
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardyard.domain.errors import NotReady, TableError
from shardyard_ps_server.tables.bloom_filter import FilterCut
from shardyard_ps_server.tables.loops import moves, walks
from shardyard_ps_server.tables.memory.layout import (
    AGE_SHIFT,
    CHANGED,
    FREQUENCY,
    FREQUENCY_SHIFT,
    LOGGED,
    MARK,
    ROW,
    SIDE,
    WINDOW_UNITS,
    Floats,
    Numbers,
    Words,
)
from shardyard_ps_server.tables.new_memory import with_log, without_log
from shardyard_ps_server.tables.state import TableState

HOMES_PER_STEP: Final = 512
"""The buckets that are copied while a stripe is locked once."""
CHUNK_ENTRIES: Final = 4_096
CHUNK_BYTES: Final = 16 << 20
"""The most bytes of rows in a chunk. Rows of a large dim come in chunks of fewer entries."""
_STEP_ENTRIES: Final = 2 * HOMES_PER_STEP


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some entries, in no particular order. `ids`: int64 (n,). `records`: float32 (m, dim + state), the rows of the
    first m ids; the other ids are counted and have no row. `frequencies`: int64 (n,), at most 65,535. `steps`: int64
    (n,), the step of each id's last push, or its time if the table counts ages in time; rounded down to whole units of
    ages, and exact for the last WINDOW_UNITS units."""

    ids: Numbers
    records: Floats
    frequencies: Numbers
    steps: Numbers
    dim: int

    @property
    def values(self) -> Floats:
        return self.records[:, : self.dim]

    @property
    def state(self) -> Floats:
        return self.records[:, self.dim :]


class CutEnd(enum.Enum):
    """How much of a cut was read."""

    ALL = "all"
    SOME = "some"
    NOTHING = "nothing"


class Changes(NamedTuple):
    """What is known of the changes since the cut of a generation."""

    generation: int
    are_known: bool
    removed: list[Numbers]
    """The ids that were removed since."""


class TableCuts:
    """Takes the cuts of a table. Safe for several threads."""

    def __init__(self, state: TableState) -> None:
        self._state = state
        self._cut: TableCut | None = None
        self._next = secrets.randbits(48)
        """Random, so that a generation of one table is not taken for that of another one."""
        self._lock = threading.Lock()
        self._changes = Changes(0, False, [])

    @property
    def generation(self) -> int:
        """The generation of the last cut for a checkpoint."""
        return self._changes.generation

    @property
    def known_since(self) -> int | None:
        """The generation since which the changes are known, if there is one."""
        return self._changes.generation if self._changes.are_known else None

    def note_removed(self, ids: Numbers) -> None:
        with self._lock:
            if self._changes.are_known and ids.size:
                self._changes.removed.append(ids)

    def items(self) -> Iterator[Chunk]:
        """Yields all entries as they are now, in chunks, while pushes continue. Raises NotReady while another cut is
        taken."""
        with self._begin(in_chain=False, since=None) as cut:
            yield from cut

    def take(self, since: int | None = None) -> TableCut:
        """Cuts the table as it is now, for a checkpoint. `since`: only what has changed after the cut of that
        generation, which must be the last cut and have been read to its end. Raises NotReady while another cut is
        taken, TableError for another generation."""
        known = self.known_since
        if since is not None and since != known:
            raise TableError(
                f"changes since generation {since} are not known; they are known since "
                + ("no generation" if known is None else f"generation {known}"),
                todo="take a cut of all entries",
            )
        return self._begin(in_chain=True, since=since)

    def _begin(self, *, in_chain: bool, since: int | None) -> TableCut:
        state = self._state
        with state.lock.alone():
            if self._cut is not None:
                raise NotReady("a cut of this table is already being taken")
            # both reserve memory, and may be refused, before anything changes
            cells = state.filter.cut() if in_chain and state.filter is not None else None
            state.use(with_log(state.memory, state.entries))
            state.memory.shared[SIDE] ^= int(MARK)
            state.memory.shared[LOGGED] = 0
            before = self._changes
            if in_chain:
                self._next += 1
                self._changes = Changes(self._next, True, [])
            removed = [] if since is None else before.removed
            generation = self._next if in_chain else 0
            self._cut = TableCut(
                state, cells, removed, generation, since is not None, lambda end: self._end(end, before, in_chain)
            )
            return self._cut

    def _end(self, end: CutEnd, before: Changes, in_chain: bool) -> None:
        with self._state.lock.alone():
            self._cut = None
            self._state.use(without_log(self._state.memory))
            if in_chain and end is not CutEnd.ALL:
                are_known = before.are_known and end is CutEnd.NOTHING
                removed = [*before.removed, *self._changes.removed] if are_known else []
                self._changes = Changes(before.generation, are_known, removed)


class TableCut:
    """Iterate once, then call `close`, or call it earlier if the rest is not needed.

    `generation`: 0 if the cut is not for a checkpoint. `only_changed`: entries that have not changed since the last
    generation are left out; then remove the ids in `removed`, each of which is there once, before you load the chunks.
    `updates`: the number of the last update. `now_ms`: the table's clock. `rows`, `entries`: how many there are."""

    def __init__(
        self,
        state: TableState,
        cells: FilterCut | None,
        removed: list[Numbers],
        generation: int,
        only_changed: bool,
        end: Callable[[CutEnd], None],
    ) -> None:
        self.generation, self.only_changed = generation, only_changed
        self.updates, self.now_ms, self.rows, self.entries = state.updates, state.now_ms, state.rows, state.entries
        self._unit, self._age_unit = state.unit(state.updates), state.settings.expiry.age_unit
        self._memory, self._stride, self._dim = state.memory, state.stride, state.settings.dim
        self._filter, self._cells, self._removed, self._on_end = state.filter, cells, removed, end
        self._begun, self._over, self._ended = False, False, False
        self._cursor = np.uint64(0)
        self._chunks = self._copies()

    @property
    def removed(self) -> Numbers:
        return np.unique(np.concatenate([np.empty(0, np.int64), *self._removed]))

    @property
    def cells(self) -> npt.NDArray[np.uint8] | None:
        """The filter of ids that have no row yet, if there is one. Read it before you close the cut."""
        return None if self._cells is None else self._cells.whole()

    def cell_pieces(self) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """Yields the filter in pieces, each with the number of its first cell; nothing if there is no filter."""
        return iter(()) if self._cells is None else self._cells.pieces()

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def __enter__(self) -> TableCut:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finishes the walk without copies if the cut was not read to its end."""
        self._chunks.close()
        if not self._ended:
            words, records = self._buffers(min(_STEP_ENTRIES, max(1, CHUNK_BYTES // (4 * self._stride))))
            while not self._over:
                self._step(words, records, clear=self._begun)
            self._end(CutEnd.SOME if self._begun else CutEnd.NOTHING)
        if self._cells is not None and self._filter is not None:
            self._filter.end(self._cells)

    def _end(self, how: CutEnd) -> None:
        self._ended = True
        self._on_end(how)

    def _copies(self) -> Generator[Chunk, None, None]:
        self._begun = True
        many = max(1, min(CHUNK_ENTRIES, CHUNK_BYTES // (4 * self._stride)))
        while not self._over:
            words, records = self._buffers(many + min(many, _STEP_ENTRIES))
            n = 0
            while n < many and not self._over:
                n += self._step(words[n:], records[n:])
            if n:
                yield self._chunk(words[:n], records[:n])
        logged = int(self._memory.shared[LOGGED])
        for at in range(0, logged, many):
            end = min(at + many, logged)
            words = self._memory.log_words[3 * at : 3 * end].reshape(-1, 3)
            records = self._memory.log_rows[at:end]
            if self.only_changed:
                changed = (words[:, 1] & CHANGED) != 0
                words, records = words[changed], records[changed]
            if words.size:
                yield self._chunk(words, records)
        self._end(CutEnd.ALL)

    def _buffers(self, n: int) -> tuple[Words, Floats]:
        return np.empty((n, 3), np.uint64), np.empty((n, self._stride), np.float32)

    def _step(self, words: Words, records: Floats, *, clear: bool = True) -> int:
        """Copies some entries to the front of the arrays, and returns how many. `clear`: marks them as not changed
        since this cut."""
        only_changed = self.only_changed
        moves.bring_window(self._memory, self._cursor, HOMES_PER_STEP, not_copied=True, only_changed=only_changed)
        clear = clear and self.generation > 0
        flat = words.reshape(-1)
        n, cursor, self._over = walks.copy_some(
            self._memory, self._cursor, HOMES_PER_STEP, only_changed, clear, flat, records
        )
        self._cursor = np.uint64(cursor)
        return int(n)

    def _chunk(self, words: Words, records: Floats) -> Chunk:
        has_row = (words[:, 1] & ROW) != 0
        if has_row.all():
            records = records.copy()
        else:
            words = words[np.argsort(~has_row, kind="stable")]
            records = records[has_row]
        word = words[:, 1]
        last = (words[:, 2] + (word >> AGE_SHIFT)).astype(np.int64)
        return Chunk(
            words[:, 0].view(np.int64).copy(),
            records,
            ((word >> FREQUENCY_SHIFT) & FREQUENCY).astype(np.int64),
            np.clip(last, self._unit - WINDOW_UNITS + 1, self._unit) * self._age_unit,
            self._dim,
        )
