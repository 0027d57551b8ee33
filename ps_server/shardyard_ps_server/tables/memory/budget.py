"""How much memory the rows of all tables of a server take, with their index, and where colder rows go.

Owns: each table's share. Invariants: indexes stay in memory; what they leave of the bound is shared by rows: each table
has the part that its rows, in memory or not, are of all rows; as long as all fit, no table has a limit. Must not know:
which rows of a table stay.
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


class Member(Protocol):
    def tend(self) -> None:
        """Comes nearer to its limit, where nobody else is at it."""


class _Told(NamedTuple):
    index_bytes: int
    row_bytes: int


class Budget:
    """`open_file` gives the descriptor of a new file that is gone when it is closed; it raises OSError."""

    def __init__(self, bytes_max: int, open_file: Callable[[], int]) -> None:
        self.bytes_max = bytes_max
        self.open_file = open_file
        self._lock = threading.Lock()
        self._members: list[weakref.ref[Member]] = []
        self._told: dict[weakref.ref[Member], _Told] = {}
        self._index_bytes = self._row_bytes = 0
        self._turn = 0

    def join(self, member: Member) -> None:
        """Until nobody has it any more."""
        with self._lock:
            self._members = [each for each in self._members if each() is not None]
            self._members.append(weakref.ref(member))

    def limit_of(self, member: Member, *, index_bytes: int, rows: int, record_bytes: int) -> int:
        """The rows that it may have in memory, of so many; UNLIMITED while there is room for all."""
        with self._lock:
            self._forget()
            told = _Told(index_bytes, rows * record_bytes)
            before = self._told.get(weakref.ref(member), _Told(0, 0))
            self._told[weakref.ref(member)] = told
            self._index_bytes += told.index_bytes - before.index_bytes
            self._row_bytes += told.row_bytes - before.row_bytes
            room = max(self.bytes_max - self._index_bytes, 0)
            if self._row_bytes <= room:
                return UNLIMITED
            return rows * room // self._row_bytes

    def next_to_tend(self, besides: Member) -> Member | None:
        """Another one, each in its turn: one that nobody changes keeps its rows in memory otherwise."""
        with self._lock:
            for _ in self._members:
                self._turn = (self._turn + 1) % len(self._members)
                found = self._members[self._turn]()
                if found is not None and found is not besides:
                    return found
        return None

    def _forget(self) -> None:
        gone = [each for each in self._told if each() is None]
        for each in gone:
            told = self._told.pop(each)
            self._index_bytes -= told.index_bytes
            self._row_bytes -= told.row_bytes


def budget_in(folder: Path, bytes_max: int) -> Budget | None:
    """None: 0 is no bound. Raises StorageUnavailable where the folder takes no file."""
    if not bytes_max:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(open_unnamed(folder))
    except OSError as error:
        raise StorageUnavailable(
            f"no file for rows of tables in {folder} ({error.strerror})",
            why="yard.memory_bytes_max is set, so colder rows go to a file there",
            todo="give a folder on a local disk that can be written (yard.cold), or yard.memory_bytes_max: 0",
        ) from error
    return Budget(bytes_max, lambda: open_unnamed(folder))


def open_unnamed(folder: Path) -> int:
    """A file without a name: nothing of it is left when its descriptor is closed, by whatever. Raises OSError."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_UNNAMED:
            raise
    # a file system that has no such files
    file, path = tempfile.mkstemp(prefix="rows-", dir=folder)
    os.unlink(path)
    return file
