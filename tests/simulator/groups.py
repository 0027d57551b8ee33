"""Replica groups under faults (docs/internals/ledger.md, rules D1 to D4 and D6 to D8): the coordinator's book as it is
shipped, with workers, collectives and servers reduced to what the rules speak of.

A replica is the list of steps that it has taken, each with its group. A collective has all contributions or
none; each member takes its result by itself, later, or fails if another member is gone by then. With tables each member
contributes, then pushes the rows of its ranks to each partition, and takes the result when all partitions have all
rows; and servers are lost, so that all partitions go back to a checkpoint. In a pipeline each member has a stage of one
replica, so only members of other pipelines can give it to another. With tables it takes the result first, which says
whether the step counts, and then pushes its rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shardyard.domain.ids import Incarnation
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_coordinator.work import replica_book
from shardyard_coordinator.work.replica_book import ReplicaBook

EVENTS = 400
MEMBERS_MAX = 4
STAGES = 2
PARTITIONS = 3
PUBLISH_SHARE = 0.5

History = tuple[int, ...]
"""The generation of the group that took each step."""


class Violation(AssertionError):
    pass


@dataclass
class Worker:
    number: Incarnation
    history: History | None = None
    group: ReplicaGroup | None = None
    left: int = 0
    kept: History | None = None
    """In a pipeline: its steps with the one to which it has contributed, and whose result it has not got."""
    is_frozen: bool = False
    taken: int = 0
    """Collectives of its group whose result it has."""
    meets: int = 0
    """How often it has met the others since it began to publish. 0: it does not publish."""

    @property
    def place(self) -> int:
        assert self.group is not None
        return self.group.members.index(self.number)


@dataclass
class Collective:
    """`joined`: members that have contributed. `leaves`: the members form the next group afterwards, as one of them has
    said in it."""

    what: tuple[Any, ...]
    joined: set[Incarnation] = field(default_factory=set)
    leaves: bool = False


class Yard:
    """`rules`: changed by a mutation."""

    length: ClassVar[int] = EVENTS
    """Of a run, in events."""
    done_counts: ClassVar[bool] = True
    """Whether a member that is done has published its step for certain."""

    def __init__(self, seed: int, *, meets_before: bool = True, later_group_counts: bool = True) -> None:
        self.rng = random.Random(seed)
        self.book = self._new_book()
        self.workers: dict[Incarnation, Worker] = {}
        self.zombies: dict[Incarnation, Worker] = {}
        """Workers that were declared dead and run."""
        self.leases: set[Incarnation] = set()
        """Workers that have died, and are not declared dead yet."""
        self.collectives: dict[int, list[Collective]] = {}
        """Those of each group, in their order."""
        self.partitions: list[tuple[History, int]] = [((), 0)] * PARTITIONS
        self.checkpoint: History = ()
        self.now = 0
        self.numbers = 0
        self.steps_taken = 0
        self.is_void = False
        """Whether no replica counts after the servers have gone back."""
        self._meets_before = meets_before
        self._later_group_counts = later_group_counts

    def _new_book(self) -> ReplicaBook:
        return ReplicaBook(members_max=MEMBERS_MAX, workers_expected=2, grace_ms=5)

    @property
    def living(self) -> list[Incarnation]:
        """As the coordinator sees it: one that has died counts until its lease is over."""
        return [*self.workers, *self.leases]

    def run(self) -> Yard:
        events = self.events()
        for _ in range(self.length):
            self.now += 1
            self.rng.choices(list(events), list(events.values()))[0]()
        return self

    def events(self) -> dict[Callable[[], None], float]:
        """What happens, and how often."""
        return {
            self.come: 2,
            self.die: 1,
            self.expire: 2,
            self.leave: 0.5,
            self.freeze: 0.5,
            self.wake: 1,
            self.restart_coordinator: 0.3,
            self.act: 30,
        }

    # ---- faults

    def come(self) -> None:
        if len(self.workers) < MEMBERS_MAX + 1:
            self.numbers += 1
            number = Incarnation(self.numbers)
            self.workers[number] = Worker(number)

    def die(self) -> None:
        if self.workers:
            number = self.rng.choice(list(self.workers))
            del self.workers[number]
            self.leases.add(number)

    def expire(self) -> None:
        """The coordinator declares a dead worker dead."""
        if self.leases:
            number = self.rng.choice(sorted(self.leases))
            self.leases.remove(number)
            self.book.lose(number, self.living, is_done=False)

    def _bury(self, number: Incarnation) -> Worker:
        worker = self.workers.pop(number)
        self.book.lose(number, self.living, is_done=False)
        return worker

    def leave(self) -> None:
        """A worker is done: it publishes its step, and says goodbye."""
        members = [each for each in self.workers.values() if each.group == self.book.group and not each.is_frozen]
        if not members:
            return
        worker = self.rng.choice(members)
        self._publish_alone(worker)
        del self.workers[worker.number]
        self.book.lose(worker.number, self.living, is_done=self.done_counts)

    def _publish_alone(self, worker: Worker) -> None:
        for partition in range(PARTITIONS):
            self._put(worker, partition)
        self._reported(worker)

    def freeze(self) -> None:
        if self.workers:
            self.workers[self.rng.choice(list(self.workers))].is_frozen = True

    def wake(self) -> None:
        """A frozen worker runs again; it may have been declared dead."""
        frozen = [each for each in self.workers.values() if each.is_frozen]
        if not frozen:
            return
        worker = self.rng.choice(frozen)
        worker.is_frozen = False
        if self.rng.random() < 0.6:
            self.zombies[worker.number] = self._bury(worker.number)

    def restart_coordinator(self) -> None:
        """It knows what it has recorded, and not who asks."""
        records = self.book.entries()
        self.book = self._new_book()
        for kind, body in records:
            self.book.restore(kind, replica_book.Body(body))

    # ---- a worker's next move

    def act(self) -> None:
        running = [each for each in (*self.workers.values(), *self.zombies.values()) if not each.is_frozen]
        if not running:
            return
        worker = self.rng.choice(running)
        if worker.group is None:
            self.ask(worker)
        elif worker.meets:
            self.publish(worker)
        else:
            self.step(worker)

    def ask(self, worker: Worker) -> None:
        if worker.number in self.zombies:
            del self.zombies[worker.number]  # the coordinator says that it is no member
            return
        step = None if worker.history is None else len(worker.history)
        self.book.ask(worker.number, worker.left, step, self.now, "box")
        if self.book.has_lost_all(self.living):
            self.go_back()
        formed = self.book.form(self.living, self.now)
        if formed is not None:
            self._check_formed(formed)
        group = self.book.group_of(worker.number)
        if group is not None:
            self._join(worker, group)

    def go_back(self) -> None:
        """All partitions go back to the checkpoint."""
        self.partitions = [(self.checkpoint, 0)] * PARTITIONS
        self.book.went_back(self.living, len(self.checkpoint), with_rows=self.is_void)

    def _check_formed(self, group: ReplicaGroup) -> None:
        others = [each for each in self.workers.values() if each.group is not None and each.number not in group.members]
        if any(each.group is not None and each.group.generation < group.generation for each in others):
            raise Violation(f"group {group.generation} is formed while {[each.number for each in others]} train")
        self.sources = {number: self.workers[number].history for number in group.members if number in self.workers}

    def _join(self, worker: Worker, group: ReplicaGroup) -> None:
        """Its replica stands at the group's step now."""
        if worker.left <= group.void_until:
            worker.history = None
        if group.donor is None:
            histories = {history for history, _ in self.partitions}
            if len(histories) > 1:
                raise Violation(f"group {group.generation} begins with partitions of several steps")
            worker.history = histories.pop()
            if group.step not in (None, len(worker.history)):
                raise Violation(f"servers of step {len(worker.history)}, and group {group.generation} of {group.step}")
        else:
            if worker.history is None or len(worker.history) != group.step:
                given = self._taken_from(worker, group)
                if given is None:  # the donor has died: there is nobody to get it from
                    worker.left = group.generation
                    return
                worker.history = given
            if len(worker.history) != group.step:
                raise Violation(f"a replica of step {len(worker.history)} in a group of step {group.step}")
        worker.group, worker.left, worker.meets, worker.taken = group, group.generation, 0, 0
        same = {each.history for each in self.workers.values() if each.group == group and each.history is not None}
        if len({history[: len(worker.history)] for history in same}) > 1:
            raise Violation(f"members of group {group.generation} have different replicas: {same}")

    def _taken_from(self, worker: Worker, group: ReplicaGroup) -> History | None:
        """The replica that a worker of another step takes."""
        assert group.donor is not None
        return self.sources.get(group.members[group.donor])

    # ---- collectives

    def _collective(self, worker: Worker, what: tuple[Any, ...]) -> Collective | bool:
        """Takes part in the next one of its group. Returns it if its result is there; False: the group has lost a
        member; True: it waits."""
        assert worker.group is not None
        found = self._contribution(worker, what)
        complete = found.joined >= set(worker.group.members)
        if self._has_lost_a_member(worker.group) and (not complete or self.rng.random() < 0.5):
            return False
        if complete:
            worker.taken += 1
        return found if complete else True

    def _contribution(self, worker: Worker, what: tuple[Any, ...]) -> Collective:
        """Contributes to the next one of its group, which is returned."""
        assert worker.group is not None
        generation = worker.group.generation
        all_ = self.collectives.setdefault(generation, [])
        if worker.taken == len(all_):
            all_.append(Collective(what))
        found = all_[worker.taken]
        if found.what != what:
            raise Violation(f"members of group {generation} take part in {found.what} and in {what}")
        if worker.number not in found.joined:
            found.joined.add(worker.number)
            found.leaves = found.leaves or self._is_to_change(worker)
        return found

    def _is_to_change(self, worker: Worker) -> bool:
        """Whether the worker says that the next group is to be formed."""
        return self.book.has_room(self.living)

    def _has_lost_a_member(self, group: ReplicaGroup) -> bool:
        """Whether one has ended, or has left the group."""
        for each in group.members:
            worker = self.workers.get(each) or self.zombies.get(each)
            if worker is None or worker.group != group:
                return True
        return False

    def _leave_group(self, worker: Worker) -> None:
        worker.group, worker.meets = None, 0

    def step(self, worker: Worker) -> None:
        assert worker.group is not None
        assert worker.history is not None
        at = len(worker.history)
        done = self._collective(worker, ("step", at))
        if done is False:
            self._leave_group(worker)
        elif isinstance(done, Collective):
            self._take(worker, done)

    def _take(self, worker: Worker, sums: Collective) -> None:
        assert worker.group is not None
        assert worker.history is not None
        at = len(worker.history)
        worker.history = (*worker.history, worker.group.generation)
        self.steps_taken += 1
        if random.Random(f"{worker.group.generation} {at}").random() < PUBLISH_SHARE:  # the same for all members
            worker.meets = 1
        elif sums.leaves:
            self._leave_group(worker)

    def publish(self, worker: Worker) -> None:
        assert worker.group is not None
        assert worker.history is not None
        if worker.meets == 1 and not self._meets_before:
            worker.meets = 2
        if worker.meets == 2:
            self._give(worker)
            worker.meets = 3
            return
        done = self._collective(worker, ("meet", len(worker.history), worker.meets))
        if done is False:
            self._leave_group(worker)
        elif isinstance(done, Collective) and worker.meets == 1:
            worker.meets = 2
        elif isinstance(done, Collective):
            if worker.place == 0 and worker.number in self.workers and self.book.group == worker.group:
                self._reported(worker)
            worker.meets = 0

    def _give(self, worker: Worker) -> None:
        """Publishes its share. Servers refuse one that was declared dead, which ends it."""
        assert worker.group is not None
        assert worker.history is not None
        if worker.number not in self.workers:
            del self.zombies[worker.number]
            return
        for partition in range(worker.place, PARTITIONS, len(worker.group.members)):
            self._put(worker, partition)

    def _put(self, worker: Worker, partition: int) -> None:
        assert worker.group is not None
        assert worker.history is not None
        taken = (len(worker.history), worker.group.generation)
        history, group = self.partitions[partition]
        newer = taken > (len(history), group) if self._later_group_counts else taken[0] > len(history)
        if newer:
            self.partitions[partition] = worker.history, worker.group.generation

    def _reported(self, worker: Worker) -> None:
        """All partitions have its state, or all that of a later step: a worker that has left may have published a step
        that no other member has."""
        assert worker.history is not None
        step = len(worker.history)
        self.book.publish(step, self.now)
        histories = {history for history, _ in self.partitions}
        later = len(histories) == 1 and all(len(history) > step for history in histories)
        if histories != {worker.history} and not later:
            raise Violation(f"step {step} is published, and partitions have {self.partitions}")
        self.checkpoint = histories.pop()


