"""Rows of a table in one partition, in a safetensors file of bounded size. A table has as many files as it needs.

Each file is of one of three kinds. `entries`:

    ids           int64 (n,)         of this partition, each once
    values        float32 (m, dim)   of the first m ids; the others are counted, and have no row yet
    SLOT          float32 (m, dim)   optimizer state, for each slot of the table's optimizer; some have (m, 1)
    frequencies   int32 (n,)         how often each was pushed, 1 to 65,535
    steps         int64 (n,)         the number of the update that pushed each last

`removed`: `ids` that are removed. `cells`: `cells`, uint8 (n,), of the filter of ids that have no row yet; the text
`begin` is the number of the first of these cells.

A table at one moment is a base, which has all of it, and the files that follow, each with what changed after the ones
before. Applied in their order, they give the table. So the size of a table need not be known before its first file is
written, and only one file is in memory at a time.

Owns: names, shapes and texts of such a file. Invariants: what is read belongs to that table and partition, and fits its
settings; memory is allocated after the shapes were checked. Must not know: manifests, URLs, how servers keep rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from shardyard.domain.errors import CheckpointDamaged
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.limits import FREQUENCY_MAX, ROWS_FILE_BYTES_MAX
from shardyard.domain.tables.row_ids import partition_of
from shardyard.domain.tables.row_optimizers import Slot, slots_of
from shardyard.domain.tables.table_settings import Admission, TableSettings
from shardyard.domain.variables import DType
from shardyard.storage import tensors
from shardyard.storage.storage import Buffer, Storage, Written
from shardyard.storage.tensors import Contents, source_of

FORMAT: Final = "shardyard-rows"
FORMAT_VERSION: Final = "1"
STEP_MAX: Final = (1 << 47) - 1
IDS, VALUES, FREQUENCIES, STEPS, CELLS = "ids", "values", "frequencies", "steps", "cells"

_ENTRIES, _REMOVED, _CELLS = "entries", "removed", "cells"
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}")

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """`ids`: int64 (n,). `values`: float32 (m, dim), and `state`: float32 (m, width of all slots), of the first m ids.
    `frequencies`, `steps`: int64 (n,)."""

    ids: Ids
    values: Floats
    state: Floats
    frequencies: Ids
    steps: Ids


@dataclass(frozen=True, slots=True, eq=False)
class Removed:
    """`ids`, int64 (n,)."""

    ids: Ids


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """`cells`: uint8 (n,), from cell number `begin` on."""

    begin: int
    cells: npt.NDArray[np.uint8]


Part = Entries | Removed | Cells


@dataclass(frozen=True, slots=True)
class RowsFileKey:
    """The table and partition that a file belongs to. `base`: whether it is one of the files that have all rows."""

    layout: JobLayout
    partition: PartitionId
    table: int
    base: bool

    @property
    def settings(self) -> TableSettings:
        return self.layout.tables[self.table]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return slots_of(self.settings.optimizer, self.settings.group)

    @property
    def entry_bytes(self) -> int:
        """The bytes of an id with its row and state."""
        dim = self.settings.dim
        return 8 + 4 + 8 + 4 * (dim + sum(slot.width(dim) for slot in self.slots))

    @property
    def texts(self) -> dict[str, str]:
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "partition": str(self.partition),
            "table": self.settings.name,
            "base": str(int(self.base)),
        }


# ---- writing


def pieces(place: RowsFileKey, part: Part) -> Iterator[Buffer]:
    """The bytes of a file, for Storage.write."""
    if isinstance(part, Removed):
        return tensors.pieces({**place.texts, "kind": _REMOVED}, [source_of(IDS, part.ids)])
    if isinstance(part, Cells):
        texts = {**place.texts, "kind": _CELLS, "begin": str(part.begin)}
        return tensors.pieces(texts, [source_of(CELLS, part.cells)])
    sources = [source_of(IDS, part.ids), source_of(VALUES, part.values)]
    begin = 0
    for slot in place.slots:
        width = slot.width(place.settings.dim)
        sources.append(source_of(slot.name, part.state[:, begin : begin + width]))
        begin += width
    sources += [source_of(FREQUENCIES, part.frequencies.astype(np.int32)), source_of(STEPS, part.steps)]
    return tensors.pieces({**place.texts, "kind": _ENTRIES}, sources)


# ---- reading


def read(storage: Storage, path: str, expected: Written, place: RowsFileKey) -> Part:
    """Reads a file, and checks every byte of it. Raises CheckpointDamaged, which names the file, CheckpointNotFound,
    StorageUnavailable."""
    where = storage.locate(path)
    if expected.nbytes > ROWS_FILE_BYTES_MAX:
        raise CheckpointDamaged(
            f"{where} has {expected.nbytes} bytes; a file with rows has at most {ROWS_FILE_BYTES_MAX}"
        )
    contents, arrays = tensors.read_file(storage, path, expected, lambda _: True, partial(_check, where, place))
    kind = contents.metadata["kind"]
    if kind == _CELLS:
        return Cells(int(contents.metadata["begin"]), arrays[CELLS])
    ids = arrays[IDS]
    _check_ids(where, place, ids)
    if kind == _REMOVED:
        return Removed(ids)
    frequencies, steps = arrays[FREQUENCIES].astype(np.int64), arrays[STEPS]
    for name, found, least, most in (FREQUENCIES, frequencies, 1, FREQUENCY_MAX), (STEPS, steps, 0, STEP_MAX):
        if found.size and not (least <= found.min() and found.max() <= most):
            raise CheckpointDamaged(
                f"{where} has {name!r} from {found.min()} to {found.max()}; expected {least} to {most}"
            )
    values = arrays[VALUES]
    state = np.hstack([values[:, :0], *(arrays[slot.name] for slot in place.slots)])
    return Entries(ids, values, state, frequencies, steps)


def _check(where: str, place: RowsFileKey, contents: Contents) -> None:
    """Checks texts and shapes, before memory is allocated."""

    def damaged(what: str) -> NoReturn:
        raise CheckpointDamaged(f"{where} {what}")

    said = contents.metadata
    for name, text in place.texts.items():
        if said.get(name) != text:
            damaged(f"has the {name} {said.get(name, '')[:100]!r}; expected {text!r}")
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in contents.tensors.items()}
    n, m = _rows(found, IDS), _rows(found, VALUES)
    kind = said.get("kind")
    if kind == _ENTRIES:
        if n < m:
            damaged(f"has {m} rows for {n} ids")
        dim = place.settings.dim
        widths = {VALUES: dim, **{slot.name: slot.width(dim) for slot in place.slots}}
        expected = {
            IDS: (DType.INT64, (n,)),
            **{name: (DType.FLOAT32, (m, width)) for name, width in widths.items()},
            FREQUENCIES: (DType.INT32, (n,)),
            STEPS: (DType.INT64, (n,)),
        }
    elif kind == _REMOVED:
        expected = {IDS: (DType.INT64, (n,))}
    elif kind == _CELLS:
        admission, length, begin = place.settings.admission, _rows(found, CELLS), said.get("begin", "")
        size = admission.cells if admission.kind is Admission.ESTIMATE else 0
        if not _NUMBER.fullmatch(begin) or int(begin) + length > size:
            damaged(f"has {length} cells from cell {begin[:100]!r} on; the filter has {size}")
        expected = {CELLS: (DType.UINT8, (length,))}
    else:
        damaged(f"is of the kind {str(kind)[:100]!r}; expected {_ENTRIES}, {_REMOVED} or {_CELLS}")
    if found != expected:
        differing = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        damaged(
            f"has other arrays than rows of table {place.settings.name!r} have: {', '.join(differing)[:200]} of"
            f" {[found.get(name) for name in differing[:8]]}; expected {[expected.get(name) for name in differing[:8]]}"
        )


def _rows(found: dict[str, tuple[DType, tuple[int, ...]]], name: str) -> int:
    shape = found[name][1] if name in found else ()
    return shape[0] if shape else 0


def _check_ids(where: str, place: RowsFileKey, ids: Ids) -> None:
    partitions = len(place.layout.partitions)
    strangers = ids[partition_of(ids, partitions) != place.partition]
    if strangers.size:
        raise CheckpointDamaged(f"{where} has id {strangers[0]}, which partition {place.partition} cannot have")
    met = np.sort(ids)
    again = met[1:][met[1:] == met[:-1]]
    if again.size:
        raise CheckpointDamaged(f"{where} has id {again[0]} twice")
