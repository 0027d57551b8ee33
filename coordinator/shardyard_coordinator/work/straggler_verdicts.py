"""Steps that are taken without their latest ranks, and the batches that these ranks had (docs/internals/ledger.md, rule
B6; Chen et al. 2016, "Revisiting Distributed Synchronous SGD").

Owns: `StepVerdicts`, which logical ranks count in each step of a job, and how many contributions came late;
`MakeupPlan`, which batches of one feed were dropped, and at which step after the planned ones each is computed again.
Invariants: there is one final verdict on a step. All ranks count that had contributed when the step was due. A step
that has samples counts some, so making up comes to an end. The verdicts on the steps before a make-up step determine
what it consists of. Must not know: samples' contents, servers, members, time.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from shardyard.domain import limits
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Incarnation, Rank
from shardyard_coordinator.records import SUM_MAX, Body, Entry, checked_items, checked_number, require

STEPS_PER_RECORD: Final = 1_024


class MissedBatch(NamedTuple):
    """What a logical rank has at a planned step."""

    step: int
    rank: Rank


class StepVerdicts:
    """`backup_workers` of the job's logical ranks need not count. All steps before `decided` are decided. For those
    before `known_from` it is no longer known which ranks counted."""

    def __init__(self, ranks: int, backup_workers: int) -> None:
        self._ranks = ranks
        self._backup_workers = backup_workers
        self._left_out: dict[int, tuple[Rank, ...]] = {}
        self._present: tuple[int, frozenset[Rank]] = (0, frozenset())
        self._dropped_by: dict[Incarnation, int] = {}
        self.known_from = 0
        self.decided = 0
        self.dropped = 0
        """Contributions with samples that came late, in all."""

    def tell(self, step: int, ranks: Iterable[Rank]) -> None:
        """All partitions have these ranks' contributions to the step. Raises InvalidRequest for a step that no worker
        can have computed yet."""
        if step > self.decided:
            raise InvalidRequest(
                f"contributions to step {step}; step {self.decided} is not decided yet",
                why="a step is computed on what the one before has made",
            )
        told, present = self._present
        if step == self.decided:
            self._present = step, frozenset(ranks) | (present if step == told else frozenset())

    def due(self, step: int, working: Collection[Rank]) -> tuple[Rank, ...] | None:
        """The ranks that are left out if the step is decided now. None if it is decided already, or too few ranks have
        contributed. `working`: the ranks that have samples at the step."""
        told, present = self._present
        if step < self.decided or step != told or len(present) < self._ranks - self._backup_workers:
            return None
        if working and not any(rank in present for rank in working):
            return None
        return tuple([Rank(rank) for rank in range(self._ranks) if rank not in present])

    def decide(self, step: int, left_out: Sequence[Rank]) -> None:
        assert step == self.decided, (step, self.decided)
        self.decided = step + 1
        if left_out:
            self._left_out[step] = tuple(left_out)

    def decided_before(self, step: int) -> None:
        """All steps before that one are decided, and it is not known which ranks counted in them."""
        assert not self.decided
        self.known_from = self.decided = step

    def left_out(self, step: int) -> tuple[Rank, ...]:
        return self._left_out.get(step, ())

    def members(self, step: int) -> tuple[Rank, ...] | None:
        """The ranks that count in a step. None if it is not decided; empty if it is no longer known."""
        if step >= self.decided:
            return None
        if step < self.known_from:
            return ()
        left_out = self.left_out(step)
        return tuple([Rank(rank) for rank in range(self._ranks) if rank not in left_out])

    def forget_before(self, step: int) -> None:
        """No partition goes back before that step any more."""
        if step > self.known_from:
            self.known_from = min(step, self.decided)
            self._left_out = {each: ranks for each, ranks in self._left_out.items() if each >= self.known_from}

    def drop(self, workers: Iterable[tuple[Incarnation, int]]) -> None:
        """The number of each worker's late contributions. 0 for a departed worker."""
        for worker, count in workers:
            self.dropped += count
            if worker:
                self._dropped_by[worker] = self._dropped_by.get(worker, 0) + count

    def dropped_by(self, worker: Incarnation) -> int:
        return self._dropped_by.get(worker, 0)

    def leave(self, worker: Incarnation) -> None:
        self._dropped_by.pop(worker, None)

    # ---- records

    def entries(self, *, before: int | None = None) -> list[Entry]:
        """Records of the verdicts; with `before`, only of those on the steps before it."""
        end = self.decided if before is None else min(before, self.decided)
        firsts = range(self.known_from, end, STEPS_PER_RECORD)
        found = [
            steps_decided(first, [self.left_out(step) for step in range(first, min(first + STEPS_PER_RECORD, end))])
            for first in firsts
        ]
        return found or ([steps_decided(end, [])] if end else [])

    def counters(self) -> list[Entry]:
        if not self.dropped:
            return []
        workers = [list(each) for each in self._dropped_by.items()]
        return [("contributions_dropped_before", {"count": self.dropped, "workers": workers})]

    def restore_counters(self, body: Body) -> None:
        self.dropped = body.number("count", most=SUM_MAX)
        self._dropped_by = dict(_counts_of(body, "workers"))

    def read(self, body: Body) -> tuple[int, list[tuple[Rank, ...]], list[tuple[Incarnation, int]]]:
        """Reads a record of `entries`: the first step, the ranks that are left out in it and in each following step,
        and the workers whose contributions were dropped. Raises DamagedRecord."""
        first = body.number("first", most=limits.SEQUENCE_MAX)
        require(first == self.decided or not self.decided, f"step {first} is decided after step {self.decided - 1}")
        steps = []
        for each in body.items("left_out"):
            numbers = checked_items(each, "who is left out")
            ranks = [Rank(checked_number(rank, "a logical rank", most=self._ranks - 1)) for rank in numbers]
            require(ranks == sorted(set(ranks)) and len(ranks) < self._ranks, f"{ranks} are left out")
            steps.append(tuple(ranks))
        return first, steps, _counts_of(body, "dropped")


