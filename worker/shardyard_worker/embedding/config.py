"""Which ids of a table get a row, and which lose it, as settings of `shardyard.tables`.

Owns: these settings, their types and ranges. Invariant: every server, and a process without one, can apply every valid
setting. Must not know: rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shardyard.domain.errors import TableError
from shardyard.domain.tables import table_settings
from shardyard.domain.tables.table_settings import AdmissionSettings, ExpirySettings

SECONDS_MAX: Final = 10**10


@dataclass(frozen=True)
class AdmitAll:
    """Each id has a row from its first push on.

    `zeros`: an id without a row reads as zeros, instead of as the row's first values.

    >>> embedding = sy.Embedding(2, admission=sy.tables.AdmitAll(zeros=True))
    >>> embedding(torch.tensor([17])).tolist()
    [[0.0, 0.0]]
    """

    zeros: bool = False

    @property
    def settings(self) -> AdmissionSettings:
        return AdmissionSettings(zeros=bool(self.zeros))


@dataclass(frozen=True)
class AdmitAfter:
    """An id gets a row at its push number `pushes`. Gradients of earlier pushes are dropped. Each step in which the id
    has a gradient is one push.

    >>> embedding = sy.Embedding(8, admission=sy.tables.AdmitAfter(3))

    `cells` None: each id is counted exactly, in 16 bytes or more of memory for each id without a row. Otherwise a
    filter of `cells` bytes, a power of two, in each partition estimates the counts, for at most 255 pushes. Some ids
    then get their row a little early, none late. Raises TableError.
    """

    pushes: int
    cells: int | None = None
    zeros: bool = False

    def __post_init__(self) -> None:
        _check_whole("admission after", pushes=self.pushes, cells=0 if self.cells is None else self.cells)
        _ = self.settings

    @property
    def settings(self) -> AdmissionSettings:
        zeros = bool(self.zeros)
        if self.cells is None:
            return AdmissionSettings(table_settings.Admission.COUNT, self.pushes, zeros=zeros)
        return AdmissionSettings(table_settings.Admission.ESTIMATE, self.pushes, cells=self.cells, zeros=zeros)


@dataclass(frozen=True)
class AdmitByChance:
    """An id without a row gets one at each push with the probability `chance`, so about after `1 / chance` pushes.

    The draw depends on the table's seed, the id and the step, so workers and servers agree. Raises TableError.

    >>> embedding = sy.Embedding(8, admission=sy.tables.AdmitByChance(0.1))
    """

    chance: float
    zeros: bool = False

    def __post_init__(self) -> None:
        _check_number("admission", chance=self.chance)
        _ = self.settings

    @property
    def settings(self) -> AdmissionSettings:
        return AdmissionSettings(table_settings.Admission.CHANCE, chance=float(self.chance), zeros=bool(self.zeros))


Admission = AdmitAll | AdmitAfter | AdmitByChance


@dataclass(frozen=True)
class Expiry:
    """When rows and their optimizer state are removed. A setting of 0 means never.

    >>> embedding = sy.Embedding(8, expiry=sy.tables.Expiry(age_steps=10_000, rows_kept=1_000_000))

    `age_steps` or `age_seconds`: removes rows whose last push is more than so many steps, or seconds, ago.
    `frequency_min`: removes rows that were pushed less often than this. `norm_min`: removes rows whose values have a
    smaller L2 norm. `rows_kept`: if there are more rows than this, removes the least frequent. `grace_steps` or
    `grace_seconds`: a row stays for so long after its last push, whatever its frequency and norm. A table counts ages
    in steps or in seconds, not in both.

    Rows are removed a few at a time in later steps; in a synchronous job all at once. An id that comes again starts
    with a new row. Raises TableError.
    """

    age_steps: int = 0
    frequency_min: int = 0
    norm_min: float = 0.0
    rows_kept: int = 0
    grace_steps: int = 0
    age_seconds: float = 0.0
    grace_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_whole(
            "expiry with",
            age_steps=self.age_steps,
            frequency_min=self.frequency_min,
            rows_kept=self.rows_kept,
            grace_steps=self.grace_steps,
        )
        _check_number("expiry", norm_min=self.norm_min)
        _check_seconds(age_seconds=self.age_seconds, grace_seconds=self.grace_seconds)
        _ = self.settings

    @property
    def settings(self) -> ExpirySettings:
        return ExpirySettings(
            self.age_steps,
            self.frequency_min,
            float(self.norm_min),
            self.rows_kept,
            self.grace_steps,
            round(self.age_seconds * 1_000),
            round(self.grace_seconds * 1_000),
        )


def _check_whole(what: str, **given: object) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TableError(f"{what} {name} = {value!r}; expected a whole number")


def _check_number(what: str, **given: object) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TableError(f"{what} with {name} = {value!r}; expected a number")


def _check_seconds(**given: float) -> None:
    _check_number("expiry", **given)
    for name, value in given.items():
        if value != 0 and not 0.001 <= value < SECONDS_MAX:
            raise TableError(f"expiry with {name} = {value!r}; expected 0, or from a millisecond to {SECONDS_MAX:,} s")
