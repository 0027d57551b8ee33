"""A record for each id, in arrays that grow."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardyard_worker.rows.dedup import IdNumbering, Int64s


class IdColumns:
    """Numbers ids, and keeps a record of a structured `dtype` for each number. One thread at a time."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._numbering = IdNumbering()
        self._records: npt.NDArray[Any] = np.zeros(0, dtype)

    def __len__(self) -> int:
        return len(self._numbering)

    @property
    def ids(self) -> Int64s:
        """The ids by number: a view, valid until the next `add`."""
        return self._numbering.ids

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        """One column by number: a view, valid until the next `add` or `keep`."""
        found: npt.NDArray[Any] = self._records[column][: len(self)]
        return found

    def find(self, ids: Int64s) -> Int64s:
        """The number of each id, -1 if it has none. Changes nothing."""
        return self._numbering.find(ids)

    def add(self, ids: Int64s) -> Int64s:
        """The number of each id. New ids have records of zeros."""
        numbers = self._numbering.add(ids)
        self._records = grown(self._records, len(self))
        return numbers

    def keep(self, chosen: npt.NDArray[Any]) -> None:
        """Keeps only the records that an array of numbers or flags selects, and numbers them anew."""
        ids, self._records = self.ids[chosen], self._records[: len(self)][chosen]
        self._numbering = IdNumbering(expected=ids.size)
        self._numbering.add(ids)


def grown(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """The array, if it has `size` elements. Otherwise a copy with at least twice as many; the new ones are zeros."""
    if size <= len(array):
        return array
    made = np.zeros((max(size, 2 * len(array)), *array.shape[1:]), array.dtype)
    made[: len(array)] = array
    return made
