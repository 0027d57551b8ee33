"""How rows of a table begin, as it is said: by users, on the wire, in checkpoints and records.

Owns: the kinds and their check. Must not know: the generators (row_values), whose compiler takes longer to import than
all that only names them.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

from shardyard.domain.errors import InvalidRequest

FLOAT32_MAX: Final = float.fromhex("0x1.fffffep127")


class InitialKind(enum.Enum):
    """The value is the code that loops know."""

    ZEROS = 0
    UNIFORM = 1
    """In [-scale, scale)."""
    NORMAL = 2
    """Mean 0, standard deviation `scale`."""


@dataclass(frozen=True, slots=True)
class InitialValues:
    """How new rows begin. `scale` is the half width of UNIFORM, the standard deviation of NORMAL, and means nothing for
    ZEROS."""

    kind: InitialKind = InitialKind.UNIFORM
    scale: float = 0.01

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and 0 <= self.scale <= FLOAT32_MAX):
            raise InvalidRequest(f"initial values of scale {self.scale!r}; expected a finite number, at least 0")
