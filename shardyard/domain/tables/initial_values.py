"""How rows of a table begin: the names that users, the wire, checkpoints and records use.

Must not know: the generators (row_values), whose compiler takes longer to import than everything that only uses names.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

from shardyard.domain.errors import InvalidRequest

FLOAT32_MAX: Final = float.fromhex("0x1.fffffep127")


class InitialKind(enum.Enum):
    """The value is the code in loops."""

    ZEROS = 0
    UNIFORM = 1
    """In [-scale, scale)."""
    NORMAL = 2
    """Mean 0, standard deviation `scale`."""


@dataclass(frozen=True, slots=True)
class InitialValues:
    """How new rows begin. `scale`: the half width of UNIFORM, the standard deviation of NORMAL; unused for ZEROS."""

    kind: InitialKind = InitialKind.UNIFORM
    scale: float = 0.01

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and 0 <= self.scale <= FLOAT32_MAX):
            raise InvalidRequest(f"initial values of scale {self.scale!r}; expected a finite number, at least 0")
