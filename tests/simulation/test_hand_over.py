"""What workers of a synchronous job have not sent, whoever joins, leaves, dies, writes, reads, and whenever a
checkpoint is taken, or gone back to, or the coordinator dies: the machine, held against a deliberately dumb
book-keeper.

What is not sent is a set of atoms, one for each step. Each that counts is in one place: with a worker, in a file that
is due, or lost with a worker that died. So it is in each checkpoint: nobody takes a step while one is taken.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardyard.checkpoints.manifest import FileRef, ResidualFile, feedback_path, left_name, worker_name
from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.errors import NotReady
from shardyard.domain.ids import Caller, Generation, MemberRole
from shardyard.storage.storage import Written
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import HandoverVerdict
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.storage.residual_handover import HOLD_MS, NEVER, Fate, Handover

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import test_coordinator_handovers as handing
import test_restore_on_command as orders

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
    """`reading`: what it was told to take up, and has not claimed; `settled`: it leaves, and neither steps nor copies
    nor takes up any more; `held_ms`: since when no checkpoint is begun for it; `gone`: it has handed over."""

    caller: Caller
    atoms: set[int] = field(default_factory=set)
    gone_back: Generation = NEVER
    reading: list[Handover] = field(default_factory=list)
    settled: bool = False
    held_ms: float = math.inf
    gone: bool = False
    added: set[tuple[int, str]] = field(default_factory=set)


@dataclass
class Taking:
    """A checkpoint under way. `copies`: what workers remember, None: they copy it later; `excused`: what may be
    lacking, of who has written for too long, or was due since the job went back, and is taken up meanwhile."""

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
    def stays(self) -> list[Worker]:
        return [each for each in self.workers if not each.settled]

    @property
    def current(self) -> Generation:
        return self.machine.jobs[-1].handovers.generation

    @property
    def due(self) -> dict[str, frozenset[int]]:
        books = self.machine.jobs[-1].handovers
        return {name: self.files[name] for name in (*books.due, *(each.file.worker for each in books.left))}

    def check(self) -> None:
        """Each step that counts is in one place."""
        places = [each.atoms for each in self.workers if each.gone_back == self.current]
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
            "leave": 4,
            "write": 4,
            "goodbye": 3,
            "die": 1,
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
        if placed.gone_back > worker.gone_back:
            worker.atoms, worker.gone_back = set(), placed.gone_back
            for each in placed.feedback:
                if each.own:
                    self.take(worker, each)
        for each in placed.feedback:
            if not each.own:
                self.take(worker, each)

    def take(self, worker: Worker, handed: Handover) -> None:
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
        worker = self.random.choice(self.stays)
        if self.taking is None and worker.gone_back == self.current:
            self._atoms += 1
            self.steps.add(self._atoms)
            worker.atoms.add(self._atoms)

    def do_hear(self) -> None:
        worker = self.random.choice(self.stays)
        if worker.gone_back != self.current:
            self.follow(worker)
            return
        told = self.beat(worker.caller.incarnation, Report(residual_norm=1.0)).feedback
        worker.reading = [handed for handed in told if not handed.own]

    def do_claim(self) -> None:
        worker = self.random.choice(self.stays)
        reading, worker.reading = worker.reading, []
        for handed in reading:
            if handed.generation <= worker.gone_back:
                self.take(worker, handed)

    def do_leave(self) -> None:
        """But for the last that stays."""
        worker = self.random.choice(self.stays)
        if len(self.stays) < 2 or not worker.atoms or worker.reading:
            return
        fate = self.ask(worker)
        self.met[fate.value] += 1
        assert fate in (Fate.WAIT, Fate.WRITE, Fate.VOID)
        worker.settled, worker.held_ms = fate is not Fate.WAIT, self.now_ms
        if fate is Fate.VOID:
            assert worker.gone_back != self.current
            worker.gone = True

    def ask(self, worker: Worker, file: ResidualFile | None = None) -> Fate:
        verdict = self.handle(events.HandoverRequested(worker.caller, worker.gone_back, file, 1.0))
        assert isinstance(verdict, HandoverVerdict)
        return verdict.fate

    def do_write(self) -> None:
        for worker in self.workers:
            if worker.settled and not worker.gone:
                name = left_name(worker.caller.incarnation)
                number = self.machine.jobs[-1].keeping.book._number + self.random.choice((0, 1, 1))
                self.files[name] = frozenset(worker.atoms)
                fate = self.ask(worker, ResidualFile(name, FileRef(feedback_path(number, name), Written(9, "ab" * 32))))
                self.met[f"written: {fate.value}"] += 1
                if fate in (Fate.HANDED_OVER, Fate.VOID):
                    worker.atoms, worker.gone = set(), True
                return

    def do_goodbye(self) -> None:
        for worker in self.workers:
            if worker.gone:
                self.workers.remove(worker)
                self.handle(events.MemberLeft(worker.caller.incarnation, self.random.choice(("", "E: no"))))
                return

    def do_die(self) -> None:
        worker = self.random.choice(self.workers)
        if worker.settled or len(self.stays) > 1:
            if worker.gone_back == self.current:
                self.lost |= worker.atoms
            self.workers.remove(worker)
            self.kill(worker.caller.incarnation)

    def do_pass(self) -> None:
        self.now_ms += self.random.choice((50, 1_000, HOLD_MS // 2))
        for member in self.machine.members:
            self.beat(member.incarnation, Report(residual_norm=1.0))
        if self.random.random() < 0.3:
            self.machine.jobs[-1].keeping.book.want()
        self.handle(events.Ticked())
        for effect in self.effects:
            if isinstance(effect, effects.TakeCheckpoint):
                assert self.taking is None
                copies = self.copies_for(effect) if self.random.random() < 0.5 else None
                writing = [each for each in self.workers if each.settled and not each.gone]
                slow = [each.atoms for each in writing if self.now_ms - each.held_ms >= HOLD_MS]
                self.taking = Taking(effect, copies, frozenset().union(*slow, self.not_followed()))
                self.met["with what was left"] += bool(effect.left)

    def copies_for(self, effect: effects.TakeCheckpoint) -> dict[str, frozenset[int]]:
        return {
            worker_name(each.caller.incarnation): frozenset(each.atoms)
            for each in self.stays
            if each.caller.incarnation in effect.keepers and each.gone_back == self.current
        }

    def do_end(self) -> None:
        """A checkpoint is committed, or not."""
        if self.taking is None:
            return
        taking, self.taking = self.taking, None
        job, number = taking.effect.subject.job, taking.effect.draft.number
        if self.random.random() < 0.2:
            self.handle(events.CheckpointFailed(job, number, NotReady("a server")))
            return
        copies = self.copies_for(taking.effect) if taking.copies is None else taking.copies
        remembered = [
            ResidualFile(name, FileRef(feedback_path(number, name), Written(9, "ab" * 32)))
            for name, atoms in copies.items()
            if atoms
        ]
        before = self.machine.jobs[-1].keeping.book.committed
        self.handle(events.CheckpointTaken(job, number, number, 0, feedback=(*remembered, *taking.effect.left)))
        if self.machine.jobs[-1].keeping.book.committed is before:
            return
        files = copies | {each.worker: self.files[each.worker] for each in taking.effect.left}
        found = [atom for atoms in files.values() for atom in atoms]
        assert len(found) == len(set(found)), "something is in the checkpoint twice"
        lacking = self.steps - self.lost - set(found)
        assert lacking <= taking.excused, f"the checkpoint lacks {lacking - taking.excused}"
        self.newest = Kept(files, frozenset(self.steps), frozenset(self.steps.difference(found)))
        self.met["checkpoints"] += 1

    def not_followed(self) -> frozenset[int]:
        """What is due since the job went back: workers take that up with the map, before they copy."""
        return frozenset(atom for name in self.machine.jobs[-1].handovers.due for atom in self.files[name])

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
        for worker in self.workers:
            worker.held_ms = -math.inf
        self.restart(from_snapshot=self.random.random() < 0.5)

    def heal(self) -> None:
        """Whoever stays takes up all that there is."""
        for _ in range(20):
            self.do_end()
            for worker in [each for each in self.workers if each.settled and not each.gone]:
                self.do_write()
                if not worker.gone:
                    self.do_end()
            self.do_goodbye()
            for worker in self.stays:
                worker.reading = []
                self.follow(worker)
        assert not self.due
        assert all(not each.settled for each in self.workers)


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
    fates = {*(each.value for each in (Fate.WAIT, Fate.WRITE, Fate.VOID)), "written: handed over", "written: write"}
    wanted = {*fates, "written: void", "taken up", "with what was left", "checkpoints", "gone back"}
    assert wanted <= met.keys(), wanted - met.keys()
    assert min(met[each] for each in wanted) >= 3, met
