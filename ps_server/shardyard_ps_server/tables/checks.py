"""Checks of the arrays that a table gets."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardyard.domain.errors import DTypeMismatch, ShapeMismatch, TooLarge
from shardyard.domain.tables.row_ids import Ids

BATCH_IDS_MAX: Final = 1 << 24


def check_ids(table: str, ids: Ids) -> None:
    """Raises DTypeMismatch, ShapeMismatch, TooLarge unless `ids` are int64 (n,)."""
    if ids.dtype != np.int64:
        raise DTypeMismatch(f"ids of {ids.dtype} for table {table!r}", why="ids are int64", todo="")
    if ids.ndim != 1:
        raise ShapeMismatch(f"ids of shape {ids.shape} for table {table!r}", why="ids are one-dimensional", todo="")
    if ids.size > BATCH_IDS_MAX:
        raise TooLarge(f"{ids.size} ids in one call; at most {BATCH_IDS_MAX}", todo="cut them into several")


def check_array(table: str, what: str, array: npt.NDArray[Any], shape: tuple[int, ...], dtype: type) -> None:
    """Raises DTypeMismatch, ShapeMismatch."""
    if array.dtype != dtype:
        raise DTypeMismatch(
            f"{what} of {array.dtype} for table {table!r}; expected {np.dtype(dtype)}",
            why="rows are float32, and numbers int64",
            todo="",
        )
    if array.shape != shape:
        raise ShapeMismatch(
            f"{what} of shape {array.shape} for table {table!r}; expected {shape}",
            why="there is one row for each id, as long as the table's",
            todo="",
        )