@dataclass(slots=True)
class MakeupPlan:
    """The dropped batches of one feed, whose planned steps end before `planned_end`. `end`: the step after its last
    one, if that is known. Each make-up step takes the next dropped batches, as many as there are ranks, in the order in
    which they were dropped. Each begins with another rank, so that a rank that is always late does not get the same
    batch again."""

    ranks: int
    planned_end: int
    end: int | None = None
    _batches: list[MissedBatch] = field(default_factory=list)
    _dropped_at: list[int] = field(default_factory=list)
    _samples: list[int] = field(default_factory=lambda: [0])
    _begins: list[int] = field(default_factory=list)
    _taken: int = 0

    @property
    def reached(self) -> int:
        """The step after the last one that the feed is known to have."""
        return self.planned_end + len(self._begins) if self.end is None else self.end

    def drop(self, step: int, batch: MissedBatch, samples: int) -> None:
        """The batch did not count at that step."""
        self._batches.append(batch)
        self._dropped_at.append(step)
        self._samples.append(self._samples[-1] + samples)

    def reach(self, step: int) -> None:
        """All steps before that one are decided. If it is a make-up step, its batches are now known."""
        while self.end is None and self.planned_end + len(self._begins) <= step:
            if self._taken == len(self._batches):
                self.end = self.planned_end + len(self._begins)
            else:
                self._begins.append(self._taken)
                self._taken = min(self._taken + self.ranks, len(self._batches))

    def batch(self, step: int, rank: Rank) -> MissedBatch | None:
        """The rank's batch at a step that is reached; None if it has none."""
        turn = step - self.planned_end
        if turn < 0:
            return MissedBatch(step, rank)
        if turn >= len(self._begins):
            return None
        end = self._begins[turn + 1] if turn + 1 < len(self._begins) else self._taken
        index = self._begins[turn] + (rank - turn) % self.ranks
        return self._batches[index] if index < end else None

    def lacking(self, step: int) -> int:
        """Samples of planned steps that are not counted before `step`, at which the job is."""
        turn = step - self.planned_end
        begins = [*self._begins[max(turn, 0) : max(turn, 0) + 1], self._taken]
        taken = begins[0] if turn > 0 else 0
        return self._samples[bisect.bisect_left(self._dropped_at, step)] - self._samples[taken]

    def forget(self) -> None:
        """The feed has ended for good."""
        assert self.end is not None
        self._batches, self._dropped_at, self._samples, self._begins, self._taken = [], [], [0], [], 0


def steps_decided(
    first: int, left_out: Sequence[Sequence[Rank]], dropped: Sequence[tuple[Incarnation, int]] = ()
) -> Entry:
    """The record of the verdicts on consecutive steps. `dropped`: the workers whose contributions, with samples, came
    late."""
    return "steps_decided", {
        "first": first,
        "left_out": [list(ranks) for ranks in left_out],
        "dropped": [list(each) for each in dropped],
    }


def _counts_of(body: Body, name: str) -> list[tuple[Incarnation, int]]:
    found = []
    for each in body.items(name):
        worker, count = checked_items(each, "a worker and a count", count=2)
        found.append(
            (Incarnation(checked_number(worker, "a worker")), checked_number(count, "a count", least=1, most=SUM_MAX))
        )
    return found
