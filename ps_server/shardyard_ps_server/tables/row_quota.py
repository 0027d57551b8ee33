"""How many rows a table may still get, while several pushes make rows at the same time.

Invariant: the rows, and those that pushes in progress may make, are never more than `rows_max`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from shardyard.domain.errors import TableFull


class RowQuota:
    def __init__(self, table: str, rows_max: int) -> None:
        self.rows_max = rows_max
        self._table = table
        self._lock = threading.Lock()
        self._promised = 0

    def take(self, ids: int, at_most: int, rows: Callable[[], int], count_missing: Callable[[], int]) -> int:
        """Reserves room for the rows of so many ids. Close to the limit it calls `count_missing` to learn how many of
        them have no row. `at_most`: a number of rows that the table does not exceed now, and that is known at once.
        Returns for how many rows; `give_back` must follow. Raises TableFull."""
        with self._lock:
            room = self.rows_max - self._promised - ids
            if at_most <= room or rows() <= room:
                self._promised += ids
                return ids
        n = count_missing()
        with self._lock:
            if rows() + self._promised + n > self.rows_max:
                raise TableFull(
                    f"{n} more rows in table {self._table!r}, which has {rows()}; at most {self.rows_max} are kept"
                )
            self._promised += n
        return n

    def give_back(self, n: int) -> None:
        with self._lock:
            self._promised -= n
