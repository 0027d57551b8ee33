"""The file for those rows of one table that memory has no room for.

Owns: the file and its growth. Invariants: it is made when the first row needs it, has no name, and is deleted with the
table; disk space is allocated before it is used, so a full disk is noticed here, while rows can still stay in memory;
only this process needs the contents. Must not know: which rows.
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Callable
from typing import Final

import numpy as np

from shardyard_ps_server.tables.loops import moves
from shardyard_ps_server.tables.memory import heap
from shardyard_ps_server.tables.memory.address_space import map_file
from shardyard_ps_server.tables.memory.layout import FILE, NEXT_SLOT, SLOTS_FREE, Floats, Numbers, TableMemory

log = logging.getLogger("shardyard.server")

PIECE_BYTES_LEAST: Final = 1 << 20
PIECE_BYTES_MAX: Final = 64 << 20
_GROWS_BY: Final = 4
"""The file grows by a quarter of its size."""
REFUSED_TURNS_MAX: Final = 256
"""After a refusal the disk is tried again after at most this many requests."""


class ColdFile:
    """`called`: the table's name in log lines. One thread at a time."""

    def __init__(self, memory: TableMemory, called: str, open_file: Callable[[], int]) -> None:
        self._memory, self._called, self._open = memory, called, open_file
        self._file = -1
        self._slots = 0
        self._record_bytes = int(memory.slab.shape[1]) * 4
        self._turns = self._turns_left = 0
        self.refused = ""
        """The disk's last error; empty if the last request succeeded."""

    @property
    def nbytes(self) -> int:
        """The file's bytes on disk."""
        return self._slots * self._record_bytes

    def take(self, n: int) -> Numbers:
        """Allocates n slots, ascending; fewer if the disk is full."""
        shared = self._memory.shared
        missing = n - int(shared[SLOTS_FREE]) - (self._slots - int(shared[NEXT_SLOT]))
        if missing > 0 and self._turns_left:
            self._turns_left -= 1
            missing = 0
        if missing > 0:
            try:
                self._grow(missing)
            except OSError as error:
                self.refuse(error)
        slots = np.empty(n, np.int64)
        slots = slots[: heap.take_slots(self._memory, slots, self._slots)]
        slots.sort()
        return slots

    def write(self, slots: Numbers, records: Floats) -> int:
        """Writes records[k] to slots[k]; both arrays are contiguous. Returns how many were written."""
        done = int(moves.write(self._memory, slots, records))
        while done < slots.size:  # interrupted by a signal, or the disk is full
            try:
                at = int(slots[done]) * self._record_bytes
                data = records[done].tobytes()
                while data:
                    written = os.pwrite(self._file, data, at)
                    data, at = data[written:], at + written
            except OSError as error:
                self.refuse(error)
                return done
            done += 1 + int(moves.write(self._memory, slots[done + 1 :], records[done + 1 :]))
        return done

    def free(self, slots: Numbers) -> None:
        heap.free_slots(self._memory, slots)

    def refuse(self, error: OSError) -> None:
        self._turns = min(2 * self._turns + 1, REFUSED_TURNS_MAX)
        self._turns_left = self._turns
        if not self.refused:
            log.warning(
                "colder rows of %s stay in memory, beyond yard.memory_bytes_max: the disk refuses them (%s). They are"
                " tried again. Make room on the disk, or raise the bound",
                self._called,
                error.strerror,
            )
        self.refused = error.strerror or str(error)

    def accept(self) -> None:
        """All rows that should leave memory have left."""
        if self.refused:
            log.info("colder rows of %s are written to disk again", self._called)
        self.refused, self._turns = "", 0

    def _grow(self, missing: int) -> None:
        if self._file < 0:
            file = self._open()
            try:
                map_file(self._memory.slab, self._memory.cold * self._record_bytes, file)
            except OSError:
                os.close(file)
                raise
            self._file = file
            self._memory.shared[FILE] = file
            weakref.finalize(self, os.close, file)
        capacity = self._memory.slots.size
        piece = min(max(self.nbytes // _GROWS_BY, PIECE_BYTES_LEAST), PIECE_BYTES_MAX) // self._record_bytes
        slots = min(self._slots + max(missing, piece), capacity)
        if slots > self._slots:
            begin, end = self.nbytes, slots * self._record_bytes
            try:
                os.posix_fallocate(self._file, begin, end - begin)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                os.ftruncate(self._file, end)  # then a write may fail
            self._slots = slots
