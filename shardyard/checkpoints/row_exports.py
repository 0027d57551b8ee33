"""Writes ids and rows of a table to a file for other programs, piece by piece.

    .safetensors   ids (n,) int64, rows (n, dim) float32
    .parquet       columns id: int64, row: fixed_size_list<float>[dim]

Invariants: only a few chunks are in memory at a time; pyarrow is imported only when it is needed. Must not know: where
rows come from.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final

from shardyard.checkpoints.rows_file import Floats, Ids
from shardyard.checkpoints.table_state import TableState
from shardyard.domain.errors import ConfigurationError
from shardyard.domain.variables import DType
from shardyard.storage.storage import Buffer
from shardyard.storage.tensors import TensorSource, bytes_of, pieces

SAFETENSORS: Final = ".safetensors"
PARQUET: Final = ".parquet"
IDS, ROWS = "ids", "rows"
ROW_GROUP_ROWS: Final = 65_536

Chunks = Callable[[], Iterator[tuple[Ids, Floats]]]
"""Yields ids, int64 (n,), and their rows, float32 (n, dim). Each call yields the same, in the same order."""


def chunks_of(states: tuple[TableState, ...]) -> Chunks:
    """All rows of a table."""

    def chunks() -> Iterator[tuple[Ids, Floats]]:
        for state in states:
            yield from state.rows()

    return chunks


def safetensors_pieces(rows: int, dim: int, chunks: Chunks) -> Iterator[Buffer]:
    """The bytes of a file. `rows`: how many there are. Reads the chunks twice, because all ids come first."""
    return pieces({"format": "pt"}, row_sources("", rows, dim, chunks))


def row_sources(prefix: str, rows: int, dim: int, chunks: Chunks) -> list[TensorSource]:
    """Ids and rows, for a file that may have other arrays too."""
    return [
        TensorSource(prefix + IDS, DType.INT64, (rows,), stream=lambda: (bytes_of(ids) for ids, _ in chunks())),
        TensorSource(
            prefix + ROWS, DType.FLOAT32, (rows, dim), stream=lambda: (bytes_of(found) for _, found in chunks())
        ),
    ]


def parquet_pieces(dim: int, chunks: Chunks) -> Iterator[bytes]:
    """The bytes of a file. Raises ConfigurationError if pyarrow is not installed."""
    arrow, parquet = pyarrow(), pyarrow(".parquet")
    sink = _Sink()
    schema = arrow.schema([("id", arrow.int64()), ("row", arrow.list_(arrow.float32(), dim))])
    with parquet.ParquetWriter(sink, schema) as writer:
        for ids, rows in chunks():
            for begin in range(0, ids.size, ROW_GROUP_ROWS):
                part = slice(begin, begin + ROW_GROUP_ROWS)
                values = arrow.array(rows[part].reshape(-1))
                columns = [arrow.array(ids[part]), arrow.FixedSizeListArray.from_arrays(values, dim)]
                writer.write_table(arrow.Table.from_arrays(columns, schema=schema))
                yield from sink.taken()
    yield from sink.taken()


class _Sink(io.RawIOBase):
    """A file for a writer. What was written is taken from it piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._at = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        self._pieces.append(bytes(data))
        self._at += len(self._pieces[-1])
        return len(self._pieces[-1])

    def taken(self) -> list[bytes]:
        pieces, self._pieces = self._pieces, []
        return pieces


def pyarrow(part: str = "") -> Any:
    """Imports pyarrow, or a part of it. Raises ConfigurationError if it is not installed."""
    try:
        return import_module(f"pyarrow{part}")
    except ImportError as error:
        raise ConfigurationError(
            "the package pyarrow is not installed here",
            why="it reads and writes Parquet",
            todo=f"pip install 'shardyard[tables]', or give a path that ends with {SAFETENSORS}",
        ) from error
