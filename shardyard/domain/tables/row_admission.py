"""Which ids get a row, by chance or by estimate. Servers and processes without one share these loops.

Owns: the draws of an admission by chance, and a counting Bloom filter (Fan et al., Summary Cache, IEEE/ACM Transactions
on Networking 8, 2000). An id has four cells of the filter, in one cache line; counts are never too low. Invariant: both
depend only on seed, table, ids and steps. Must not know: rows, threads.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardyard.domain.compiling import compiled
from shardyard.domain.tables.row_ids import Ids, writable
from shardyard.domain.tables.row_values import row_key
from shardyard.domain.tables.splitmix_loops import drawn, mixed

CELL_MAX: Final = 255
LINE_CELLS: Final = 64
PIECE_CELLS: Final = 1 << 16
"""A cut copies this many cells at a time. No cache line is in two pieces."""
_PROBES: Final = 4
_WITHIN: Final = np.uint64(LINE_CELLS - 1)


# ---- by chance


def share_of(chance: float) -> np.uint64:
    """The chance, of 2**64: an id is drawn if its random number is below."""
    return np.uint64(min(int(chance * 2.0**64), 2**64 - 1))


def draws_key(key: int, step: int) -> np.uint64:
    """The key of the draws of one step. `key`: the table's (row_key)."""
    return np.uint64(row_key(key, f"{step}"))


@compiled
def is_drawn(number: np.int64, key: np.uint64, share: np.uint64) -> bool:
    return bool(drawn(mixed(np.uint64(number) ^ key), 0) < share)


def drawn_of(ids: Ids, key: np.uint64, share: np.uint64) -> npt.NDArray[np.bool_]:
    """Returns which of the ids are drawn, shape (n,)."""
    found = np.empty(ids.size, np.bool_)
    _draw(writable(ids), key, share, found)
    return found


@compiled
def _draw(ids: Ids, key: np.uint64, share: np.uint64, found: Any) -> None:
    for i in range(ids.size):
        found[i] = is_drawn(ids[i], key, share)


# ---- by estimate


@compiled
def count_cells(
    cells: Any, key: np.uint64, ids: Ids, counts: npt.NDArray[np.int64], before: Any, copies: Any, kept: Any
) -> None:
    """Counts the ids in order. Sets before[i] to the estimated count of ids[i] before. Only the smallest cells of an id
    increase (conservative update), since the others have counted other ids too. `copies` and `kept`: of a cut, whose
    pieces are copied before they change; empty if there is no cut."""
    lines = np.uint64(cells.size // LINE_CELLS)
    for i in range(ids.size):
        word = mixed(np.uint64(ids[i]) ^ key)
        line = np.int64(((word >> np.uint64(32)) * lines >> np.uint64(32)) * np.uint64(LINE_CELLS))
        fewest = np.int64(CELL_MAX)
        for probe in range(_PROBES):
            fewest = min(fewest, np.int64(cells[line + np.int64((word >> np.uint64(6 * probe)) & _WITHIN)]))
        before[i] = fewest
        after = min(fewest + counts[i], CELL_MAX)
        piece = line // PIECE_CELLS
        if kept.size > 0 and kept[piece] == 0:
            for cell in range(piece * PIECE_CELLS, min((piece + 1) * PIECE_CELLS, cells.size)):
                copies[cell] = cells[cell]
            kept[piece] = 1
        for probe in range(_PROBES):
            at = line + np.int64((word >> np.uint64(6 * probe)) & _WITHIN)
            if cells[at] < after:
                cells[at] = after
