"""Which entries of a table expire, by its expiry settings. Servers and processes without one share these rules.

Must not know: where entries lie.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def expires(
    age: Any, frequency: Any, has_row: Any, age_units: Any, grace_units: Any, frequency_min: Any, frequency_kept: Any
) -> Any:
    """Whether an entry expires for its age or its frequency: of numbers, or element by element of arrays.

    `age`: units since the last push. A limit of 0 removes nothing. `frequency_kept`: rows that were pushed less often
    are removed because there are too many rows. The age limit and this one apply during the grace period too.
    """
    too_old = (age_units > 0) & (age > age_units)
    too_many = has_row & (frequency < frequency_kept)
    too_rare = (age >= grace_units) & (frequency < frequency_min)
    return too_old | too_many | too_rare


def frequency_kept(histogram: npt.NDArray[np.int64], too_many: int) -> tuple[int, int]:
    """Which rows to remove so that `too_many` fewer are left: all rows with a frequency below the first result, and as
    many with exactly that frequency as the second says. `histogram[f]`: how many rows have frequency f."""
    if too_many <= 0:
        return 0, 0
    up_to = np.cumsum(histogram)
    lowest = min(int(np.searchsorted(up_to, too_many)), histogram.size - 1)
    return lowest, too_many - (int(up_to[lowest - 1]) if lowest else 0)
