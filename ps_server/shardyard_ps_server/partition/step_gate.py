"""When a partition applies a synchronous step: the gate (docs/internals/ledger.md, rules B1, B2, B6).

    gathers    some logical ranks are missing; with backup workers, the members may not be known yet
    gathered   all contributions are here, and the step waits for a verdict with a fact about all partitions
    applied    the verdict has come, or is implied; the next step is gathered

With backup workers a verdict names the members of the step: the ranks that count. From then on the step waits only for
the members, and is over for the other ranks.

Owns: the contributions of the step being gathered, in the order of logical ranks, and the verdict on them. Invariants:
a rank contributes once to a step; the step is applied when all ranks that count are here, whichever worker computed
them; a verdict is for one step, and members are named once; a partition's part of a verdict is reported until the step
after the next is gathered, because other partitions may still need it. Pure. Must not know: what a gradient is.
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
    """What the gate reads from a contribution. `groups`: None for a named empty push; `table_groups`: empty without
    rows."""

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
    """What a step consists of: the members that count, in rank order, and their shares of the mean. `skips`: gradients
    do not count, only buffers do."""

    members: tuple[T, ...]
    shares: tuple[float, ...]
    skips: bool = False


def verdict(contributions: Sequence[T]) -> Verdict[T]:
    """Returns the implied verdict: all contributions count by samples, except those of weight 0. If loss scaling has
    found an overflow in any of them, no gradient counts (docs/internals/ledger.md, rule B6).

    A share is the weight over the sum of weights in rank order, in float64.
    """
    members = tuple([c for c in contributions if c.groups is not None and c.weight > 0])
    total = 0.0
    for member in members:
        total += member.weight
    skips = True in [member.overflow for member in members]
    return Verdict(members, tuple([member.weight / total for member in members]), skips)


NORM_EPS = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


def scale_of(square_norm: float, norm_max: float) -> float:
    """Returns the factor that brings a gradient's 2-norm to at most `norm_max`, as torch.nn.utils.clip_grad_norm_ does:
    0 for infinity, NaN for NaN."""
    scale = norm_max / (math.sqrt(square_norm) + NORM_EPS)
    return 1.0 if scale > 1.0 else scale


class StepGate(Generic[T]):
    """Gathers one step after the other. `step`: the one being gathered, which is the number of applied steps."""

    def __init__(self, partition: PartitionId, ranks: int, *, step: int = 0, backup_workers: int = 0) -> None:
        """`backup_workers`: how many ranks need not count."""
        self._partition = partition
        self._backup_workers = backup_workers
        self._members: tuple[Rank, ...] | None = None
        self._counted = [step - 1] * ranks  # the last known step in which a rank counted
        self._gathered: list[T | None] = [None] * ranks
        self._count = 0
        self._reported: GatheredPart | None = None
        self._reported_before: GatheredPart | None = None
        self.step = step

    def check(self, rank: Rank, step: int, contribution: T) -> None:
        """Raises InvalidRequest for a rank that does not exist, NotReady for a later step, RateMismatch if the ranks of
        a step use different optimizer settings (rule B5)."""
        if rank >= len(self._gathered):
            raise InvalidRequest(f"logical rank {rank}; the job has {len(self._gathered)}")
        if step != self.step:
            raise NotReady(f"step {step} in partition {self._partition}, which gathers step {self.step}")
        if contribution.groups is None:
            return
        for other, gathered in enumerate(self._gathered):
            if gathered is None or gathered.groups is None:
                continue
            for what, mine, theirs in (
                ("parameter group", contribution.groups, gathered.groups),
                ("table", contribution.table_groups, gathered.table_groups),
            ):
                if mine and theirs and mine != theirs:
                    difference = _first_difference(mine, theirs, what)
                    raise RateMismatch(
                        f"logical rank {rank} of step {step} has the settings {difference} of logical rank {other}"
                    )

    def record(self, rank: Rank, contribution: T) -> None:
        assert self._gathered[rank] is None, (rank, self.step)
        self._gathered[rank] = contribution
        self._count += 1

    def completes(self, rank: Rank) -> bool:
        """Whether only that rank is missing."""
        if self._backup_workers:
            return self._members is not None and self.missing() == (rank,)
        return self._count == len(self._gathered) - 1 and self._gathered[rank] is None

    def with_last(self, rank: Rank, contribution: T) -> tuple[T, ...]:
        """Returns the contributions that count, in rank order, with that of the missing rank. Changes nothing."""
        assert self.completes(rank), (rank, self.missing())
        counted = self._gathered if self._members is None else [self._gathered[member] for member in self._members]
        return tuple([contribution if gathered is None else gathered for gathered in counted])

    @property
    def recorded(self) -> tuple[T, ...]:
        """The contributions that are here, while others are missing."""
        return tuple([gathered for gathered in self._gathered if gathered is not None])

    @property
    def is_empty(self) -> bool:
        """Whether no rank has contributed to the step, and no members are named."""
        return self._count == 0 and self._members is None

    def missing(self) -> tuple[Rank, ...]:
        """Returns the ranks that are missing, of the members if they are known."""
        if self.awaits_verdict:
            return ()
        counted = range(len(self._gathered)) if self._members is None else self._members
        return tuple([Rank(rank) for rank in counted if self._gathered[rank] is None])

    def next_step(self) -> None:
        """Begins to gather the next step, because this one was applied."""
        assert self.awaits_verdict or len(self.missing()) <= 1, self.missing()
        for rank in self._members or ():
            self._counted[rank] = self.step
        self._members = None
        self._gathered = [None] * len(self._gathered)
        self._count = 0
        self._reported_before, self._reported = self._reported, None
        self.step += 1

    # ---- steps that wait for a verdict

    def gather(self, square_norm: float) -> None:
        """Makes the step wait for a verdict, because all contributions are here. The caller keeps them from now on."""
        assert len(self.missing()) <= 1, self.missing()
        self._gathered = [None] * len(self._gathered)
        self._count += 1
        self._reported = GatheredPart(self._partition, self.step, square_norm)

    @property
    def awaits_verdict(self) -> bool:
        return self._reported is not None

    def gathered(self, step: int) -> GatheredPart | None:
        """Returns this partition's part of the verdict on a step that waits for it, or was applied last."""
        for part in (self._reported, self._reported_before):
            if part is not None and part.step == step:
                return part
        return None

    def judges(self, verdict: StepVerdict) -> bool:
        """Returns whether the step waits for this verdict; False if that step was applied.

        Raises InvalidRequest for a step that this partition has not gathered, and for a sum of square norms that is
        less than the part that this partition reported. With backup workers also for too few members, and for other
        members than those that were named before.
        """
        if verdict.step < self.step:
            return False
        if self._backup_workers and verdict.step == self.step and verdict.members:
            self._check_members(verdict)
            if self._members is None:
                return True
            if verdict.square_norm is None or self._reported is None:
                return False
        if self._reported is None or verdict.step != self.step:
            raise InvalidRequest(
                f"a verdict on step {verdict.step} of partition {self._partition}, which gathers step {self.step}",
                why="a verdict is made of what all partitions have gathered",
            )
        own, total = self._reported.square_norm, verdict.square_norm
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
        """Whether the ranks that count are not known yet."""
        return bool(self._backup_workers) and self._members is None

    def present(self, members: Sequence[Rank]) -> tuple[T, ...] | None:
        """Returns the members' contributions, in rank order; None if some are missing."""
        found = [each for each in (self._gathered[member] for member in members) if each is not None]
        return tuple(found) if len(found) == len(members) else None

    def name_members(self, members: Sequence[Rank]) -> tuple[Rank, ...]:
        """Makes the step wait only for the members. Returns the other ranks, for which it is over."""
        assert self.awaits_members, self.step
        self._members = tuple(members)
        named = frozenset(members)
        return tuple([Rank(rank) for rank in range(len(self._gathered)) if rank not in named])

    def has_dropped(self, rank: Rank, step: int) -> bool:
        """Returns whether a step is over for the rank without its contribution. False for steps before a restore,
        which are not known."""
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
