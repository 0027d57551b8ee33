"""Rows of one partition as they were at earlier versions (docs/internals/ledger.md, rules B3 and C7).

Tables change in place. Before an update changes rows, their values are copied into a `RowDiff`. A reader of an earlier
version reads the tables as they are now, and then puts back the diffs since that version, the newest first, so that the
oldest value of each row wins.

    diffs of                       are kept
    the last step, synchronous     until the next step begins: version t can be read until t + 1 is there everywhere
    an update that is under way    until it has counted
    all updates since a pin        until the pin is released, or its diffs need more than `bytes_max`

Without a pin, an update whose rows have no versions copies nothing. If a reader pinned in the middle of it, the changes
so far would be missing from the diff: `is_unsaved` tells it to wait until the update has counted.

Owns: the diffs. Invariants: a pinned version reads as it was, or raises VersionPassed; no update is refused, or waits,
for a reader. Called under the partition's lock, except `merged` and `put_back`. Must not know: tables, when updates
arrive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from shardyard.domain.errors import VersionPassed
from shardyard.domain.tables.row_ids import Ids
from shardyard_ps_server.values.versions import VersionPin

Floats = npt.NDArray[np.float32]

FAN: Final = 8
"""So many diffs that were merged equally often are merged into one: a look-up reads O(log updates) of them."""
DIFF_BYTES: Final = 400
TABLE_BYTES: Final = 320
"""Bytes of a diff, and of each table in it, beside rows and ids. With small pushes it is most of all memory."""


@dataclass(frozen=True, slots=True, eq=False)
class RowDiff:
    """Values of rows at version `number` that an update has changed since, or is about to change: by table index,
    ascending ids and their values. `merges`: how often it was merged with others."""

    number: int
    rows: Mapping[int, tuple[Ids, Floats]] = field(default_factory=dict)
    merges: int = 0

    def put_back(self, table: int, ids: Ids, out: Floats) -> None:
        """Writes the value of row ids[i] at version `number` into out[i], if the diff has that row."""
        known, values = self.rows.get(table, (None, None))
        if known is None or values is None or not known.size:
            return
        places = np.searchsorted(known, ids)
        places[places == known.size] = 0
        found = known[places] == ids
        out[found] = values[places[found]]

    @property
    def nbytes(self) -> int:
        return DIFF_BYTES + sum([TABLE_BYTES + ids.nbytes + values.nbytes for ids, values in self.rows.values()])


def put_back(diffs: Sequence[RowDiff], table: int, ids: Ids, out: Floats) -> None:
    """Turns out[i], read from the table before, into row ids[i] as pinned. `diffs`: of one pin, the oldest first."""
    for diff in reversed(diffs):
        diff.put_back(table, ids, out)


def merged(diffs: Sequence[RowDiff]) -> list[RowDiff]:
    """Merges diffs until no FAN neighbours were merged equally often."""
    found: list[RowDiff] = []
    for diff in diffs:
        found.append(diff)
        while len(found) >= FAN and all(each.merges == found[-1].merges for each in found[-FAN:]):
            rows = {table: union(found[-FAN:], table) for table in sorted({t for d in found[-FAN:] for t in d.rows})}
            found[-FAN:] = [RowDiff(found[-FAN].number, rows, found[-1].merges + 1)]
    return found


def union(diffs: Sequence[RowDiff], table: int) -> tuple[Ids, Floats]:
    """Returns all rows of a table that the diffs have, each with its oldest value. At least one diff must have rows."""
    having = [diff.rows[table] for diff in diffs if table in diff.rows]
    ids = np.concatenate([ids for ids, _ in having])
    # np.unique sorts stably: the first of equal ids is the oldest value
    distinct, first = np.unique(ids, return_index=True)
    return distinct, np.concatenate([values for _, values in having])[first]


class PinnedRows:
    """The diffs of one pin, from version `number` on."""

    def __init__(self, number: int, bytes_max: int) -> None:
        self._number = number
        self._bytes_max = bytes_max
        self._diffs: list[RowDiff] = []
        self._lost = ""
        self.nbytes = 0

    def add(self, diff: RowDiff) -> None:
        """Adds a diff. Diffs come in the order of versions. One of an earlier version is ignored."""
        if self._lost or diff.number < self._number or not diff.rows:
            return
        self._diffs.append(diff)
        self.nbytes += diff.nbytes
        if self.nbytes > self._bytes_max:
            self.lose(f"updates have changed more than the {self._bytes_max} bytes of rows that are kept")

    def lose(self, why: str) -> None:
        """Makes the version unreadable from now on."""
        self._diffs, self.nbytes, self._lost = [], 0, why

    def diffs(self) -> tuple[RowDiff, ...]:
        """Raises VersionPassed."""
        if self._lost:
            raise VersionPassed(f"rows of version {self._number}: {self._lost}")
        return tuple(self._diffs)

    def replace(self, before: Sequence[RowDiff], after: Sequence[RowDiff]) -> None:
        """Replaces `before`, which `diffs` returned, by `after`, its merged form. Another reader may have merged
        first."""
        if len(after) < len(before) and tuple(self._diffs[: len(before)]) == tuple(before):
            self._diffs[: len(before)] = after
            self.nbytes = sum([diff.nbytes for diff in self._diffs])


class RowOverlay:
    """The diffs of one partition. `bytes_max`: of each pin. `keeps_last`: a step's diff is kept until the next step."""

    def __init__(self, bytes_max: int, *, keeps_last: bool) -> None:
        self._bytes_max = bytes_max
        self._keeps_last = keeps_last
        self._latest: list[RowDiff] = []
        self._pins: dict[VersionPin, PinnedRows] = {}
        self.is_unsaved = False
        """Whether an update is changing rows that are in no diff. A reader that wants to pin them waits for its end."""

    # ---- readers

    @property
    def last(self) -> RowDiff | None:
        """In a synchronous job, the diff of what the last step changed, or the present one is about to change."""
        return self._latest[-1] if self._latest else None

    def pin(self, pin: VersionPin, newest: int) -> bool:
        """Keeps the rows of a version from now on. Returns False if some diffs since that version are missing."""
        if pin.number < newest and not any(diff.number == pin.number for diff in self._latest):
            return False
        self._pins[pin] = PinnedRows(pin.number, self._bytes_max)
        for diff in self._latest:
            self._pins[pin].add(diff)
        return True

    def find(self, pin: VersionPin) -> PinnedRows | None:
        return self._pins.get(pin)

    def unpin(self, pin: VersionPin) -> None:
        """Releases a pin. A second call does nothing."""
        pinned = self._pins.pop(pin, None)
        if pinned is not None:
            pinned.lose("its pin has been released, or its lease has run out")

    @property
    def nbytes(self) -> int:
        """Bytes of the diffs of all pins."""
        return sum([pinned.nbytes for pinned in self._pins.values()])

    # ---- updates

    def wants_diff(self, *, begins: bool) -> bool:
        """Whether an update whose rows have no versions must copy what it changes. `begins`: it has changed nothing
        yet."""
        self.is_unsaved = not self._pins or (self.is_unsaved and not begins)
        return not self.is_unsaved

    def add(self, diffs: Sequence[RowDiff], *, begins: bool) -> None:
        """Adds what an update is about to change. `begins`: it has changed nothing yet."""
        self._latest = [*diffs] if begins else [*self._latest, *diffs]
        for pinned in self._pins.values():
            for diff in diffs:
                pinned.add(diff)

    def give_up(self, why: str) -> None:
        """Gives up pinned versions, because what the update under way changes could not be copied."""
        self.lose_pins(why)
        self.is_unsaved = True

    def end_update(self) -> bool:
        """Ends an update that has counted. Returns whether readers may have waited for that."""
        waited_for, self.is_unsaved = self.is_unsaved, False
        if not self._keeps_last:
            self._latest = []
        return waited_for

    def lose_pins(self, why: str) -> None:
        """Makes all pinned versions unreadable."""
        for pinned in self._pins.values():
            pinned.lose(why)

    def clear(self, why: str) -> None:
        """Drops all diffs: the tables were replaced, so no earlier version of them is here."""
        self._latest = []
        self.lose_pins(why)