class YardOfStages(Yard):
    """A pipeline, or several side by side: a member takes part in a step when its gradients are there, and keeps them
    until it has the result or the next group."""

    pipelines: ClassVar[int] = 1

    def __init__(self, seed: int, *, keeps_gradients: bool = True, was_there: bool = True) -> None:
        super().__init__(seed)
        self._keeps_gradients = keeps_gradients
        self._was_there = was_there
        """Whether only members of the group before have a replica."""
        self.stages: dict[Incarnation, int] = {}
        """Of which stage each worker has the variables."""

    def _new_book(self) -> ReplicaBook:
        count = STAGES * self.pipelines
        return ReplicaBook(members_max=count, workers_expected=count, grace_ms=5, replica_size=STAGES)

    def step(self, worker: Worker) -> None:
        assert worker.group is not None
        assert worker.history is not None
        worker.kept = (*worker.history, worker.group.generation)
        super().step(worker)

    def _check_formed(self, group: ReplicaGroup) -> None:
        super()._check_formed(group)
        self.sources = {number: self._known(self.workers[number], group) for number in self.sources}
        for number, history in self.sources.items():
            kept = self.workers[number].kept
            if history is not None and kept is not None and len(kept) == group.step:
                self.sources[number] = kept
        for stage in range(STAGES if group.step is not None else 0):
            numbers = group.members[stage::STAGES]
            lost = [number for number in numbers if number not in self.sources]
            if not lost and not any(len(self.sources[number] or ()) == group.step for number in numbers):
                raise Violation(f"no member has stage {stage} at step {group.step} of group {group.generation}")

    def _known(self, worker: Worker, group: ReplicaGroup) -> History | None:
        """What the worker has of its stage in this group."""
        was_there = worker.left == group.generation - 1 or not self._was_there
        stage = group.members.index(worker.number) % STAGES
        return worker.history if was_there and self.stages.get(worker.number) == stage else None

    def _taken_from(self, worker: Worker, group: ReplicaGroup) -> History | None:
        """It takes the step with the gradients that it has kept; or the stage of another member, which has done so."""
        if worker.history is not None:
            if worker.kept is None or len(worker.kept) != group.step:
                raise Violation(f"a stage cannot continue from step {group.step} of group {group.generation}")
            return worker.kept
        living, stage = {*self.workers, *self.zombies}, group.members.index(worker.number) % STAGES
        given = [self.sources.get(each) for each in group.members[stage::STAGES] if each in living]
        return next((each for each in given if each is not None and len(each) == group.step), None)

    def _join(self, worker: Worker, group: ReplicaGroup) -> None:
        if group.donor is not None:
            worker.history = self._known(worker, group)
        super()._join(worker, group)
        if worker.group is not None:
            self.stages[worker.number] = group.members.index(worker.number) % STAGES
            worker.kept = None

    def _leave_group(self, worker: Worker) -> None:
        super()._leave_group(worker)
        if not self._keeps_gradients:
            worker.kept = None


