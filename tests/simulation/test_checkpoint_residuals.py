"""What workers of a synchronous job have not sent, whoever joins, leaves, dies, reads, and whenever a checkpoint is
taken, or gone back to, or the coordinator dies: the machine, held against a deliberately dumb book-keeper.

What is not sent is a set of atoms, one for each step. Each that counts is in one place: with a worker, in a file that
is due, or lost with a worker that left or died. So it is in each checkpoint: nobody takes a step while one is taken.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from shardyard.checkpoints.manifest import FileRef, ResidualFile, feedback_path, worker_name
from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.errors import NotReady
from shardyard.domain.ids import Caller, Generation, MemberRole
from shardyard.storage.storage import Written
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.storage.checkpoint_residuals import NEVER, CheckpointResidual
from tests.support import restoring_yards as orders
from tests.unit.coordinator.machine import test_handovers as handing

SEEDS = range(60)
ACTIONS = 300
WORKERS_MAX = 5
SETTINGS: JobSettings = handing.SETTINGS.model_copy(
    update={
        "consistency": ConsistencySettings(mode=ConsistencyMode.SYNC, logical_ranks=2),
        "workers_expected": 1_000,
        "rank_grace_ms": 0,
    }
)


@dataclass
class Worker:
    """`reading`: what it was told to take up, and has not claimed."""

    caller: Caller
    atoms: set[int] = field(default_factory=set)
    restored_generation: Generation = NEVER
    reading: list[CheckpointResidual] = field(default_factory=list)
    added: set[tuple[int, str]] = field(default_factory=set)


@dataclass
class Taking:
    """A checkpoint under way. `copies`: what workers remember, None: they copy it later; `excused`: what may be
    lacking: it was due since the job went back, and is taken up meanwhile."""

    effect: effects.TakeCheckpoint
    copies: dict[str, frozenset[int]] | None
    excused: frozenset[int]


@dataclass
class Kept:
    """What a checkpoint is of."""

    files: dict[str, frozenset[int]]
    steps: frozenset[int]
    lost: frozenset[int]


class Yard(orders.Yard):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.workers: list[Worker] = []
        self.files: dict[str, frozenset[int]] = {}
        self.steps: set[int] = set()
        self.lost: set[int] = set()
        self.taking: Taking | None = None
        self.newest = Kept({}, frozenset(), frozenset())
        self.met: Counter[str] = Counter()
        self._atoms = 0
        (first,) = handing.run(self, 1, SETTINGS)
        handing.commit(self, [])
        self.workers.append(Worker(first))

    # ---- what is where

    @property
    def current(self) -> Generation:
        return self.machine.jobs[-1].checkpoint_residuals.generation

    @property
    def due(self) -> dict[str, frozenset[int]]:
        return {name: self.files[name] for name in self.machine.jobs[-1].checkpoint_residuals.due}

    def check(self) -> None:
        """Each step that counts is in one place."""
        places = [each.atoms for each in self.workers if each.restored_generation == self.current]
        found = [*self.lost, *(atom for place in (*places, *self.due.values()) for atom in place)]
        assert len(found) == len(set(found)), "something is in two places"
        assert set(found) == self.steps, "something is nowhere"

    # ---- what happens

    def act(self) -> None:
        kinds = {
            "join": 2,
            "step": 8,
            "hear": 6,
            "claim": 6,
            "leave": 2,
            "die": 2,
            "pass": 5,
            "end": 3,
            "back": 1,
            "restart": 1,
        }
        (kind,) = self.random.choices(list(kinds), list(kinds.values()))
        getattr(self, f"do_{kind}")()

    def do_join(self) -> None:
        if len(self.workers) < WORKERS_MAX:
            self.workers.append(Worker(self.join(SETTINGS)))
            self.follow(self.workers[-1])

    def follow(self, worker: Worker) -> None:
        try:
            placed = self.handle(events.VariablesRegistered(worker.caller, handing.VARIABLES, orders.SGD))
        except NotReady:
            return
        assert isinstance(placed, effects.VariablesPlaced)
        if placed.restored_generation > worker.restored_generation:
            worker.atoms, worker.restored_generation = set(), placed.restored_generation
            for each in placed.feedback:
                if each.own:
                    self.take(worker, each)
        for each in placed.feedback:
            if not each.own:
                self.take(worker, each)

    def take(self, worker: Worker, handed: CheckpointResidual) -> None:
        name, key = handed.file.worker, (handed.generation, handed.file.worker)
        read = self.files[name]
        if key in worker.added:
            return
        for _ in range(self.random.choice((1, 1, 2))):  # the answer may not reach it
            verdict = self.handle(events.FeedbackRead(worker.caller, handed.generation, name, ""))
        assert isinstance(verdict, effects.FeedbackVerdict)
        if verdict.taken:
            worker.added.add(key)
            worker.atoms |= read
            self.met["taken up"] += 1

    def do_step(self) -> None:
        worker = self.random.choice(self.workers)
        if self.taking is None and worker.restored_generation == self.current:
            self._atoms += 1
            self.steps.add(self._atoms)
            worker.atoms.add(self._atoms)

    def do_hear(self) -> None:
        worker = self.random.choice(self.workers)
        if worker.restored_generation != self.current:
            self.follow(worker)
            return
        told = self.beat(worker.caller.incarnation, Report(residual_norm=1.0)).feedback
        worker.reading = [handed for handed in told if not handed.own]

    def do_claim(self) -> None:
        worker = self.random.choice(self.workers)
        reading, worker.reading = worker.reading, []
        for handed in reading:
            if handed.generation <= worker.restored_generation:
                self.take(worker, handed)

    def do_leave(self) -> None:
        self.lose(lambda worker: self.handle(events.MemberLeft(worker.incarnation, self.random.choice(("", "E: no")))))

    def do_die(self) -> None:
        self.lose(lambda worker: self.kill(worker.incarnation))

    def lose(self, end: Callable[[Caller], object]) -> None:
        """But for the last."""
        if len(self.workers) > 1:
            worker = self.random.choice(self.workers)
            if worker.restored_generation == self.current:
                self.lost |= worker.atoms
            self.workers.remove(worker)
            end(worker.caller)

    def do_pass(self) -> None:
        self.now_ms += self.random.choice((50, 1_000, 15_000))
        for member in self.machine.members:
            self.beat(member.incarnation, Report(residual_norm=1.0))
        if self.random.random() < 0.3:
            self.machine.jobs[-1].book.want()
        self.handle(events.Ticked())
        for effect in self.effects:
            if isinstance(effect, effects.TakeCheckpoint):
                assert self.taking is None
                copies = self.copies_for(effect) if self.random.random() < 0.5 else None
                self.taking = Taking(effect, copies, self.not_followed())

    def copies_for(self, effect: effects.TakeCheckpoint) -> dict[str, frozenset[int]]:
        return {
            worker_name(each.caller.incarnation): frozenset(each.atoms)
            for each in self.workers
            if each.caller.incarnation in effect.keepers and each.restored_generation == self.current
        }

    def do_end(self) -> None:
        """A checkpoint is committed, or not."""
        if self.taking is None:
            return
        taking, self.taking = self.taking, None
        job, number = taking.effect.spec.job, taking.effect.draft.number
        if self.random.random() < 0.2:
            self.handle(events.CheckpointFailed(job, number, NotReady("a server")))
            return
        copies = self.copies_for(taking.effect) if taking.copies is None else taking.copies
        remembered = [
            ResidualFile(name, FileRef(feedback_path(number, name), Written(9, "ab" * 32)))
            for name, atoms in copies.items()
            if atoms
        ]
        before = self.machine.jobs[-1].book.committed
        self.handle(events.CheckpointTaken(job, number, number, 0, feedback=tuple(remembered)))
        if self.machine.jobs[-1].book.committed is before:
            return
        found = [atom for atoms in copies.values() for atom in atoms]
        assert len(found) == len(set(found)), "something is in the checkpoint twice"
        lacking = self.steps - self.lost - set(found)
        assert lacking <= taking.excused, f"the checkpoint lacks {lacking - taking.excused}"
        self.newest = Kept(copies, frozenset(self.steps), frozenset(self.steps.difference(found)))
        self.met["checkpoints"] += 1

    def not_followed(self) -> frozenset[int]:
        """What is due since the job went back: workers take that up with the map, before they copy."""
        return frozenset(atom for name in self.machine.jobs[-1].checkpoint_residuals.due for atom in self.files[name])

    def do_back(self) -> None:
        """All servers die; the job goes back as a whole."""
        if self.random.random() < 0.5:
            return
        self.taking = None
        for server in self.machine.jobs[-1].deployment.servers:
            self.handle(events.MemberLeft(server.incarnation, ""))
        self.register(MemberRole.SERVER, f"s:{self.now_ms}:{self._atoms}")
        self.restored(self.tick())
        self.files |= self.newest.files
        self.steps, self.lost = set(self.newest.steps), set(self.newest.lost)
        self.met["gone back"] += 1

    def do_restart(self) -> None:
        self.taking = None
        self.restart(from_snapshot=self.random.random() < 0.5)

    def heal(self) -> None:
        """The living take up all that there is."""
        for _ in range(20):
            self.do_end()
            for worker in self.workers:
                worker.reading = []
                self.follow(worker)
        assert not self.due


@pytest.mark.parametrize("seed", SEEDS)
def test_each_step_that_was_not_sent_is_in_one_place(seed: int) -> None:
    yard = Yard(seed)
    for _ in range(ACTIONS):
        yard.act()
        yard.check()
    yard.heal()
    yard.check()


def test_everything_was_met() -> None:
    met: Counter[str] = Counter()
    for seed in range(30):
        yard = Yard(seed)
        for _ in range(ACTIONS):
            yard.act()
        met += yard.met
    wanted = {"taken up", "checkpoints", "gone back"}
    assert wanted <= met.keys(), wanted - met.keys()
    assert min(met[each] for each in wanted) >= 3, met
