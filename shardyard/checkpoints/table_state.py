"""A table of one partition in a checkpoint, read one file at a time.

Owns: the order in which the files of a table are combined. Invariants: no row is returned before the digest of its file
was checked; only one file is in memory at a time; each id is returned once, with the row of the newest file that has
it. Must not know: how servers keep rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardyard.checkpoints import rows_file
from shardyard.checkpoints.manifest import FileRef, TableEntry
from shardyard.checkpoints.rows_file import Cells, Floats, Ids, Part, Removed, RowsFileKey
from shardyard.domain.errors import CheckpointDamaged
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.tables.table_settings import Admission, TableSettings
from shardyard.storage.storage import Storage


@dataclass(frozen=True, slots=True)
class TableState:
    """`folder`: that of the job, below the storage's URL."""

    storage: Storage
    folder: str
    layout: JobLayout
    partition: PartitionId
    table: int
    entry: TableEntry

    @property
    def settings(self) -> TableSettings:
        return self.layout.tables[self.table]

    def parts(self) -> Iterator[Part]:
        """The parts, to be applied in this order. Raises CheckpointDamaged, CheckpointNotFound, StorageUnavailable."""
        cells = 0
        for file in self.entry.files:
            part = self.read(file)
            if isinstance(part, Cells):
                if part.begin != cells:
                    raise CheckpointDamaged(f"{self.locate(file)} has cells from {part.begin} on; expected {cells}")
                cells += part.cells.size
            yield part
        admission = self.settings.admission
        expected = admission.cells if admission.kind is Admission.ESTIMATE else 0
        if cells != expected:
            raise CheckpointDamaged(f"{self._called} has a filter of {cells} cells; expected {expected}")

    def rows(self) -> Iterator[tuple[Ids, Floats]]:
        """Yields ids and values, float32 (m, dim), of all rows, in any order. One file and the ids of the increments
        are in memory. Raises what `parts` raises."""
        later: Ids = np.empty(0, np.int64)
        base = frozenset(self.entry.base)
        count = 0
        for file in reversed(self.entry.files):
            part = self.read(file)
            if isinstance(part, Cells):
                continue
            if isinstance(part, Removed):
                later = np.union1d(later, part.ids)
                continue
            m = len(part.values)
            fresh = ~np.isin(part.ids[:m], later)
            found = part.ids[:m][fresh], part.values[fresh]
            count += found[0].size
            yield found
            if file not in base:
                later = np.union1d(later, part.ids)
        if count != self.entry.rows:
            raise CheckpointDamaged(f"{self._called} has {count} rows; the manifest says {self.entry.rows}")

    def read(self, file: FileRef) -> Part:
        place = RowsFileKey(self.layout, self.partition, self.table, base=file in self.entry.base)
        return rows_file.read(self.storage, self._path(file), file.written, place)

    def locate(self, file: FileRef) -> str:
        return self.storage.locate(self._path(file))

    @property
    def _called(self) -> str:
        return f"{self.storage.locate(self.folder)}: table {self.settings.name!r} of partition {self.partition}"

    def _path(self, file: FileRef) -> str:
        return f"{self.folder}/{file.path}" if self.folder else file.path


def states_of(
    storage: Storage, folder: str, layout: JobLayout, partition: PartitionId, entries: tuple[TableEntry, ...]
) -> tuple[TableState, ...]:
    """All tables of one partition. Raises CheckpointDamaged if some are missing."""
    if len(entries) != len(layout.tables):
        raise CheckpointDamaged(
            f"partition {partition} in {storage.locate(folder)} has {len(entries)} tables; the job has"
            f" {len(layout.tables)}"
        )
    return tuple(TableState(storage, folder, layout, partition, index, entry) for index, entry in enumerate(entries))