class YardOfPipelines(YardOfStages):
    """Two of them."""

    pipelines = 2


class YardOfShards(YardOfStages):
    """A sharded job: all members have one replica together, cut by their places. Other members begin with what was
    published. One that is to leave says so in a step."""

    def __init__(self, seed: int, *, keeps_gradients: bool = True, publishes_to_change: bool = True) -> None:
        super().__init__(seed, keeps_gradients=keeps_gradients)
        self._publishes_to_change = publishes_to_change
        self.cuts: dict[Incarnation, tuple[int, int]] = {}
        """The place and the size of the group of which each worker has a shard."""
        self.leaving: set[Incarnation] = set()
        self.ending: set[Incarnation] = set()
        """Workers whose group ends when it has published."""

    def _new_book(self) -> ReplicaBook:
        return ReplicaBook(members_max=MEMBERS_MAX, workers_expected=2, grace_ms=5, replica_size=None)

    def _check_formed(self, group: ReplicaGroup) -> None:
        Yard._check_formed(self, group)

    def _known(self, worker: Worker, group: ReplicaGroup) -> History | None:
        return worker.history

    def leave(self) -> None:
        members = [each.number for each in self.workers.values() if each.group == self.book.group]
        if members:
            self.leaving.add(self.rng.choice(members))

    def _is_to_change(self, worker: Worker) -> bool:
        return super()._is_to_change(worker) or worker.number in self.leaving

    def _take(self, worker: Worker, sums: Collective) -> None:
        group = worker.group
        super()._take(worker, sums)
        if sums.leaves and self._publishes_to_change:
            self.ending.add(worker.number)
            worker.group, worker.meets = group, 1

    def publish(self, worker: Worker) -> None:
        super().publish(worker)
        if not worker.meets and worker.number in self.ending:
            self._leave_group(worker)

    def _leave_group(self, worker: Worker) -> None:
        super()._leave_group(worker)
        self.ending.discard(worker.number)
        if worker.number in self.leaving & {*self.workers}:
            self._bury(worker.number)

    def _join(self, worker: Worker, group: ReplicaGroup) -> None:
        cut = group.members.index(worker.number), len(group.members)
        if group.donor is not None and self.cuts.get(worker.number) != cut:
            raise Violation(f"worker {worker.number} has no shard {cut} of step {group.step}")
        super()._join(worker, group)
        self.cuts[worker.number] = cut


