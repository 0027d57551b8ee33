"""What rows were before the last step changed them (docs/ledger.md, rule B3).

A step changes rows in place. Whoever computes a rank of the step again must read them as they were, so the values of
those that a step changes are set aside before, those that it makes with what they read as without a row.

Owns: these values. Invariants: they are one step's, whatever the tables' size; nothing here changes once it is made.
Must not know: tables, when a step is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardyard.domain.tables.row_ids import Ids

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PreviousRows:
    """Rows at version `number` that the step after it has changed, or is changing: of tables by number, ids that
    ascend, and their values."""

    number: int
    rows: Mapping[int, tuple[Ids, Floats]] = field(default_factory=dict)

    def put_back(self, table: int, ids: Ids, out: Floats) -> None:
        """out[i], read from the table since, becomes what the row of ids[i] was at that version."""
        known, values = self.rows.get(table, (None, None))
        if known is None or values is None or not known.size:
            return
        places = np.searchsorted(known, ids)
        places[places == known.size] = 0
        found = known[places] == ids
        out[found] = values[places[found]]

    @property
    def nbytes(self) -> int:
        return sum([ids.nbytes + values.nbytes for ids, values in self.rows.values()])
