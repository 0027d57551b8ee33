"""Rows of one partition as they were at a version that a reader holds, while updates change them in place (rule C7).

Whatever an update is about to change is set aside before; here it is kept from the held version on, oldest first, and
put back over what is read from the tables now. A reader that looks up merges what has come since, so that what it looks
through grows with the logarithm of the updates, and what is kept with the rows that they changed, each once.

Owns: what is kept for one reader. Invariants: what is put back is what the rows were at that version, all or nothing:
who has lost a part of it says so; at most `bytes_max` are kept, training never lacks memory for a reader. Called under
the partition's lock, but for `merged`. Must not know: tables, when updates come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardyard.domain.errors import VersionPassed
from shardyard.domain.tables.row_ids import Ids
from shardyard_ps_server.rows.previous_rows import Floats, PreviousRows

FAN = 8
"""So many parts of one size are merged into one."""
PART_BYTES = 400
TABLE_BYTES = 320
"""What a part takes beside its rows and ids, and what each table in it does: most of all where pushes are small."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    rows: PreviousRows
    size: int = 0
    """How often it was merged."""


class PinnedRows:
    """`number`: the version; what is set aside for later ones is kept from then on."""

    def __init__(self, number: int, bytes_max: int) -> None:
        self._number = number
        self._bytes_max = bytes_max
        self._parts: list[_Part] = []
        self._nbytes = 0
        self._lost = ""

    def add(self, former: PreviousRows) -> None:
        """What rows were at a version, in the order of versions. Those before the held one are nothing to it."""
        if self._lost or former.number < self._number or not former.rows:
            return
        self._parts.append(_Part(former))
        self._nbytes += _nbytes(former)
        if self._nbytes > self._bytes_max:
            self.lose(f"updates have changed more than the {self._bytes_max} bytes of rows that are kept")

    def lose(self, why: str) -> None:
        """The version cannot be read any more."""
        self._parts, self._nbytes, self._lost = [], 0, why

    def parts(self) -> tuple[_Part, ...]:
        """What is to be put back now. Raises VersionPassed."""
        if self._lost:
            raise VersionPassed(f"rows of version {self._number}: {self._lost}")
        return tuple(self._parts)

    def take(self, before: Sequence[_Part], after: Sequence[_Part]) -> None:
        """What `parts` gave has been merged; another reader may have been first."""
        if len(after) < len(before) and tuple(self._parts[: len(before)]) == tuple(before):
            self._parts[: len(before)] = after
            self._nbytes = sum([_nbytes(part.rows) for part in self._parts])

    @property
    def nbytes(self) -> int:
        """Of memory, with what the parts take beside their rows."""
        return self._nbytes


def _nbytes(former: PreviousRows) -> int:
    return PART_BYTES + TABLE_BYTES * len(former.rows) + former.nbytes


def merged(parts: Sequence[_Part]) -> list[_Part]:
    """The same in fewer parts: no FAN of one size stand beside each other."""
    found: list[_Part] = []
    for part in parts:
        found.append(part)
        while len(found) >= FAN and all(each.size == found[-1].size for each in found[-FAN:]):
            found[-FAN:] = [_Part(_union([each.rows for each in found[-FAN:]]), found[-1].size + 1)]
    return found


def put_back(parts: Sequence[_Part], table: int, ids: Ids, out: Floats) -> None:
    """out[i], read from the table since, becomes what the row of ids[i] was at the version that is held."""
    for part in reversed(parts):
        part.rows.put_back(table, ids, out)


def formers(parts: Sequence[_Part], table: int) -> Iterator[tuple[Ids, Floats]]:
    """What is put back, all of it, in pieces; each id with its oldest value, however often it comes."""
    for at, part in enumerate(parts):
        ids, values = part.rows.rows.get(table, (None, None))
        if ids is not None and values is not None:
            oldest = values.copy()
            put_back(parts[:at], table, ids, oldest)
            yield ids, oldest


def _union(given: Sequence[PreviousRows]) -> PreviousRows:
    """Oldest first: of each row the first value that was set aside."""
    rows = {}
    for table in sorted({table for each in given for table in each.rows}):
        having = [each.rows[table] for each in given if table in each.rows]
        ids = np.concatenate([ids for ids, _ in having])
        values = np.concatenate([values for _, values in having])
        # np.unique sorts stably: the first of equal ids is the oldest
        distinct, first = np.unique(ids, return_index=True)
        rows[table] = distinct, values[first]
    return PreviousRows(given[0].number, rows)