class Rows:
    """The rows of one partition: the version, and each rank's next step and token."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.next = [version] * MEMBERS_MAX
        self.tokens = [0] * MEMBERS_MAX

    def push(self, rank: int, step: int, token: int) -> bool:
        """Returns False if it is refused."""
        if token < self.tokens[rank]:
            return False
        if step > self.version:
            raise Violation(f"rows of step {step} for a partition of version {self.version}")
        self.next[rank] = max(self.next[rank], step + 1)
        self.version = min(self.next)
        return True


class YardWithRows(Yard):
    """`map`: raised when servers go back; requests under an earlier one are refused."""

    done_counts = False  # its rows may be of another step

    def __init__(self, seed: int, *, awaits_rows: bool = True, is_void: bool = True, **more: bool) -> None:
        super().__init__(seed, **more)
        self.rows = [Rows(0) for _ in range(PARTITIONS)]
        self.map = 0
        self.maps: dict[Incarnation, int] = {}
        """The map that each worker follows."""
        self.pushed: dict[Incarnation, set[tuple[int, int]]] = {}
        """What each worker has pushed of its step: partitions, ranks."""
        self.complete: set[Incarnation] = set()
        """The workers that know that all partitions have all rows of their step."""
        self.is_void = is_void
        self._awaits_rows = awaits_rows

    def events(self) -> dict[Callable[[], None], float]:
        return {**super().events(), self.lose_server: 0.2, self.act: 120}

    def lose_server(self) -> None:
        self.go_back()

    def go_back(self) -> None:
        super().go_back()
        self.rows = [Rows(len(self.checkpoint)) for _ in range(PARTITIONS)]
        self.map += 1

    def _join(self, worker: Worker, group: ReplicaGroup) -> None:
        super()._join(worker, group)
        if worker.group is None:
            return
        self.maps[worker.number], self.pushed[worker.number] = self.map, set()
        self.complete.discard(worker.number)
        assert worker.history is not None
        for rows in self.rows:
            if rows.version - len(worker.history) not in (0, 1):
                raise Violation(f"a replica of step {len(worker.history)} with rows of version {rows.version}")
            for rank in group.ranks_at(worker.place, MEMBERS_MAX):
                rows.tokens[rank] = max(rows.tokens[rank], group.generation)

    def _publish_alone(self, worker: Worker) -> None:
        """Partitions with rows of another step do not take it."""
        assert worker.history is not None
        if self.maps[worker.number] == self.map and {rows.version for rows in self.rows} == {len(worker.history)}:
            super()._publish_alone(worker)

    def _is_refused(self, worker: Worker) -> bool:
        """Whether the worker's map is an earlier one. Then it leaves its group, sooner or later."""
        if self.maps[worker.number] == self.map:
            return False
        if self.rng.random() < 0.5:
            self._leave_group(worker)
        return True

    def publish(self, worker: Worker) -> None:
        if not self._is_refused(worker):
            super().publish(worker)

    def step(self, worker: Worker) -> None:
        assert worker.group is not None
        assert worker.history is not None
        at, is_refused = len(worker.history), self._is_refused(worker)
        if worker.group is None:
            return
        self._contribution(worker, ("step", at))
        if self._has_all_rows(worker, is_refused=is_refused):
            super().step(worker)
            self._check_rows(worker, at, is_refused=is_refused)

    def _has_all_rows(self, worker: Worker, *, is_refused: bool) -> bool:
        """Pushes rows of a rank to a partition; or looks whether all partitions have all rows. Returns whether this is
        known."""
        assert worker.group is not None
        assert worker.history is not None
        at, pushed = len(worker.history), self.pushed[worker.number]
        ranks = worker.group.ranks_at(worker.place, MEMBERS_MAX)
        left = [(place, rank) for place in range(PARTITIONS) for rank in ranks if (place, rank) not in pushed]
        if left:
            place, rank = self.rng.choice(left)
            if is_refused or not self.rows[place].push(rank, at, worker.group.generation):
                self._leave_group(worker)
            pushed.add((place, rank))
            return False
        if worker.number in self.complete or not self._awaits_rows:
            return True
        if is_refused or self._has_lost_a_member(worker.group):
            self._leave_group(worker)
        elif all(rows.version > at for rows in self.rows):
            self.complete.add(worker.number)
        return False

    def _check_rows(self, worker: Worker, at: int, *, is_refused: bool) -> None:
        """Of step `at`, if the worker has taken it."""
        assert worker.history is not None
        if len(worker.history) > at:
            self.pushed[worker.number].clear()
            self.complete.discard(worker.number)
            if not is_refused and any(rows.version <= at for rows in self.rows):
                raise Violation(f"step {at} is taken, and rows are of {[rows.version for rows in self.rows]}")

    def _reported(self, worker: Worker) -> None:
        super()._reported(worker)
        if {rows.version for rows in self.rows} != {len(self.checkpoint)}:
            raise Violation(f"a checkpoint of step {len(self.checkpoint)} with {[each.version for each in self.rows]}")


