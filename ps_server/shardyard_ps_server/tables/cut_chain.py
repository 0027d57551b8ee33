"""What is known of the changes since a table's last cut: whether the next cut may contain changes only.

Each cut for a checkpoint has a generation. The next one may contain what has changed since, if that was read to its
end. A cut that was not read at all leaves everything as it was before; one that was read in part breaks the chain.
"""

from __future__ import annotations

import secrets
import threading
from typing import NamedTuple

from shardyard.domain.errors import TableError
from shardyard_ps_server.tables.cuts import CutEnd
from shardyard_ps_server.tables.memory.layout import Numbers


class ChainState(NamedTuple):
    generation: int
    is_known: bool
    """Whether it is known what has changed since that generation."""
    removed: list[Numbers]
    """The ids that were removed since."""


class CutChain:
    """Safe for several threads."""

    def __init__(self) -> None:
        self._next = secrets.randbits(48)
        """No two tables have the same generations, so that one of a table that is gone fits no other."""
        self._lock = threading.Lock()
        self._state = ChainState(0, False, [])

    @property
    def generation(self) -> int:
        return self._state.generation

    @property
    def known_since(self) -> int | None:
        return self._state.generation if self._state.is_known else None

    def check_since(self, since: int | None) -> None:
        """Raises TableError if the changes since that generation are not known."""
        known = self.known_since
        if since is not None and since != known:
            raise TableError(
                f"what has changed since generation {since}; changes are known since "
                + ("no generation" if known is None else f"generation {known}"),
                todo="take a cut of all",
            )

    def note_removed(self, ids: Numbers) -> None:
        with self._lock:
            if self._state.is_known and ids.size:
                self._state.removed.append(ids)

    def begin(self) -> ChainState:
        """A cut for a checkpoint begins: it has the next generation. Gives the state before."""
        before = self._state
        self._next += 1
        self._state = ChainState(self._next, True, [])
        return before

    def end(self, ending: CutEnd, before: ChainState) -> None:
        """That cut has ended."""
        if ending is CutEnd.ALL:
            return
        is_known = before.is_known and ending is CutEnd.NOTHING
        self._state = ChainState(
            before.generation, is_known, [*before.removed, *self._state.removed] if is_known else []
        )
