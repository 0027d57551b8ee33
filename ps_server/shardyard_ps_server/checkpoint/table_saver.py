"""Writes a table's cut into files of a checkpoint, and says which files together are the table.

    base          all of the table at one cut
    increments    what has changed from cut to cut after that

Owns: chains of such files, and when one ends. Invariants: a chain continues only where the new checkpoint follows one
that has the chain's files, and the table knows what has changed since its last cut; otherwise the table is written
whole. No more than one file's rows are in memory beside the cut. Must not know: blocks, ledgers, manifests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from shardyard.checkpoints.manifest import FileRef, TableEntry, rows_path
from shardyard.checkpoints.rows_file import Cells, Entries, Part, Removed, RowsFileKey, pieces
from shardyard.domain.errors import TooLarge
from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.limits import MIB, ROWS_FILES_MAX
from shardyard.storage.storage import Storage
from shardyard_ps_server.tables.cuts import Chunk, TableCut
from shardyard_ps_server.tables.memory.layout import Numbers
from shardyard_ps_server.tables.table import Table

T = TypeVar("T")

FILE_BYTES: Final = 64 * MIB
"""Approximate size of the rows in a file."""
CHAIN_SHARE: Final = 0.5
"""A chain ends when its increments have more than this share of its base's bytes, so that a restore reads one and a
half times the table at most (benchmarks/tables/table_checkpoints.py)."""
CHAIN_CUTS_MAX: Final = 64
UNCOMMITTED_MAX: Final = 3
"""A chain ends after this many cuts in a row that no checkpoint followed: their files may be the reason."""


@dataclass
class _Chain:
    """`numbers`: of the checkpoints for which its cuts were written, the base's first. `cells`: the files of the newest
    filter; files of earlier filters are in no list."""

    generation: int
    numbers: list[int]
    base: list[FileRef]
    increments: list[FileRef] = field(default_factory=list)
    cells: list[FileRef] = field(default_factory=list)

    def follows(self, table: Table, number: int) -> bool:
        """Whether an increment after checkpoint `number` is enough."""
        return (
            self.generation == table.cuts.known_since
            and number in self.numbers
            and sum(each > number for each in self.numbers) <= UNCOMMITTED_MAX
            and len(self.numbers) < CHAIN_CUTS_MAX
            and _bytes(self.increments) <= CHAIN_SHARE * _bytes(self.base)
        )

    def drop_cells(self) -> None:
        """Removes the files of the filter from the lists, because the filter was written again."""
        gone = frozenset(self.cells)
        self.base = [file for file in self.base if file not in gone]
        self.increments = [file for file in self.increments if file not in gone]
        self.cells = []


class TableSaver:
    """The tables of one job on one server. Used by one thread at a time."""

    def __init__(self, server: Incarnation) -> None:
        self._server = server
        self._chains: dict[tuple[PartitionId, str], _Chain] = {}
        self._cuts = 0

    def since(self, partition: PartitionId, name: str, table: Table, base: int) -> int | None:
        """Returns a generation. A checkpoint that follows checkpoint `base` needs only the changes since that one.
        None: it needs the whole table."""
        chain = self._chains.get((partition, name))
        return chain.generation if chain is not None and chain.follows(table, base) else None

    def save(
        self,
        layout: JobLayout,
        partition: PartitionId,
        index: int,
        cut: TableCut,
        number: int,
        storage: Storage,
    ) -> TableEntry:
        """Writes a cut of the layout's table `index` into checkpoint `number`. Returns all files of the table. Raises
        StorageUnavailable, TooLarge."""
        name = layout.tables[index].name
        place = RowsFileKey(layout, partition, index, base=not cut.only_changed)
        self._cuts += 1
        running = self._cuts
        written: list[FileRef] = []
        cells: list[FileRef] = []
        for at, part in enumerate(parts(cut, place)):
            if at >= ROWS_FILES_MAX:
                raise TooLarge(f"table {name!r} of partition {partition} in more than {ROWS_FILES_MAX} files")
            path = rows_path(number, partition, index, self._server, running, at)
            file = FileRef(path, storage.write(path, pieces(place, part)))
            written.append(file)
            if isinstance(part, Cells):
                cells.append(file)
        chain = self._chains.get((partition, name))
        if cut.only_changed:
            assert chain is not None
            if cells:
                chain.drop_cells()
            chain.increments += written
        else:
            chain = self._chains[partition, name] = _Chain(cut.generation, [], written)
        chain.generation = cut.generation
        chain.numbers.append(number)
        chain.cells = cells
        return TableEntry(cut.updates, cut.rows, cut.entries, tuple(chain.base), tuple(chain.increments), cut.now_ms)


def _bytes(files: list[FileRef]) -> int:
    return sum(file.written.nbytes for file in files)


def parts(cut: TableCut, place: RowsFileKey) -> Iterator[Part]:
    """Yields the contents of a cut's files: removed ids, then the filter, then entries. Each has at most about
    FILE_BYTES bytes."""
    removed, most = cut.removed, FILE_BYTES // 8
    for begin in range(0, removed.size, most):
        yield Removed(removed[begin : begin + most])
    for cells in _batches(cut.cell_pieces(), lambda piece: piece[1].size, FILE_BYTES):
        yield Cells(cells[0][0], np.concatenate([piece for _, piece in cells]))
    for chunks in _batches(cut, lambda chunk: chunk.ids.size, max(1, FILE_BYTES // place.entry_bytes)):
        yield _entries(chunks)


def _batches(pieces: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yields lists of successive pieces. The sizes in a list add up to `most` or more, except in the last one."""
    batch: list[T] = []
    n = 0
    for piece in pieces:
        batch.append(piece)
        n += size(piece)
        if n >= most:
            yield batch
            batch, n = [], 0
    if batch:
        yield batch


def _entries(chunks: list[Chunk]) -> Entries:
    """Joins chunks. Ids with a row come first, as in each chunk."""
    rows = [len(chunk.records) for chunk in chunks]

    def joined(arrays: list[Numbers]) -> Numbers:
        with_row = [array[:m] for array, m in zip(arrays, rows, strict=True)]
        return np.concatenate([*with_row, *(array[m:] for array, m in zip(arrays, rows, strict=True))])

    records = np.concatenate([chunk.records for chunk in chunks])
    dim = chunks[0].dim
    return Entries(
        joined([chunk.ids for chunk in chunks]),
        records[:, :dim],
        records[:, dim:],
        joined([chunk.frequencies for chunk in chunks]),
        joined([chunk.steps for chunk in chunks]),
    )
