"""When a partition applies what it was pushed: the gate of a synchronous step (docs/ledger.md, rules B1, B2, B6).

Owns: the contributions of the step being gathered, in the order of logical ranks, and the verdict on them. Invariants:
a rank contributes once a step; the step is taken when all ranks are there, whoever computed them. Pure. Must not know:
what a gradient is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from shardyard.ground.errors import InvalidRequest, NotReady, RateMismatch
from shardyard.ground.types import PartitionId, Rank


class Weighted(Protocol):
    """What the gate must know of a contribution. `groups` is None for a named empty push."""

    @property
    def weight(self) -> float: ...

    @property
    def groups(self) -> tuple[tuple[float, ...], ...] | None: ...


T = TypeVar("T", bound=Weighted)


class Verdict(NamedTuple, Generic[T]):
    """What a step consists of: the members that count, in rank order, and each one's share of the mean."""

    members: tuple[T, ...]
    shares: tuple[float, ...]


def verdict(contributions: Sequence[T]) -> Verdict[T]:
    """The verdict implied where no setting asks for another: everyone counts, by samples; weight 0 does not.

    Shares are float64, weight over the sum of weights in rank order.
    """
    members = tuple([c for c in contributions if c.groups is not None and c.weight > 0])
    total = 0.0
    for member in members:
        total += member.weight
    return Verdict(members, tuple([member.weight / total for member in members]))


class Gate(Generic[T]):
    """Gathers one step after the other. `step` is the one being gathered: the number of steps taken."""

    def __init__(self, partition: PartitionId, ranks: int, *, step: int = 0) -> None:
        self._partition = partition
        self._gathered: list[T | None] = [None] * ranks
        self._count = 0
        self.step = step

    def check(self, rank: Rank, step: int, contribution: T) -> None:
        """Raises InvalidRequest for a rank that does not exist, NotReady for a later step, RateMismatch where the
        ranks of a step use different optimizer settings (rule B5)."""
        if rank >= len(self._gathered):
            raise InvalidRequest(f"logical rank {rank}; the job has {len(self._gathered)}")
        if step != self.step:
            raise NotReady(f"step {step} in partition {self._partition}, which gathers step {self.step}")
        if contribution.groups is None:
            return
        for other, gathered in enumerate(self._gathered):
            if gathered is not None and gathered.groups is not None and gathered.groups != contribution.groups:
                raise RateMismatch(
                    f"logical rank {rank} of step {step} has the settings {_first_difference(contribution, gathered)}"
                    f" of logical rank {other}"
                )

    def record(self, rank: Rank, contribution: T) -> None:
        assert self._gathered[rank] is None, (rank, self.step)
        self._gathered[rank] = contribution
        self._count += 1

    def completes(self, rank: Rank) -> bool:
        """Whether that rank alone is missing."""
        return self._count == len(self._gathered) - 1 and self._gathered[rank] is None

    def with_last(self, rank: Rank, contribution: T) -> tuple[T, ...]:
        """The contributions of the step, in rank order, with that of the one that is missing; changes nothing."""
        assert self.completes(rank), (rank, self.missing())
        return tuple([contribution if gathered is None else gathered for gathered in self._gathered])

    @property
    def is_empty(self) -> bool:
        """Whether no rank has contributed to the step."""
        return self._count == 0

    def missing(self) -> tuple[Rank, ...]:
        return tuple(Rank(rank) for rank, gathered in enumerate(self._gathered) if gathered is None)

    def next_step(self) -> None:
        """The step was taken, with the rank that alone was missing; the next one is gathered from here on."""
        assert self._count == len(self._gathered) - 1, self.missing()
        self._gathered = [None] * len(self._gathered)
        self._count = 0
        self.step += 1


def _first_difference(mine: Weighted, theirs: Weighted) -> str:
    for index, (left, right) in enumerate(zip(mine.groups or (), theirs.groups or (), strict=False)):
        if left != right:
            return f"{list(left)} in parameter group {index}, not {list(right)}"
    return "of a different number of parameter groups, not those"
