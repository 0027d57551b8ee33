"""When a partition applies what it was pushed: the gate of a synchronous step (docs/ledger.md, rules B1, B2, B6).

    gathers    some logical ranks are missing; with backup workers also: it is not known yet who counts
    gathered   all are there, and a fact about all partitions is needed: it waits for the verdict, and for nothing else
    taken      the verdict is there, or implied; the next step is gathered

With backup workers a verdict names the members of the step, those that count: from then on it waits for them alone, and
the step is over for the others.

Owns: the contributions of the step being gathered, in the order of logical ranks, and the verdict on them. Invariants:
a rank contributes once a step; the step is taken when all that count are there, whoever computed them; a verdict is
taken for its own step alone, and members are named once; what a verdict is made of is told until the step after the
next is gathered, since others may still need it. Pure. Must not know: what a gradient is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from shardyard.domain.errors import InvalidRequest, NotReady, RateMismatch
from shardyard.domain.ids import PartitionId, Rank
from shardyard.domain.pushes import GatheredPart, StepVerdict

Groups = tuple[tuple[float, ...], ...]


class Weighted(Protocol):
    """What the gate must know of a contribution. `groups` is None for a named empty push; `table_groups` is empty where
    it has no rows."""

    @property
    def weight(self) -> float: ...

    @property
    def groups(self) -> Groups | None: ...

    @property
    def overflow(self) -> bool: ...

    @property
    def table_groups(self) -> Groups: ...


T = TypeVar("T", bound=Weighted)


class Verdict(NamedTuple, Generic[T]):
    """What a step consists of: the members that count, in rank order, and each one's share of the mean. `skips`: their
    gradients do not count, only what they say of buffers."""

    members: tuple[T, ...]
    shares: tuple[float, ...]
    skips: bool = False


def verdict(contributions: Sequence[T]) -> Verdict[T]:
    """The verdict implied where no setting asks for another: everyone counts, by samples; weight 0 does not. Where loss
    scaling has found an overflow in any of them, no gradient does (docs/ledger.md, rule B6).

    Shares are float64, weight over the sum of weights in rank order.
    """
    members = tuple([c for c in contributions if c.groups is not None and c.weight > 0])
    total = 0.0
    for member in members:
        total += member.weight
    skips = True in [member.overflow for member in members]
    return Verdict(members, tuple([member.weight / total for member in members]), skips)


NORM_EPS = 1e-6
"""That of torch.nn.utils.clip_grad_norm_."""


def scale_of(square_norm: float, norm_max: float) -> float:
    """By what a gradient is multiplied so that its 2-norm is at most `norm_max`, as torch.nn.utils.clip_grad_norm_ has
    it: infinity gives 0, NaN stays."""
    scale = norm_max / (math.sqrt(square_norm) + NORM_EPS)
    return 1.0 if scale > 1.0 else scale


class StepGate(Generic[T]):
    """Gathers one step after the other. `step` is the one being gathered: the number of steps taken."""

    def __init__(self, partition: PartitionId, ranks: int, *, step: int = 0, backup_workers: int = 0) -> None:
        """`backup_workers`: so many ranks need not count."""
        self._partition = partition
        self._backup_workers = backup_workers
        self._members: tuple[Rank, ...] | None = None
        self._counted = [step - 1] * ranks  # the last step in which a rank counted, as far as is known
        self._gathered: list[T | None] = [None] * ranks
        self._count = 0
        self._told: GatheredPart | None = None
        self._told_before: GatheredPart | None = None
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
            if gathered is None or gathered.groups is None:
                continue
            if gathered.groups != contribution.groups:
                difference = _first_difference(contribution.groups, gathered.groups, "parameter group")
                raise RateMismatch(
                    f"logical rank {rank} of step {step} has the settings {difference} of logical rank {other}"
                )
            mine, theirs = contribution.table_groups, gathered.table_groups
            if mine and theirs and mine != theirs:
                difference = _first_difference(mine, theirs, "table")
                raise RateMismatch(
                    f"logical rank {rank} of step {step} has the settings {difference} of logical rank {other}"
                )

    def record(self, rank: Rank, contribution: T) -> None:
        assert self._gathered[rank] is None, (rank, self.step)
        self._gathered[rank] = contribution
        self._count += 1

    def completes(self, rank: Rank) -> bool:
        """Whether that rank alone is missing."""
        if self._backup_workers:
            return self._members is not None and self.missing() == (rank,)
        return self._count == len(self._gathered) - 1 and self._gathered[rank] is None

    def with_last(self, rank: Rank, contribution: T) -> tuple[T, ...]:
        """The contributions that count, in rank order, with that of the one that is missing; changes nothing."""
        assert self.completes(rank), (rank, self.missing())
        counted = self._gathered if self._members is None else [self._gathered[member] for member in self._members]
        return tuple([contribution if gathered is None else gathered for gathered in counted])

    @property
    def recorded(self) -> tuple[T, ...]:
        """The contributions to the step that are there, as long as others are missing."""
        return tuple([gathered for gathered in self._gathered if gathered is not None])

    @property
    def is_empty(self) -> bool:
        """Whether no rank has contributed to the step, and nothing is decided about it."""
        return self._count == 0 and self._members is None

    def missing(self) -> tuple[Rank, ...]:
        """Of those that count, as far as that is known."""
        if self.awaits_verdict:
            return ()
        counted = range(len(self._gathered)) if self._members is None else self._members
        return tuple([Rank(rank) for rank in counted if self._gathered[rank] is None])

    def next_step(self) -> None:
        """The step was taken, by its verdict or with the rank that alone was missing; the next one is gathered from
        here on."""
        assert self.awaits_verdict or len(self.missing()) <= 1, self.missing()
        for rank in self._members or ():
            self._counted[rank] = self.step
        self._members = None
        self._gathered = [None] * len(self._gathered)
        self._count = 0
        self._told_before, self._told = self._told, None
        self.step += 1

    # ---- steps that wait for a verdict

    def gather(self, square_norm: float) -> None:
        """The rank that alone was missing is there. What all have contributed is the caller's from here on."""
        assert len(self.missing()) <= 1, self.missing()
        self._gathered = [None] * len(self._gathered)
        self._count += 1
        self._told = GatheredPart(self._partition, self.step, square_norm)

    @property
    def awaits_verdict(self) -> bool:
        return self._told is not None

    def gathered(self, step: int) -> GatheredPart | None:
        """What is told of a step that waits for its verdict, or was taken last."""
        for told in (self._told, self._told_before):
            if told is not None and told.step == step:
                return told
        return None

    def judges(self, verdict: StepVerdict) -> bool:
        """Whether that is the verdict that the step waits for; False where it was taken by it, or a later one was.

        Raises InvalidRequest for one on a step that this partition has not gathered, and for one that cannot be made
        of what this partition has told: the sum of all square norms is none of them, or not a number where one is not.
        With backup workers, of members that are too few, or not those that were named before.
        """
        if verdict.step < self.step:
            return False
        if self._backup_workers and verdict.step == self.step and verdict.members:
            self._check_members(verdict)
            if self._members is None:
                return True
            if verdict.square_norm is None or self._told is None:
                return False
        if self._told is None or verdict.step != self.step:
            raise InvalidRequest(
                f"a verdict on step {verdict.step} of partition {self._partition}, which gathers step {self.step}",
                why="a verdict is made of what all partitions have gathered",
            )
        own, total = self._told.square_norm, verdict.square_norm
        if total is None or not (math.isnan(total) or total >= own):
            raise InvalidRequest(
                f"a verdict on step {verdict.step} with a square norm of {total}; partition {self._partition} alone has"
                f" {own}",
                todo="add the square norms of all partitions, in the order of their numbers",
            )
        return True

    # ---- backup workers

    @property
    def awaits_members(self) -> bool:
        """Whether it is not known yet who counts."""
        return bool(self._backup_workers) and self._members is None

    def present(self, members: Sequence[Rank]) -> tuple[T, ...] | None:
        """The members' contributions, in rank order; None where some are missing."""
        found = [each for each in (self._gathered[member] for member in members) if each is not None]
        return tuple(found) if len(found) == len(members) else None

    def name_members(self, members: Sequence[Rank]) -> tuple[Rank, ...]:
        """From here on the step waits for them alone. The others, for which it is over."""
        assert self.awaits_members, self.step
        self._members = tuple(members)
        named = frozenset(members)
        return tuple([Rank(rank) for rank in range(len(self._gathered)) if rank not in named])

    def has_dropped(self, rank: Rank, step: int) -> bool:
        """Whether a contribution to a step that is over for the rank does not count. Of the time before a restore
        nothing is known: False."""
        if step < self.step:
            return bool(self._backup_workers) and step > self._counted[rank]
        return self._members is not None and rank not in self._members

    def _check_members(self, verdict: StepVerdict) -> None:
        ranks, members = len(self._gathered), verdict.members
        if members[-1] >= ranks or len(members) < ranks - self._backup_workers:
            raise InvalidRequest(
                f"a verdict on step {verdict.step} with the members {list(members[:8])}; expected at least "
                f"{ranks - self._backup_workers} of {ranks} logical ranks"
            )
        if self._members not in (None, members):
            raise InvalidRequest(
                f"a verdict on step {verdict.step} with the members {list(members[:8])}; others were named before",
                why="there is one verdict on each step: the coordinator's",
            )


def _first_difference(mine: Groups, theirs: Groups, what: str) -> str:
    for index, (left, right) in enumerate(zip(mine, theirs, strict=False)):
        if left != right:
            return f"{list(left)} in {what} {index}, not {list(right)}"
    return f"of a different number of {what}s, not those"
