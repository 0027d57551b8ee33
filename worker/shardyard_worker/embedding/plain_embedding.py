"""A table as an ordinary `torch.nn.Embedding`, for programs without Shardyard.

Owns: `to_embedding`, and the module that turns ids into indices. Invariant: both modules are made of torch's operations
alone, so torch saves, exports and compiles them. Must not know: jobs, servers.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from shardyard.domain.errors import DTypeMismatch, ShapeMismatch
from shardyard_worker.embedding import table_io
from shardyard_worker.embedding.table import ID_DTYPES, Table

Source = str | os.PathLike[str] | Table | tuple[torch.Tensor, torch.Tensor]


class IdIndex(torch.nn.Module):
    """Turns ids into the indices of an embedding's rows. An id that it does not know gets the index after the last.

    `ids`: a buffer, shape (n,), int64, ascending.
    """

    ids: torch.Tensor

    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("ids", ids)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns indices, int64, in the shape of `ids`, int64 or int32."""
        count = self.ids.shape[0]
        wanted = ids.to(torch.int64)
        if count == 0:
            return torch.zeros_like(wanted)
        found = torch.searchsorted(self.ids, wanted).clamp(max=count - 1)
        return torch.where(self.ids[found] == wanted, found, count)


def to_embedding(
    source: Source, *, unknown: torch.Tensor | None = None, freeze: bool = True
) -> tuple[IdIndex, torch.nn.Embedding]:
    """Makes an ordinary embedding of a table: a module that turns ids into indices, and a torch.nn.Embedding with n + 1
    rows, float32. `torch.nn.Sequential(*to_embedding(...))` takes the place of a `sy.Embedding`.

    `source`: a file that `table.export` or `shardyard checkpoint export --table` has written, a table, or its ids,
    shape (n,), and rows, shape (n, dim), such as those in `model.state_dict()`. `unknown`: the row of all other ids,
    shape (dim,), by default zeros. `freeze`: whether the rows are trained no more. All rows are in memory.

    Raises ShapeMismatch, DTypeMismatch, CheckpointNotFound, CheckpointDamaged, ConfigurationError without pyarrow.

    >>> users = sy.Embedding(2)
    >>> users.table.put(torch.tensor([-7, 9_000_000_000]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> index, embedding = sy.tables.to_embedding(users.table)
    >>> ids = torch.tensor([9_000_000_000, -7, 5])
    >>> index(ids)
    tensor([1, 0, 2])
    >>> embedding(index(ids))
    tensor([[3., 4.],
            [1., 2.],
            [0., 0.]])
    """
    ids, rows = _ids_and_rows(source)
    if ids.dtype not in ID_DTYPES or not rows.is_floating_point():
        raise DTypeMismatch(
            f"ids of {ids.dtype} and rows of {rows.dtype}", why="", todo="give int64 ids and float32 rows"
        )
    if ids.dim() != 1 or rows.dim() != 2 or len(ids) != len(rows):
        raise ShapeMismatch(
            f"ids of shape {tuple(ids.shape)} and rows of shape {tuple(rows.shape)}; expected (n,) and (n, dim)",
            why="each id has one row",
            todo="give both of one table",
        )
    last = torch.zeros(rows.shape[1]) if unknown is None else unknown.detach().float().cpu()
    if last.shape != rows.shape[1:]:
        raise ShapeMismatch(
            f"a row for unknown ids of shape {tuple(last.shape)}; expected {tuple(rows.shape[1:])}",
            why="all rows have the table's dim",
            todo="give one of that shape",
        )
    ascending, order = torch.sort(ids.detach().cpu().to(torch.int64))
    weight = torch.cat([rows.detach().float().cpu()[order], last[None]])
    embedding = torch.nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight)
    embedding.weight.requires_grad_(not freeze)
    return IdIndex(ascending), embedding


def _ids_and_rows(source: Source) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(source, tuple):
        return source
    found = source.everything() if isinstance(source, Table) else table_io.read(Path(source))
    return torch.from_numpy(found.ids), torch.from_numpy(found.rows)
