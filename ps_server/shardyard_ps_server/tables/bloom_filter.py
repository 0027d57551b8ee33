"""Estimates how often ids were pushed: a counting Bloom filter (shardyard.domain.tables.row_admission), whose counts
are never too low.

Owns: the cells, their lock, and cuts of the cells. Invariants: the cells depend on what was counted, not on its order
nor on a table's private seed; a cut takes the same time for any number of cells, since each piece is copied before it
changes. Must not know: rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from shardyard.domain.errors import TableError
from shardyard.domain.tables.row_admission import PIECE_CELLS, count_cells
from shardyard.domain.tables.row_ids import Ids, writable
from shardyard_ps_server.tables.memory.address_space import reserve
from shardyard_ps_server.tables.memory.layout import Numbers

Cells = npt.NDArray[np.uint8]


class FilterCut:
    """The cells as they were when `BloomFilter.cut` returned this, until `BloomFilter.end` or the next cut."""

    def __init__(self, cells: Cells, lock: threading.Lock) -> None:
        self._cells, self._lock = cells, lock
        self.copies: Cells = reserve(cells.size, np.uint8)
        self.kept: Cells = np.zeros(-(-cells.size // PIECE_CELLS), np.uint8)
        self.over = False

    def pieces(self) -> Iterator[tuple[int, Cells]]:
        """Yields all cells in pieces, each with the number of its first cell."""
        for at in range(self.kept.size):
            begin = at * PIECE_CELLS
            with self._lock:
                assert not self.over, "the cut of this filter has ended"
                self.keep(at)
            yield begin, self.copies[begin : begin + PIECE_CELLS]

    def whole(self) -> Cells:
        return np.concatenate([piece for _, piece in self.pieces()])

    def keep(self, at: int) -> None:
        """Copies a piece that is about to change."""
        if not self.kept[at]:
            part = slice(at * PIECE_CELLS, (at + 1) * PIECE_CELLS)
            self.copies[part] = self._cells[part]
            self.kept[at] = 1


_NO_CELLS: Final[Cells] = np.empty(0, np.uint8)


class BloomFilter:
    def __init__(self, cells: int, key: int) -> None:
        self._cells: Cells = np.zeros(cells, np.uint8)
        self._key = np.uint64(key)
        self._changing = threading.Lock()
        self._cut: FilterCut | None = None

    @property
    def nbytes(self) -> int:
        return self._cells.nbytes

    def count(self, ids: Ids, counts: Numbers | None) -> Numbers:
        """Counts the ids in order. Returns about how often each had been counted before."""
        before = np.empty(ids.size, np.int64)
        given = np.ones(ids.size, np.int64) if counts is None else writable(counts)
        with self._changing:
            cut = self._cut
            copies, kept = (_NO_CELLS, _NO_CELLS) if cut is None else (cut.copies, cut.kept)
            count_cells(self._cells, self._key, writable(ids), given, before, copies, kept)
        return before

    def cut(self) -> FilterCut:
        """Returns the cells as they are now, to be read while other threads count. Ends the previous cut."""
        made = FilterCut(self._cells, self._changing)
        with self._changing:
            if self._cut is not None:
                self._cut.over = True
            self._cut = made
        return made

    def end(self, cut: FilterCut) -> None:
        """Ends a cut, because its reader has finished."""
        with self._changing:
            cut.over = True
            if self._cut is cut:
                self._cut = None

    def load(self, cells: Cells, begin: int | None = None) -> None:
        """Sets all cells, or those from number `begin` on. Raises TableError."""
        size = self._cells.size
        fits = cells.shape == (size,) if begin is None else cells.ndim == 1 and 0 <= begin <= size - cells.size
        if cells.dtype != np.uint8 or not fits:
            raise TableError(
                f"a filter of {cells.dtype} {cells.shape} does not fit one of uint8 {self._cells.shape}",
                todo="restore with the admission settings that the checkpoint was taken with",
            )
        first = begin or 0
        with self._changing:
            cut = self._cut
            if cut is not None and cells.size:
                for at in range(first // PIECE_CELLS, (first + cells.size - 1) // PIECE_CELLS + 1):
                    cut.keep(at)
            self._cells[first : first + cells.size] = cells
