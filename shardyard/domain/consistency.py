"""How the workers of a job wait for each other, and what happens to their gradients."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardyard.domain.ids import Incarnation

if TYPE_CHECKING:
    from shardyard.domain.replica_groups import Strategy


class UpdateMode(enum.Enum):
    """How servers apply pushes: as contributions to a step, or each one when it comes."""

    SYNC = "sync"
    ASYNC = "async"


class ConsistencyMode(enum.Enum):
    """Which values a gradient may be computed on (docs/guides/consistency.md)."""

    SYNC = "sync"
    LOCAL = "local"
    HYBRID = "hybrid"
    BOUNDED = "bounded"
    ASYNC = "async"

    @property
    def updates(self) -> UpdateMode:
        """How variables are updated."""
        asynchronous = self in (ConsistencyMode.BOUNDED, ConsistencyMode.ASYNC)
        return UpdateMode.ASYNC if asynchronous else UpdateMode.SYNC


class Durability(enum.Enum):
    """What survives the death of a server (docs/internals/reliability.md)."""

    CHECKPOINT = "checkpoint"
    """Its partitions go back to the newest checkpoint. Work that was acknowledged since then is computed again, or
    reported as lost."""
    WAL = "wal"
    """Acknowledged work is in its log, from which its partitions are restored as they were."""


class BufferMode(enum.Enum):
    """How a synchronous step combines buffers (docs/guides/training.md)."""

    MEAN = "mean"
    FIRST = "first"
    """The buffers of logical rank 0."""


class NonFinite(enum.Enum):
    """What happens to work whose gradient is not finite (docs/guides/gradients.md)."""

    ALLOW = "allow"
    SKIP = "skip"
    """It does not count, and is listed."""
    FAIL = "fail"
    """The job ends."""


@dataclass(frozen=True, slots=True)
class StaleRule:
    """What happens to a gradient that was computed on an older version (docs/guides/consistency.md). `divides_rate`:
    the rate of its update is divided by its staleness. `compensation`: DC-ASGD's lambda; 0: none. `decay`: lambda is
    divided by the root of a running mean of squares with this decay; 0: lambda is constant."""

    divides_rate: bool = False
    compensation: float = 0.0
    decay: float = 0.0


@dataclass(frozen=True, slots=True)
class Consistency:
    """How the workers of a job wait for each other. `number`: how often the job has switched its mode or its strategy.
    `bound`: the bound on staleness, in bounded mode. `strategy`: the last one to which it has switched; None: it has
    the one with which it was started."""

    number: int
    mode: ConsistencyMode
    bound: int | None = None
    strategy: Strategy | None = None

    def __str__(self) -> str:
        bound = "" if self.bound is None else f", {self.bound} steps"
        return f"{self.mode.value}{bound}{'' if self.strategy is None else f', {self.strategy.value}'}"


@dataclass(frozen=True, slots=True)
class Stop:
    """A job ends before its data does. `worker`: the worker that asked for it; None: a person did. Once `settled`, a
    synchronous job computes exactly the steps before `step`. An asynchronous job has no such step."""

    reason: str
    worker: Incarnation | None = None
    settled: bool = False
    step: int = 0


@dataclass(frozen=True, slots=True)
class SwitchPoint:
    """A synchronous job changes to another mode or strategy before step `step`, once that is `settled`: workers compute
    the steps before it, and begin none from it on. `number` counts such switches of a job. `to_steps`: an asynchronous
    job changes to steps, of which `step` is the first: data shards that were begun are done, and nothing else is
    pushed."""

    number: int
    settled: bool = False
    step: int = 0
    to_steps: bool = False


class SspPhase(enum.Enum):
    """The phase of a worker in a job with bounded staleness."""

    JOINS = "joins"
    """It starts to take steps, at the number of the slowest other worker."""
    STEPS = "steps"
    RESTS = "rests"
    """It takes no steps for now, and no other worker waits for it."""


@dataclass(frozen=True, slots=True)
class SspReport:
    """The progress of a worker. `epoch`: how often it joined before. `clock`: the steps that it has taken, including
    the push of this exchange. `ahead`: values requested now, or cached rows, are used this many steps later."""

    phase: SspPhase
    epoch: int = 0
    clock: int = 0
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Clipping:
    """How a gradient is clipped: first each element to [-value, value], then the whole to the 2-norm `norm`. 0 means no
    clipping."""

    norm: float = 0.0
    value: float = 0.0


NO_CLIPPING: Final = Clipping()
