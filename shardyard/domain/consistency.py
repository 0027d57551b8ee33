"""How a job's workers wait for each other, and what happens to their gradients."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from shardyard.domain.ids import Incarnation


class UpdateMode(enum.Enum):
    """How servers take pushes: as contributions to a step, or each as it comes."""

    SYNC = "sync"
    ASYNC = "async"


class ConsistencyMode(enum.Enum):
    """What a gradient may be computed on (docs/guides/consistency.md)."""

    SYNC = "sync"
    LOCAL = "local"
    HYBRID = "hybrid"
    BOUNDED = "bounded"
    ASYNC = "async"

    @property
    def updates(self) -> UpdateMode:
        """Of variables."""
        asynchronous = self in (ConsistencyMode.BOUNDED, ConsistencyMode.ASYNC)
        return UpdateMode.ASYNC if asynchronous else UpdateMode.SYNC


class Durability(enum.Enum):
    """What outlives a server (docs/internals/reliability.md)."""

    CHECKPOINT = "checkpoint"
    """Its partitions go back to the newest checkpoint; what was acknowledged since is computed again, or told as
    lost."""
    WAL = "wal"
    """What was acknowledged is in its log, from which its partitions come back as they were."""


class BufferMode(enum.Enum):
    """Whose buffers a synchronous step sets (docs/guides/training.md)."""

    MEAN = "mean"
    FIRST = "first"
    """Those of logical rank 0."""


class NonFinite(enum.Enum):
    """What becomes of work whose gradient is not finite (docs/guides/gradients.md)."""

    ALLOW = "allow"
    SKIP = "skip"
    """It does not count, and is listed."""
    FAIL = "fail"
    """The job ends."""


@dataclass(frozen=True, slots=True)
class StaleRule:
    """What becomes of a gradient that was computed on an older version (docs/guides/consistency.md). `divides_rate`:
    the rate of its update is divided by its staleness; `compensation`: DC-ASGD's lambda, 0 for none; `decay`: of the
    mean of squares by the root of which lambda is divided, 0 for a constant lambda."""

    divides_rate: bool = False
    compensation: float = 0.0
    decay: float = 0.0


@dataclass(frozen=True, slots=True)
class Consistency:
    """How a job's workers wait for each other. `number` counts the job's switches, 0: as it was started; `bound`: on
    staleness, in bounded mode."""

    number: int
    mode: ConsistencyMode
    bound: int | None = None

    def __str__(self) -> str:
        return self.mode.value if self.bound is None else f"{self.mode.value}, {self.bound} steps"


@dataclass(frozen=True, slots=True)
class Stop:
    """A job ends before its data does. `worker`: who said so; None: a person. Of a synchronous job the steps before
    `step` are computed, and no others, once that is `settled`; an asynchronous one has no such step."""

    reason: str
    worker: Incarnation | None = None
    settled: bool = False
    step: int = 0


@dataclass(frozen=True, slots=True)
class SwitchPoint:
    """A synchronous job goes over to another mode before step `step`, once that is `settled`: workers compute the steps
    before it, and begin none from it on. `number` counts the halts of a job. `drains`: an asynchronous job goes over to
    steps, of which `step` is the first: data shards that were begun are done, and nothing else is pushed."""

    number: int
    settled: bool = False
    step: int = 0
    drains: bool = False


class SspPhase(enum.Enum):
    """What a worker of a job with bounded staleness is doing."""

    JOINS = "joins"
    """It begins to take steps, beside the slowest of the others."""
    STEPS = "steps"
    RESTS = "rests"
    """It takes no steps for now: nobody waits for it."""


@dataclass(frozen=True, slots=True)
class SspReport:
    """How far a worker is. `epoch`: how often it has joined before; `clock`: the steps that it has taken, with the push
    of this exchange. `ahead`: the values requested now, or the rows that it caches, are used this many steps later."""

    phase: SspPhase
    epoch: int = 0
    clock: int = 0
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Clipping:
    """How a gradient is clipped: first each element to [-value, value], then all of it to the 2-norm `norm`. 0: not at
    all."""

    norm: float = 0.0
    value: float = 0.0


NO_CLIPPING: Final = Clipping()
