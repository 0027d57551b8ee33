"""Pipelines that push to servers, under faults (docs/internals/ledger.md, rule D10): the coordinator's book as it is
shipped, with workers, collectives and partitions reduced to what the rule speaks of.

A worker's gradients of a rank's work are finite or not, in its own stage; the workers of a pipeline tell each other.
What a partition has recorded of a rank's step is whether it counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shardyard.domain.ids import Incarnation
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_coordinator.work.replica_book import ReplicaBook
from tests.simulator.groups import Violation, Worker, Yard

STAGES = 2
PIPELINES = 2
PARTITIONS_OF_A_STAGE = 2
ODD_SHARE = 0.1


class Partition:
    """`version`: of its values; `next`, `tokens`: each rank's next step, and the newest group that has opened it;
    `counted`: what was recorded of ranks and steps."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.next = [version] * PIPELINES
        self.tokens = [0] * PIPELINES
        self.counted: dict[tuple[int, int], bool] = {}

    def open(self, rank: int, token: int) -> int:
        """Returns the rank's next step."""
        self.tokens[rank] = max(self.tokens[rank], token)
        return self.next[rank]

    def push(self, rank: int, step: int, token: int, *, counts: bool) -> bool:
        """Returns False if it is refused."""
        if token < self.tokens[rank]:
            return False
        if step > self.version:
            raise Violation(f"a gradient of step {step} for a partition of version {self.version}")
        if step < self.next[rank]:
            return True  # a duplicate
        self.counted[rank, step] = counts
        self.next[rank] = step + 1
        self.version = min(self.next)
        return True


@dataclass
class Said:
    """What the members of a pipeline tell each other once. `what`: what they say it of."""

    what: tuple[Any, ...]
    by: dict[Incarnation, Any] = field(default_factory=dict)


@dataclass
class Doing:
    """A member's way through its group. `map`: that which it follows; `heard`: how often it has heard the others;
    `next`: of its ranks, once they have agreed; `counts`: whether the work at hand does; `left`: partitions to which
    it has not pushed that."""

    map: int
    heard: int = 0
    next: dict[int, int] | None = None
    counts: bool = False
    left: list[Partition] = field(default_factory=list)


