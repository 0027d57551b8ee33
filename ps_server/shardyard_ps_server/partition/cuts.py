"""A partition as it was at one moment, for a checkpoint, while updates go on.

Values need no copy: a version is not written while a reader holds it. Optimizer state changes in place. So an update
copies what it is about to change (`keep`), and the checkpoint's thread copies the rest piece by piece (`keep_next`).
Tables have cuts of their own (tables.cuts).

Owns: the copies. Invariant: the copies have the state at the moment of the cut, whatever updates came since. Must not
know: what the state means.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardyard.domain.ids import PartitionId, Token, Version
from shardyard.domain.limits import MIB
from shardyard.domain.push_names import SourceMark
from shardyard_ps_server.tables import cuts as tables
from shardyard_ps_server.values.versions import Bytes, aligned_empty

PIECE_BYTES = MIB
"""An update waits at most for the copy of one piece."""


class StateCut:
    """Arrays of shape (nbytes,), dtype uint8, as they were when the cut was made. Raises TooLarge."""

    def __init__(self, state: Mapping[str, Bytes]) -> None:
        self._state = state
        self._copies = {name: aligned_empty(len(values)) for name, values in state.items()}
        nbytes = max(map(len, state.values()), default=0)
        self._kept = [False] * -(-nbytes // PIECE_BYTES)
        self._next = 0
        self._copying = threading.Lock()

    @property
    def complete(self) -> bool:
        return self._next == len(self._kept)

    def keep(self, begin: int, end: int) -> None:
        """Copies bytes [begin, end), which are about to change."""
        if self.complete:
            return
        for piece in range(begin // PIECE_BYTES, -(-end // PIECE_BYTES)):
            self._keep(piece)

    def keep_next(self) -> None:
        """Copies the next piece that is not copied yet, if there is one."""
        while not self.complete and self._kept[self._next]:
            self._next += 1
        if not self.complete:
            self._keep(self._next)
            self._next += 1

    def of(self, name: str) -> Bytes:
        """Returns one of the arrays. All must be copied."""
        assert self.complete
        return self._copies[name]

    def _keep(self, piece: int) -> None:
        with self._copying:
            if self._kept[piece]:
                return
            at = slice(piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES)
            for name, values in self._state.items():
                np.copyto(self._copies[name][at], values[at])
            self._kept[piece] = True


@dataclass(frozen=True)
class Cut:
    """A partition at one moment: version, ledger, values, the number of updates of each block, and, once `complete` was
    called, optimizer state. `tables`: cuts of the same moment. Values and tables can be read until `release`."""

    partition: PartitionId
    version: Version
    marks: tuple[SourceMark, ...]
    floor: Token
    counts: npt.NDArray[np.int64]
    values: Bytes
    state: StateCut
    let_go: Callable[[], None]
    tables: Mapping[str, tables.TableCut] = field(default_factory=dict)

    def complete(self) -> None:
        """Copies what updates have not copied, while they go on."""
        while not self.state.complete:
            self.state.keep_next()

    def release(self) -> None:
        for cut in self.tables.values():
            cut.close()
        self.let_go()
