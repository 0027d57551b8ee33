"""Which workers of a mirrored job train together, and from which step (docs/internals/ledger.md, rules D1 to D6).

A worker leaves its group when the group lacks a member, or when another worker comes, and asks for the next one. Then
it computes nothing until that is formed. A group is formed when every living member of the one before has asked (D1):
so no two groups train at a time, and the newest step that any survivor has is known. The next group continues from that
step (D2). If no replica is left, the servers go back to a checkpoint, from which the next group continues (D3). If the
servers go back in a job with tables, no replica counts any more, since their rows are not of its step (D6).

In a pipeline each member has a stage of the model, by its place: so many neighbours have one replica together, and a
group has one or several such replicas side by side. In the next group members keep their stage where they can; one that
gets another stage, or comes, takes it from a member that has it. If all members with a stage are lost, no replica is
left: the other stages go back with it (D7). In a sharded job all members may have one replica together, however many
they are (D8). Other members cut it in another way, so they begin with what the servers have: after the members have
published their newest step, or after the servers have gone back.

Owns: the newest group, and who asks for the next one. Invariants: generations only grow; members are living workers; a
group has at most as many members as can compute the job's logical ranks. Pure. Must not know: what a replica is, how
workers reach each other, the clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Incarnation
from shardyard.domain.limits import SEQUENCE_MAX
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_coordinator.records import Body, Entry

CHECKPOINT_BEGINS_MS: Final = 2_000
"""How long members of a job with tables wait for the checkpoint that they have published for."""


class ReplicaBook:
    """`members_max`: how many workers compute the logical ranks. `replica_size`: how many members have a replica
    together; None: all of a group, of any size. `has_replicas`: False if the variables are on the servers, and members
    compute gradients together only (D10)."""

    def __init__(
        self,
        *,
        members_max: int,
        workers_expected: int,
        grace_ms: int,
        replica_size: int | None = 1,
        has_replicas: bool = True,
    ) -> None:
        self._replica_size = replica_size
        self.has_replicas = has_replicas
        self._members_max = self._in_replicas(members_max)
        self._workers_expected = min(workers_expected, self._members_max)
        self._grace_ms = grace_ms
        self._asking: dict[Incarnation, int | None] = {}
        """The step of the replica of each worker that waits for the next group; None: it has none."""
        self._hosts: dict[Incarnation, str] = {}
        """Their machines."""
        self._asked_since_ms: int | None = None
        self.group = ReplicaGroup(0, ())
        """The newest group; without members before the first."""
        self._has_trained = False
        """Whether a group may have taken a step since the servers had one state of all partitions for certain."""
        self._had_trained = False
        """The same before the newest group was formed."""
        self.published = 0
        """The newest step whose state all servers have."""
        self._is_fresh = True
        self._asked_for_ms: int | None = None
        """When members have published the newest state that they were asked for."""
        self.is_to_publish = False
        """Whether members are to give the servers their state."""

    def ask(self, worker: Incarnation, left: int, step: int | None, now_ms: int, host: str) -> None:
        """A living worker on `host` has left group `left` (0: none) and waits for the next one. `step`: that of its
        replica; None: it has none. Raises InvalidRequest for a group that was not formed."""
        if left <= self.group.void_until:
            step = None
        if left > self.group.generation:
            raise InvalidRequest(f"worker {worker} leaves replica group {left}; the newest is {self.group.generation}")
        if self.group.is_void or left == self.group.generation or worker not in self.group.members:
            if step is None and worker in self.group.members:
                self._has_trained = self._had_trained  # without this member the group has taken no step
            if self._asked_since_ms is None:
                self._asked_since_ms = now_ms
            self._asking[worker], self._hosts[worker] = step, host

    def lose(self, worker: Incarnation, others: Collection[Incarnation], *, is_done: bool) -> None:
        """A worker is no living worker of the job any more, `others` are. `is_done`: its script has ended well, and the
        servers have its replica. If it was the last one, they have one state for certain; of a pipeline, its stage."""
        self._asking.pop(worker, None)
        self._hosts.pop(worker, None)
        members = self.group.members
        if is_done and self._replica_size == 1 and worker in members and not any(each in others for each in members):
            self._has_trained = self._had_trained = False

    def group_of(self, worker: Incarnation) -> ReplicaGroup | None:
        """The newest group, if the worker is in it and has not asked for the next one."""
        return self.group if worker in self.group.members and worker not in self._asking else None

    def lacks_a_member(self, living: Collection[Incarnation]) -> bool:
        """Whether a member of the newest group is gone or has left it, so that the others wait in vain."""
        return any(self.group.is_void or each not in living or each in self._asking for each in self.group.members)

    def has_room(self, living: Collection[Incarnation]) -> bool:
        """Whether other workers wait, enough for one more replica, and the newest group has fewer members than it
        may."""
        members = self.group.members
        waiting = sum(each in living and each not in members for each in self._asking)
        room = self._members_max - len(members)
        return bool(members) and self._in_replicas(min(waiting, room)) > 0

    def has_lost_all(self, living: Collection[Incarnation]) -> bool:
        """Whether no replica is left, and the servers' state may be one of several steps. The stages that are left of a
        pipeline have left their group: until then they may still publish."""
        if not self.has_replicas:
            return False
        if any(each in living and each not in self._asking for each in self.group.members):
            return False
        return self._has_trained and not self._has_replica(living) and not self._have_servers_newest()

    def begin_after(self, generation: int, step: int) -> None:
        """The servers begin with the state of that step. No partition knows a token above that generation."""
        self.group, self.published = ReplicaGroup(generation, ()), step

    def went_back(self, living: Collection[Incarnation], step: int, *, with_rows: bool) -> None:
        """All partitions have the state of a checkpoint of that step. `with_rows`: of tables too."""
        self.published, self._is_fresh = step, False
        if with_rows:
            self.group = replace(self.group, void_until=self.group.generation)
            self._asking = dict.fromkeys(self._asking)
        if not self._has_replica(living):
            self._has_trained = self._had_trained = False

    def _has_replica(self, living: Collection[Incarnation]) -> bool:
        """Whether living members of the newest group have a replica, of all stages. One that has asked says so itself:
        it may have lost the group before it got one."""
        size = self._replica_size or len(self.group.members)
        found = {
            place % size
            for place, each in enumerate(self.group.members)
            if each in living and (each not in self._asking or self._asking[each] is not None)
        }
        return not self.group.is_void and len(found) == size > 0

    def _in_replicas(self, members: int) -> int:
        """As many of so many members as have whole replicas together."""
        size = self._replica_size or 1
        return members // size * size

    def _have_servers_newest(self) -> bool:
        """Of a sharded job: whether the servers have the newest step that living members say that they have. A member
        that is gone may have taken one more, which nobody has published, since it needs all of them (D8)."""
        steps = [step for worker, step in self._asking.items() if step is not None and worker in self.group.members]
        return self._replica_size is None and bool(steps) and max(steps) == self.published

    def form(self, living: Collection[Incarnation], now_ms: int, *, is_over: bool = False) -> ReplicaGroup | None:
        """Forms the next group, if it is due. None: workers go on waiting. `is_over`: no living member is left, and the
        servers have the state after the last step, which a worker that has waited in reserve gets alone."""
        former = [each for each in self.group.members if each in living]
        if self.has_lost_all(living) and not is_over:
            return None  # D3
        if not self._asking or any(each not in self._asking for each in former):
            return None  # D1
        came = self._by_host([each for each in self._asking if each not in self.group.members])
        has_replica = not is_over and (self._replica_size == 1 or self._has_replica(living))
        if self._replica_size is None and came and has_replica:
            if self._have_servers_newest():
                has_replica = self._has_trained = False
            else:
                came = []  # they come after a step that is published
        chosen = self._placed(former, came)
        if not former and len(chosen) < self._workers_expected:
            assert self._asked_since_ms is not None
            if now_ms - self._asked_since_ms < self._grace_ms:
                return None
        if is_over:
            chosen = chosen or came[:1]
        if not chosen:
            return None
        steps = {each: self._asking[each] if has_replica and each in former else None for each in chosen}
        newest = max((step for step in steps.values() if step is not None), default=None)  # D2
        donor = None if newest is None else next(at for at, each in enumerate(chosen) if steps[each] == newest)
        if donor is None and self._have_servers_newest():
            newest = self.published
        self._begin(ReplicaGroup(self.group.generation + 1, tuple(chosen), newest, donor, self.group.void_until))
        return self.group

    def _by_host(self, workers: Sequence[Incarnation]) -> list[Incarnation]:
        """Those of a machine are neighbours: then a ring leaves each machine once. The same workers always have the
        same order, so that members of a sharded replica keep their shards (D8)."""
        return sorted(workers, key=lambda each: (self._hosts[each], each))

    def _placed(self, former: Sequence[Incarnation], came: Sequence[Incarnation]) -> list[Incarnation]:
        """The members of the next group. A former one keeps its stage if it can, first those with the newest step."""
        workers, size = [*former, *came], self._replica_size or 1
        count = self._in_replicas(min(len(workers), self._members_max))
        if size == 1:
            return self._by_host(workers[:count])
        found: list[Incarnation | None] = [None] * count
        steps = {each: step for each in former if (step := self._asking[each]) is not None or not self.has_replicas}
        for each in sorted(steps, key=lambda each: steps[each] or 0, reverse=True):
            stage = self.group.members.index(each) % size
            free = [at for at in range(stage, count, size) if found[at] is None]
            if free:
                found[free[0]] = each
        others = iter([each for each in workers if each not in found])
        return [next(others) if each is None else each for each in found]

    def waits_for(self, living: Collection[Incarnation]) -> str:
        """What the next group waits for, in words."""
        late = [each for each in self.group.members if each in living and each not in self._asking]
        if late and not self.lacks_a_member(living) and not self.has_room(living):
            return f"a place in a replica, in reserve: {len(late)} other workers have them all"
        if late:
            return f"the workers {', '.join(map(str, late[:8]))} of the group before to end their step"
        return f"other workers: {len(self._asking)} of {max(self._workers_expected, self._replica_size or 1)} are here"

    def publish(self, step: int, now_ms: int) -> None:
        """All servers have the state of that step."""
        self._asked_for_ms = now_ms if self.is_to_publish else None
        self.published = step
        self._is_fresh, self.is_to_publish = True, False

    def is_for_checkpoint(self, now_ms: int) -> bool:
        """Whether members have published because they were asked to, and the checkpoint has not begun yet. It may not
        begin for a reason of its own, so this lasts a while at most."""
        return self._is_fresh and self._asked_for_ms is not None and now_ms - self._asked_for_ms < CHECKPOINT_BEGINS_MS

    def go_on(self) -> None:
        """Members change rows on the servers, so that these have one step's state no longer."""
        self._is_fresh = False

    def take_published(self) -> bool:
        """Whether the servers have a state that was published since the last time this returned True. If not, members
        are asked to publish theirs."""
        is_fresh, self._is_fresh = self._is_fresh, False
        self.is_to_publish = not is_fresh
        return is_fresh

    def _begin(self, group: ReplicaGroup) -> None:
        self.group = group
        self._had_trained, self._has_trained = self._has_trained, bool(group.members) and not group.is_void
        self._asking = {worker: asking for worker, asking in self._asking.items() if worker not in group.members}
        self._asked_since_ms = None

    # ---- records

    @property
    def entry(self) -> Entry:
        """The record of the newest group."""
        found = self.group
        return "replica_group", {
            "generation": found.generation,
            "members": list(found.members),
            "step": -1 if found.step is None else found.step,
            "donor": -1 if found.donor is None else found.donor,
            "trained": self._had_trained,
            "void_until": found.void_until,
        }

    @property
    def published_entry(self) -> Entry:
        return "replicas_published", {"step": self.published}

    def entries(self) -> list[Entry]:
        groups = [self.entry] if self.group.generation else []
        return [*groups, self.published_entry] if self.published else groups

    def restore(self, kind: str, body: Body) -> None:
        """Applies a record of `entries`. Raises DamagedRecord."""
        if kind == "replicas_published":
            self.publish(body.number("step", most=SEQUENCE_MAX), 0)
            return
        step, donor = body.number("step", least=-1), body.number("donor", least=-1)
        members = tuple(Incarnation(each) for each in body.numbers("members"))
        generation = body.number("generation", least=1)
        void_until = body.number("void_until", most=generation)
        self._has_trained = body.flag("trained")
        found = None if step < 0 else step, None if donor < 0 else donor
        self._begin(ReplicaGroup(generation, members, *found, void_until))
