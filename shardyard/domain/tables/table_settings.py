"""The settings of a table: its rows, which ids get one, and which lose it. They never change.

Owns: the settings and their checks. Must not know: memory, loops.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Final

from shardyard.domain.errors import TableError
from shardyard.domain.limits import FREQUENCY_MAX, TABLE_DIM_MAX, TABLE_ROWS_MAX
from shardyard.domain.tables import row_optimizers
from shardyard.domain.tables.initial_values import InitialValues

AGE_UNITS: Final = 1 << 14
"""The longest age is divided into at least this many units."""
SWEEPS_PER_AGE: Final = 16
SWEEP_STEPS: Final = 64
"""The steps between two sweeps, if no age is set."""
CELLS_MAX: Final = 1 << 32


class Admission(enum.Enum):
    """Which ids get a row. The value is the code in loops."""

    ALL = 0
    COUNT = 1
    """Ids that were pushed `threshold` times. Until then each has a counter in the index."""
    CHANCE = 2
    """At each push with probability `chance`, drawn from seed, table, id and step."""
    ESTIMATE = 3
    """As COUNT, by a counting Bloom filter of `cells` bytes: some ids get a row a little early, none late."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """`zeros`: an id without a row reads as zeros, not as its initial values."""

    kind: Admission = Admission.ALL
    threshold: int = 1
    chance: float = 1.0
    cells: int = 1 << 20
    zeros: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.threshold <= FREQUENCY_MAX:
            raise TableError(f"admission from {self.threshold} pushes on; expected 1 to {FREQUENCY_MAX:,}")
        if self.kind is Admission.ESTIMATE and self.threshold > 255:
            raise TableError(f"admission by estimate from {self.threshold} pushes on; expected at most 255")
        if not 0 < self.chance <= 1:
            raise TableError(f"admission by a chance of {self.chance!r}; expected more than 0 and at most 1")
        if not (64 <= self.cells <= CELLS_MAX and self.cells & (self.cells - 1) == 0):
            raise TableError(f"a filter of {self.cells} cells; expected a power of two from 64 to 2**32")


@dataclass(frozen=True, slots=True)
class ExpirySettings:
    """Which rows are removed; 0 means never. `age_steps`: rows that were last pushed more than so many steps ago.
    `frequency_min`: rows that were pushed less often. `norm_min`: rows whose values have a smaller L2 norm.
    `rows_kept`: if there are more rows, the least frequent. `grace_steps`: a row stays for so long after its last push,
    whatever its frequency and norm. `age_ms`, `grace_ms`: the same in milliseconds of the table's clock. A table counts
    ages in steps or in milliseconds, not in both."""

    age_steps: int = 0
    frequency_min: int = 0
    norm_min: float = 0.0
    rows_kept: int = 0
    grace_steps: int = 0
    age_ms: int = 0
    grace_ms: int = 0

    def __post_init__(self) -> None:
        for name in ("age_steps", "frequency_min", "rows_kept", "grace_steps", "age_ms", "grace_ms"):
            if not 0 <= getattr(self, name) < 1 << 47:
                raise TableError(f"expiry with {name} = {getattr(self, name)}; expected 0 or more, below 2**47")
        if not (math.isfinite(self.norm_min) and self.norm_min >= 0):
            raise TableError(f"expiry with norm_min = {self.norm_min!r}; expected a finite number, at least 0")
        if self.by_time and (self.age_steps or self.grace_steps):
            raise TableError(
                f"expiry by ages of {max(self.age_steps, self.grace_steps)} steps and {max(self.age_ms, self.grace_ms)}"
                " ms; expected ages in steps or in seconds",
                todo="give age and grace in steps, or both in seconds",
            )

    @property
    def by_time(self) -> bool:
        """Whether ages are in milliseconds, not in steps."""
        return self.age_ms > 0 or self.grace_ms > 0

    def time(self, step: int, now_ms: int) -> int:
        """The present, as ages are counted: a step or a time."""
        return now_ms if self.by_time else step

    @property
    def age_unit(self) -> int:
        """The steps or milliseconds in one unit of ages: a power of two."""
        longest = max(self.age_steps, self.grace_steps, self.age_ms, self.grace_ms)
        return 1 << max(0, (longest // AGE_UNITS).bit_length())

    @property
    def sweep_steps(self) -> int:
        """A synchronous job removes what expires at each update whose number is a multiple of this."""
        longest = max(self.age_steps, self.grace_steps)
        return max(1, longest // SWEEPS_PER_AGE) if longest else SWEEP_STEPS

    @property
    def age_units(self) -> int:
        """Rows of a greater age are removed; 0: none."""
        return max(self.age_steps, self.age_ms) // self.age_unit

    @property
    def grace_units(self) -> int:
        return max(self.grace_steps, self.grace_ms) // self.age_unit


@dataclass(frozen=True, slots=True)
class TableSettings:
    """`name` and `seed`: initial values depend on them. `path`: the table's in its model, under which
    `model.state_dict()` has its rows; by default the name. `optimizer`, `group`: a kind of
    shardyard.domain.tables.row_optimizers, and its settings in order, those of the first update. `rows_max`: in this
    partition; address space for so many rows is reserved."""

    name: str
    dim: int
    optimizer: str = "sgd"
    group: tuple[float, ...] = ()
    seed: int = 0
    initial: InitialValues = field(default_factory=InitialValues)
    rows_max: int = 1 << 26
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    expiry: ExpirySettings = field(default_factory=ExpirySettings)
    path: str = ""

    def __post_init__(self) -> None:
        if not self.path:
            object.__setattr__(self, "path", self.name)
        if not 1 <= self.dim <= TABLE_DIM_MAX:
            raise TableError(f"table {self.name!r} with rows of {self.dim} values; expected 1 to {TABLE_DIM_MAX:,}")
        if not 1 <= self.rows_max <= TABLE_ROWS_MAX:
            raise TableError(f"table {self.name!r} with at most {self.rows_max} rows; expected 1 to {TABLE_ROWS_MAX:,}")
        if not self.group:
            object.__setattr__(self, "group", row_optimizers.make_group(self.optimizer, {}))
        row_optimizers.check_settings(self.optimizer, self.group)
