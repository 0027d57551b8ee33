"""Divides a server's memory for tables between them, and says where colder rows go.

Owns: each table's share. Invariants: indexes stay in memory; the rest of the bound is divided in proportion to the
bytes of each table's rows, in memory or not; while everything fits, no table has a limit. Must not know: which rows of
a table stay.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from shardyard.domain.errors import StorageUnavailable

UNLIMITED: Final = -1
_NO_UNNAMED: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


class TieredTable(Protocol):
    def shrink(self) -> None:
        """Moves rows to the file until the table is below its limit, unless another thread does so now."""


class _Reported(NamedTuple):
    index_bytes: int
    row_bytes: int


class Budget:
    """`open_file` returns the descriptor of a new file that is deleted when it is closed, or raises OSError."""

    def __init__(self, bytes_max: int, open_file: Callable[[], int]) -> None:
        self.bytes_max = bytes_max
        self.open_file = open_file
        self._lock = threading.Lock()
        self._members: list[weakref.ref[TieredTable]] = []
        self._reported: dict[weakref.ref[TieredTable], _Reported] = {}
        self._index_bytes = self._row_bytes = 0
        self._turn = 0

    def join(self, member: TieredTable) -> None:
        """The member leaves when nothing refers to it any more."""
        with self._lock:
            self._members = [each for each in self._members if each() is not None]
            self._members.append(weakref.ref(member))

    def limit_of(self, member: TieredTable, *, index_bytes: int, rows: int, record_bytes: int) -> int:
        """Returns how many of its rows a member may have in memory; UNLIMITED while everything fits."""
        with self._lock:
            self._forget()
            reported = _Reported(index_bytes, rows * record_bytes)
            before = self._reported.get(weakref.ref(member), _Reported(0, 0))
            self._reported[weakref.ref(member)] = reported
            self._index_bytes += reported.index_bytes - before.index_bytes
            self._row_bytes += reported.row_bytes - before.row_bytes
            room = max(self.bytes_max - self._index_bytes, 0)
            if self._row_bytes <= room:
                return UNLIMITED
            return rows * room // self._row_bytes

    def next_to_shrink(self, besides: TieredTable) -> TieredTable | None:
        """Returns another member, each in turn. Otherwise a table that is never pushed would keep its rows in
        memory."""
        with self._lock:
            for _ in self._members:
                self._turn = (self._turn + 1) % len(self._members)
                found = self._members[self._turn]()
                if found is not None and found is not besides:
                    return found
        return None

    def _forget(self) -> None:
        gone = [each for each in self._reported if each() is None]
        for each in gone:
            reported = self._reported.pop(each)
            self._index_bytes -= reported.index_bytes
            self._row_bytes -= reported.row_bytes


def budget_in(folder: Path, bytes_max: int) -> Budget | None:
    """Returns the budget; None if `bytes_max` is 0, which means no bound. Raises StorageUnavailable if no file can be
    made in the folder."""
    if not bytes_max:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(open_unnamed(folder))
    except OSError as error:
        raise StorageUnavailable(
            f"no file for rows of tables in {folder} can be made ({error.strerror})",
            why="yard.memory_bytes_max is set, so colder rows go to a file there",
            todo="give a folder on a local disk that can be written (yard.cold), or yard.memory_bytes_max: 0",
        ) from error
    return Budget(bytes_max, lambda: open_unnamed(folder))


def open_unnamed(folder: Path) -> int:
    """Opens a file without a name, which is deleted when its descriptor is closed in whatever way. Raises OSError."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_UNNAMED:
            raise
    # the file system has no such files
    file, path = tempfile.mkstemp(prefix="rows-", dir=folder)
    os.unlink(path)
    return file
