"""A table as it is at one moment, copied while pushes go on.

Owns: a cut's walk and its copies. A cut is made in a moment: the side on which an entry's mark says "copied" changes,
so that no entry is. Then the walk copies entries and turns their marks; whoever is about to change one that is not
copied yet copies it first (the cut's log). When the walk is through, all are copied or in the log. Invariants: one cut
at a time; a cut that is given up finishes its walk, so that the marks agree; one of which nothing was read leaves the
chain of checkpoints as it was; the log has no entry twice.
Must not know: files, checkpoints.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shardyard_ps_server.tables.bloom_filter import CellsThen
from shardyard_ps_server.tables.loops import moves, walks
from shardyard_ps_server.tables.memory.layout import (
    AGE_SHIFT,
    CHANGED,
    FREQUENCY,
    FREQUENCY_SHIFT,
    LOGGED,
    ROW,
    WINDOW_UNITS,
    Floats,
    Numbers,
    TableMemory,
    Words,
)

HOMES_PER_STEP: Final = 512
"""Buckets for which a stripe's lock is held."""
CHUNK_ENTRIES: Final = 4_096
CHUNK_BYTES: Final = 16 << 20
"""Of rows; those of a large dim come in smaller chunks."""
_STEP_ENTRIES: Final = 2 * HOMES_PER_STEP
_NOBODY: Final[Numbers] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some entries, in no order that means anything. `ids`: int64 (n,); `records`: float32 (m, dim + state), the rows
    of the first m ids; the others are counted and have none. `frequencies`: int64 (n,), at most 65,535. `steps`: int64
    (n,), the step of each id's last push, or its time where ages are told in time, in whole units and as far back as
    units are told apart."""

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


@dataclass(frozen=True, slots=True)
class CutMoment:
    """What a cut is told. `generation`: 0, it is not one in a chain of checkpoints. `only_changed`: entries that have
    not changed since the last generation are left out. `updates`: the number of the last one; `now_ms`: the table's
    clock; `unit`: the time of that moment in units of ages. `rows`, `entries`: how many there are."""

    generation: int
    only_changed: bool
    removed: Sequence[Numbers]
    cells: CellsThen | None
    updates: int
    now_ms: int
    unit: int
    rows: int
    entries: int
    age_unit: int
    dim: int


class CutEnd(enum.Enum):
    """How much of a cut was read."""

    ALL = "all"
    SOME = "some"
    NOTHING = "nothing"


class TableCut:
    """Iterate once, then `close`, or before if not all of it is wanted. `removed`: ids, each once, that are to be taken
    out before the chunks go in (only_changed). `cells`: the filter of ids that have no row yet, where there is one,
    until the cut is closed. `updates`, `now_ms`, `rows`, `entries`: as in CutMoment."""

    def __init__(
        self, memory: TableMemory, moment: CutMoment, end: Callable[[CutEnd], None], close: Callable[[], None]
    ) -> None:
        self._memory, self._moment, self._end, self._let_go = memory, moment, end, close
        self._begun = False
        self._cursor, self._over, self._ended = np.uint64(0), False, False
        self._chunks = self._copies()

    @property
    def generation(self) -> int:
        return self._moment.generation

    @property
    def only_changed(self) -> bool:
        return self._moment.only_changed

    @property
    def removed(self) -> Numbers:
        return np.unique(np.concatenate([_NOBODY, *self._moment.removed]))

    @property
    def cells(self) -> npt.NDArray[np.uint8] | None:
        return None if self._moment.cells is None else self._moment.cells.whole()

    def cell_pieces(self) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """The filter a piece at a time, each with the number of its first cell; nothing where there is no filter."""
        return iter(()) if self._moment.cells is None else self._moment.cells.pieces()

    @property
    def updates(self) -> int:
        return self._moment.updates

    @property
    def now_ms(self) -> int:
        return self._moment.now_ms

    @property
    def rows(self) -> int:
        return self._moment.rows

    @property
    def entries(self) -> int:
        return self._moment.entries

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def __enter__(self) -> TableCut:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Marks agree after it. A cut of which not all was read is none in the chain of checkpoints, and breaks it if
        something was."""
        self._chunks.close()
        if not self._ended:
            self._ended = True
            words, records = self._buffers(min(_STEP_ENTRIES, max(1, CHUNK_BYTES // (4 * self._memory.slab.shape[1]))))
            while not self._over:
                self._step(words, records, clear=self._begun)
            self._end(CutEnd.SOME if self._begun else CutEnd.NOTHING)
        self._let_go()

    def _copies(self) -> Generator[Chunk, None, None]:
        self._begun = True
        many = max(1, min(CHUNK_ENTRIES, CHUNK_BYTES // (4 * self._memory.slab.shape[1])))
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
            if self._moment.only_changed:
                changed = (words[:, 1] & CHANGED) != 0
                words, records = words[changed], records[changed]
            if words.size:
                yield self._chunk(words, records)
        self._ended = True
        self._end(CutEnd.ALL)

    def _buffers(self, n: int) -> tuple[Words, Floats]:
        return np.empty((n, 3), np.uint64), np.empty((n, self._memory.slab.shape[1]), np.float32)

    def _step(self, words: Words, records: Floats, *, clear: bool = True) -> int:
        """Copies some entries to the front of the arrays; how many. `clear`: they count as not changed from then on."""
        only_changed = self._moment.only_changed
        moves.bring_window(self._memory, self._cursor, HOMES_PER_STEP, not_copied=True, only_changed=only_changed)
        n, cursor, self._over = walks.copy_some(
            self._memory,
            self._cursor,
            HOMES_PER_STEP,
            only_changed,
            clear and self._moment.generation > 0,
            words.reshape(-1),
            records,
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
        moment, word = self._moment, words[:, 1]
        last = (words[:, 2] + (word >> AGE_SHIFT)).astype(np.int64)
        return Chunk(
            words[:, 0].view(np.int64).copy(),
            records,
            ((word >> FREQUENCY_SHIFT) & FREQUENCY).astype(np.int64),
            np.clip(last, moment.unit - WINDOW_UNITS + 1, moment.unit) * moment.age_unit,
            moment.dim,
        )
