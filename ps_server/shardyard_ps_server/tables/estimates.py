"""How often ids were pushed, about: a counting Bloom filter (Fan et al., Summary Cache, IEEE/ACM Transactions on
Networking 8, 2000), of which an id has four cells in one cache line. Counts are never too low.

Owns: the cells, and their lock. Invariant: cells are a function of what was counted, in any order, but for none of a
table's private seeds. Must not know: rows.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardyard.ground.compiling import compiled
from shardyard.ground.errors import TableError
from shardyard.ground.row_ids import Ids, writable
from shardyard.ground.splitmix import mixed
from shardyard_ps_server.tables.layout import Numbers

Cells = npt.NDArray[np.uint8]
CELL_MAX: Final = 255
_LINE: Final = 64
_PROBES: Final = 4
_WITHIN: Final = np.uint64(_LINE - 1)


class Estimates:
    def __init__(self, cells: int, key: int) -> None:
        self._cells: Cells = np.zeros(cells, np.uint8)
        self._key = np.uint64(key)
        self._changing = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._cells.nbytes

    def count(self, ids: Ids, counts: Numbers | None) -> Numbers:
        """Counts them, in their order; how often each was there before, about."""
        before = np.empty(ids.size, np.int64)
        given = np.ones(ids.size, np.int64) if counts is None else writable(counts)
        with self._changing:
            _count(self._cells, self._key, writable(ids), given, before)
        return before

    def copy(self) -> Cells:
        with self._changing:
            return self._cells.copy()

    def load(self, cells: Cells) -> None:
        if cells.dtype != np.uint8 or cells.shape != self._cells.shape:
            raise TableError(
                f"a filter of {cells.dtype} {cells.shape} for one of uint8 {self._cells.shape}",
                todo="restore with the admission settings that the checkpoint was taken with",
            )
        with self._changing:
            self._cells[:] = cells


@compiled
def _count(cells: Any, key: np.uint64, ids: Numbers, counts: Numbers, before: Numbers) -> None:
    """Only the smallest cells of an id rise (conservative update): the others have counted more already."""
    lines = np.uint64(cells.size // _LINE)
    for i in range(ids.size):
        word = mixed(np.uint64(ids[i]) ^ key)
        line = np.int64(((word >> np.uint64(32)) * lines >> np.uint64(32)) * np.uint64(_LINE))
        fewest = np.int64(CELL_MAX)
        for probe in range(_PROBES):
            fewest = min(fewest, np.int64(cells[line + np.int64((word >> np.uint64(6 * probe)) & _WITHIN)]))
        before[i] = fewest
        after = min(fewest + counts[i], CELL_MAX)
        for probe in range(_PROBES):
            at = line + np.int64((word >> np.uint64(6 * probe)) & _WITHIN)
            if cells[at] < after:
                cells[at] = after