class YardOfStagesWithRows(YardWithRows, YardOfStages):
    """A member pushes rows when it has the sum, which says whether they count. It keeps its gradients until all
    partitions have all rows."""

    length = 3 * EVENTS  # a step takes more of them

    def __init__(self, seed: int, **given: bool) -> None:
        super().__init__(seed, **given)
        self.sums: dict[Incarnation, Collective] = {}
        """Those that members have of the step at hand."""

    def step(self, worker: Worker) -> None:
        assert worker.history is not None
        at, is_refused = len(worker.history), self._is_refused(worker)
        if worker.group is None:
            return
        if worker.number not in self.sums:
            YardOfStages.step(self, worker)
        elif self._has_all_rows(worker, is_refused=is_refused):
            super()._take(worker, self.sums.pop(worker.number))
            self._check_rows(worker, at, is_refused=is_refused)

    def _take(self, worker: Worker, sums: Collective) -> None:
        self.sums[worker.number] = sums

    def _leave_group(self, worker: Worker) -> None:
        super()._leave_group(worker)
        self.sums.pop(worker.number, None)

    def _join(self, worker: Worker, group: ReplicaGroup) -> None:
        super()._join(worker, group)
        history = worker.history or ()
        if worker.group is not None and group.step is None and any(rows.version > len(history) for rows in self.rows):
            raise Violation(f"group {group.generation} begins with rows of a later step than the servers' state")


class YardOfPipelinesWithRows(YardOfStagesWithRows, YardOfPipelines):
    pass


class YardOfShardsWithRows(YardOfStagesWithRows, YardOfShards):
    pass
