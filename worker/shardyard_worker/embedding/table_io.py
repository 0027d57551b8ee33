"""Reads and writes the ids and rows of a table: safetensors or Parquet, by the file's ending.

    .safetensors   ids (n,) int64, rows (n, dim) float32
    .parquet       columns id: int64, row: fixed_size_list<float>[dim]

Owns: both formats in both directions. Invariants: a file is there whole or not at all; while writing, at most one piece
is in memory, plus all ids for safetensors; a file that is read has the shapes and dtypes above and each id once, or
CheckpointDamaged is raised. pyarrow is imported only when needed. Must not know: modules, where rows are kept.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from shardyard.checkpoints.row_exports import (
    IDS,
    PARQUET,
    ROWS,
    SAFETENSORS,
    Chunks,
    parquet_pieces,
    pyarrow,
    safetensors_pieces,
)
from shardyard.domain.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    InvalidRequest,
)
from shardyard.domain.variables import DType
from shardyard.storage.storage import Buffer, LocalStorage, write_file
from shardyard.storage.tensors import read_contents, read_tensor
from shardyard_worker.embedding.local_rows import RowSet
from shardyard_worker.rows.dedup import Float32s, Int64s

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NO_TABLE: Final = "a table's file has an id, once, and a row of float32 for each"
_OTHER: Final = "give a file that table.export has written, or one of the same form"


def write(path: Path, dim: int, pieces: Chunks) -> None:
    """Writes the file; iterates over `pieces` once. Raises InvalidRequest for another ending, ConfigurationError
    without pyarrow, StorageUnavailable, and what `pieces` raises."""
    if _ending(path) == SAFETENSORS:
        write_file(path, _safetensors(path.parent, dim, pieces))
    else:
        pyarrow()
        write_file(path, parquet_pieces(dim, pieces))


def _safetensors(folder: Path, dim: int, pieces: Chunks) -> Iterator[Buffer]:
    with spooled(dim, pieces, folder) as spool:
        yield from safetensors_pieces(spool.count, dim, spool.chunks)


@dataclass(frozen=True)
class Spool:
    """Ids in memory, and rows, shape (n, dim), in a file."""

    ids: Sequence[Int64s]
    rows: Float32s

    @property
    def count(self) -> int:
        return len(self.rows)

    def chunks(self) -> Iterator[tuple[Int64s, Float32s]]:
        at = 0
        for part in self.ids:
            yield part, self.rows[at : at + part.size]
            at += part.size


@contextmanager
def spooled(dim: int, pieces: Chunks, folder: Path | None = None) -> Iterator[Spool]:
    """A safetensors file begins with the number of ids, then all ids, then the rows. So rows wait in an unnamed file in
    `folder` (None: that for temporary files) until all ids have come. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        parts = list(_written(file, pieces))
        file.flush()
        count = sum([part.size for part in parts])
        rows = np.memmap(file, np.float32, "r", shape=(count, dim)) if count else np.empty((0, dim), np.float32)
        yield Spool(parts, rows)


def _written(file: IO[bytes], pieces: Chunks) -> Iterator[Int64s]:
    """Writes the rows of each piece, and yields its ids."""
    for ids, rows in pieces():
        file.write(np.ascontiguousarray(rows).data)
        yield ids


def read(path: Path) -> RowSet:
    """Raises CheckpointNotFound, CheckpointDamaged for a file of another kind, InvalidRequest for another ending,
    ConfigurationError without pyarrow, StorageUnavailable."""
    ending = _ending(path)
    if not path.is_file():
        raise CheckpointNotFound(f"{path} is not there", why="rows are read from a file", todo="check the path")
    return _read_safetensors(path) if ending == SAFETENSORS else _read_parquet(path)


def _ending(path: Path) -> str:
    if path.suffix not in (SAFETENSORS, PARQUET):
        raise InvalidRequest(
            f"{str(path)!r} for a table's rows", why="", todo=f"let it end with {PARQUET} or {SAFETENSORS}"
        )
    if not _NAME.fullmatch(path.name):
        raise InvalidRequest(
            f"{path.name!r} for a table's rows", why="", todo='use letters, digits, ".", "_" and "-", and no "." first'
        )
    return path.suffix


def _read_safetensors(path: Path) -> RowSet:
    storage = LocalStorage(path.parent)
    contents = read_contents(storage, path.name)
    ids, rows = contents.tensors.get(IDS), contents.tensors.get(ROWS)
    if (
        ids is None
        or rows is None
        or (ids.dtype, rows.dtype) != (DType.INT64, DType.FLOAT32)
        or (len(ids.shape), len(rows.shape)) != (1, 2)
        or ids.shape[0] != rows.shape[0]
    ):
        found = {name: (each.dtype.value, each.shape) for name, each in contents.tensors.items()}
        raise _damaged(path, f"has {found}; expected {IDS}, int64 of shape (n,), and {ROWS}, float32 of (n, dim)")
    return _checked(path, np.array(read_tensor(storage, path.name, ids)), read_tensor(storage, path.name, rows))


def _read_parquet(path: Path) -> RowSet:
    arrow, parquet = pyarrow(), pyarrow(".parquet")
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            kinds: dict[str, Any] = {name: schema.field(name).type for name in schema.names}
            row: Any = kinds.get("row")
            if kinds.get("id") != arrow.int64() or row is None or not arrow.types.is_fixed_size_list(row):
                raise _damaged(path, f"has columns {kinds}; expected id: int64, row: fixed_size_list<float>[dim]")
            if row.value_type != arrow.float32():
                raise _damaged(path, f"has rows of {row.value_type}; expected float")
            found = file.read(columns=["id", "row"])
    except (arrow.ArrowException, OSError) as error:
        raise _damaged(path, f"cannot be read as Parquet: {error}") from error
    ids, rows = found.column("id").combine_chunks(), found.column("row").combine_chunks()
    values = rows.flatten()
    if ids.null_count or rows.null_count or values.null_count:
        raise _damaged(path, "has an id or a row that is null")
    shape = (len(ids), row.list_size)
    return _checked(path, np.array(ids.to_numpy()), values.to_numpy(zero_copy_only=False).reshape(shape))


def _checked(path: Path, ids: Any, rows: Any) -> RowSet:
    order = np.argsort(ids)
    ids = ids[order]
    if (ids[1:] == ids[:-1]).any():
        raise _damaged(path, f"has two rows for id {ids[1:][ids[1:] == ids[:-1]][0]}")
    return RowSet(ids, rows[order])


def _damaged(path: Path, what: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"{path} {what}", why=_NO_TABLE, todo=_OTHER)