class YardOfPushes(Yard):
    """Its replicas have no state. `agree`: members begin at the lowest step over all of their partitions; `tell`: what
    is not finite in one stage does not count in any; `keep`: partitions keep the version before the newest; `opens`:
    they refuse pushes of former groups."""

    length: ClassVar[int] = 2_000

    def __init__(
        self, seed: int, *, agree: bool = True, tell: bool = True, keep: bool = True, opens: bool = True
    ) -> None:
        super().__init__(seed)
        self.stages = [[Partition(0) for _ in range(PARTITIONS_OF_A_STAGE)] for _ in range(STAGES)]
        self.saved = 0
        """The step of the newest checkpoint."""
        self.map = 0
        self.doing: dict[Incarnation, Doing] = {}
        self.said: dict[tuple[int, int], list[Said]] = {}
        """By the group and the pipeline."""
        self._agree, self._tell, self._keep, self._opens = agree, tell, keep, opens

    def _new_book(self) -> ReplicaBook:
        count = STAGES * PIPELINES
        return ReplicaBook(
            members_max=count, workers_expected=count, grace_ms=5, replica_size=STAGES, has_replicas=False
        )

    def events(self) -> dict[Callable[[], None], float]:
        return {**super().events(), self.lose_server: 0.1, self.save: 0.3, self.act: 120}

    # ---- faults

    def go_back(self) -> None:
        raise Violation("the servers go back, although they have all that counts")

    def lose_server(self) -> None:
        """All partitions go back to the newest checkpoint. Requests under the map before are refused."""
        self.stages = [[Partition(self.saved) for _ in each] for each in self.stages]
        self.map += 1

    def save(self) -> None:
        """A checkpoint of a step that all partitions have taken, and none more."""
        versions = {each.version for each in self._all}
        if len(versions) == 1:
            (self.saved,) = versions

    def leave(self) -> None:
        if self.workers:
            number = self.rng.choice(list(self.workers))
            del self.workers[number]
            self.book.lose(number, self.living, is_done=True)

    @property
    def _all(self) -> Iterable[Partition]:
        return (each for stage in self.stages for each in stage)

    # ---- a worker

    def _join(self, worker: Worker, group: ReplicaGroup) -> None:
        if len(group.members) % STAGES:
            raise Violation(f"group {group.generation} of {len(group.members)} members")
        worker.group, worker.left = group, group.generation
        self.doing[worker.number] = Doing(self.map)

    def step(self, worker: Worker) -> None:
        doing = self.doing[worker.number]
        if doing.map != self.map:  # its requests are refused, and it leaves its group sooner or later
            if self.rng.random() < 0.5:
                self._leave_group(worker)
            return
        if doing.next is None:
            self._begin(worker, doing)
        elif doing.left:
            self._push(worker, doing, doing.next)
        else:
            self._compute(worker, doing, doing.next)

    def _begin(self, worker: Worker, doing: Doing) -> None:
        """Agrees with its pipeline on the next step of each of its ranks."""
        assert worker.group is not None
        token = worker.group.generation if self._opens else 0
        own = {
            rank: min(each.open(rank, token) for each in self._own(worker))
            for rank in worker.group.ranks_at(worker.place, PIPELINES, STAGES)
        }
        heard = self._hear(worker, doing, ("next",), own)
        if heard is not None:
            doing.next = {rank: min(each[rank] for each in heard) if self._agree else own[rank] for rank in own}

    def _compute(self, worker: Worker, doing: Doing, nexts: dict[int, int]) -> None:
        """The work of its lowest rank, with its pipeline; or waits for a version."""
        assert worker.group is not None
        step = min(nexts.values())
        rank = min(rank for rank, each in nexts.items() if each == step)
        for each in self._own(worker):
            if each.version < step:
                if self._has_lost_a_member(worker.group) and self.rng.random() < 0.5:
                    self._leave_group(worker)
                return
            if each.version > step + (1 if self._keep else 0):
                raise Violation(f"version {step} of a partition of version {each.version}")
        stage = worker.place % STAGES
        is_finite = random.Random(f"{stage} {rank} {step}").random() > ODD_SHARE
        heard = self._hear(worker, doing, (rank, step), is_finite)
        if heard is not None:
            doing.counts = all(heard) if self._tell else is_finite
            doing.left = list(self._own(worker))

    def _push(self, worker: Worker, doing: Doing, nexts: dict[int, int]) -> None:
        step = min(nexts.values())
        rank = min(rank for rank, each in nexts.items() if each == step)
        assert worker.group is not None
        partition = doing.left.pop(self.rng.randrange(len(doing.left)))
        if not partition.push(rank, step, worker.group.generation, counts=doing.counts):
            self._leave_group(worker)
            return
        if not doing.left:
            nexts[rank] += 1
        self._check(rank, step)

    def _check(self, rank: int, step: int) -> None:
        found = {each.counted[rank, step] for each in self._all if (rank, step) in each.counted}
        if len(found) > 1:
            raise Violation(f"the work of rank {rank} in step {step} counts in some partitions only")
        self.steps_taken = max(self.steps_taken, min(each.version for each in self._all))

    def _own(self, worker: Worker) -> list[Partition]:
        return self.stages[worker.place % STAGES]

    def _hear(self, worker: Worker, doing: Doing, what: tuple[Any, ...], own: Any) -> list[Any] | None:
        """Tells its pipeline something, and returns what all have told; None: it waits, or has left its group."""
        group = worker.group
        assert group is not None
        pipeline = worker.place // STAGES
        all_ = self.said.setdefault((group.generation, pipeline), [])
        if doing.heard == len(all_):
            all_.append(Said(what))
        said = all_[doing.heard]
        if said.what != what:
            raise Violation(f"the members of a pipeline are at {said.what} and at {what}")
        said.by.setdefault(worker.number, own)
        is_complete = len(said.by) == STAGES
        if self._has_lost_a_member(group) and (not is_complete or self.rng.random() < 0.5):
            self._leave_group(worker)
            return None
        if not is_complete:
            return None
        doing.heard += 1
        return list(said.by.values())
