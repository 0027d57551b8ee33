"""Machines made anew from records, held against the one that wrote them.

`state_of` looks at every field that there is, so a field that no record brings back shows, unless not_recorded.py
names it.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Iterable

from pydantic import BaseModel

from shardyard.domain.errors import ShardyardError
from shardyard.domain.ids import Incarnation, Term
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.members.progress import Progress
from shardyard_coordinator.members.readers import Readers
from shardyard_coordinator.members.roster import LATE_MS
from shardyard_coordinator.placement.deployment import Stage
from shardyard_coordinator.records import Record
from shardyard_coordinator.work.feeds import FeedSpec
from shardyard_coordinator.work.step_ledger import StepLedger
from shardyard_coordinator.work.step_times import StepTimes
from tests.simulation.not_recorded import NOT_RECORDED

VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)), VariableSpec("b", DType.INT64, (), VariableKind.BUFFER))
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
FEEDS = tuple(
    FeedSpec(samples=45, fingerprint="f", batch_size=5, epochs=epochs, shuffle=True, drop_last=False)
    for epochs in (1, 2)
)
DUE_AGAIN = {Stage.CREATING: Stage.UNCREATED, Stage.OPENING: Stage.COMMITTED}
_WAIT = re.compile(r" (waits|has waited) for .* s( so far|: the wait is over)$")
UNORDERED = ("held", "last_closed")


def state_of(machine: Machine) -> object:
    """All that a machine must get back from its records."""
    ends = [
        (job.id, job.progress.step, job.progress.samples, job.progress.metrics)
        for job in machine.jobs
        if job.phase.ended
    ]
    finishing = [job.id for job in machine.jobs if job.roster._over_at_ms is not None]
    return _look(machine, ""), ends, finishing


def _look(value: object, name: str) -> object:
    match value:
        case Stage():
            return DUE_AGAIN.get(value, value)
        case None | bool() | int() | float() | str() | enum.Enum():
            return value
        case ShardyardError():
            return type(value), value.what, value.why_text, value.todo_text, value.facts
        case BaseModel():
            return value.model_dump()
        case dict():
            found = [(key, _look(each, "")) for key, each in value.items()]
            return sorted(found) if name in UNORDERED else found  # type: ignore[type-var]
        case frozenset():
            return sorted(value)
        case list() | tuple():
            return [_look(each, "") for each in value]
    if callable(value):
        return None
    names = (
        [field.name for field in dataclasses.fields(value)]
        if dataclasses.is_dataclass(value) and not isinstance(value, type)
        else list(vars(value))
    )
    kind = type(value).__name__
    return kind, [(each, _look(getattr(value, each), each)) for each in names if f"{kind}.{each}" not in NOT_RECORDED]


def renew(machine: Machine, now_ms: int) -> None:
    """Makes a machine forget what is not recorded, as one that is made anew now."""
    machine._ticked_ms = now_ms
    for member in machine.members:
        member.last_seen_ms = now_ms
    for job in machine.jobs:
        job.roster._idle_since_ms = now_ms
        job.roster._over_at_ms = None if job.roster._over_at_ms is None else now_ms + LATE_MS
        job.stopping._reached.clear()
        job.pending_switch._reached.clear()
        job.reads_steps = False
        job.mode._told, job.mode._asking, job.mode._retry_at_ms = None, False, 0
        if isinstance(job.feeds, StepLedger):
            job.feeds.verdicts._present = (0, frozenset())
        recovery = job.recovery
        recovery._since_ms, recovery._retry_at_ms, recovery.waits_for, recovery.attempt = now_ms, 0, "", None
        job.deployment._retry_at_ms = 0
        job.deployment.stage = DUE_AGAIN.get(job.deployment.stage, job.deployment.stage)
        if not job.phase.ended:
            step = job.progress.step if job.phase is effects.JobPhase.FINISHING else 0
            job.progress = Progress(now_ms)
            job.progress.reach(step)
        job.step_times = StepTimes()
        job.readers = Readers()
        job.readers.forget(now_ms)
        if job.ranks is not None:
            for standing in job.ranks._ranks:
                standing.unowned_since_ms = now_ms


def numbered(persisted: Iterable[effects.Persist]) -> list[Record]:
    """As the journal gives them back."""
    return [
        Record(number, 1, 0.0, each.kind, json.loads(json.dumps(each.body))) for number, each in enumerate(persisted, 1)
    ]


class Lockstep:
    """A machine and those that were made from its records: each event goes to all, and all must answer alike."""

    def __init__(self, *, term: Term, lease_ms: int, now_ms: int) -> None:
        self._lease_ms = lease_ms
        self.machine = Machine(term=term, lease_ms=lease_ms, now_ms=now_ms)
        self.persisted: list[effects.Persist] = []
        self._others: list[Machine] = []

    def handle(self, event: events.Event, now_ms: int) -> list[effects.Effect]:
        others = [_outcome(other, event, now_ms) for other in self._others]
        found = _outcome(self.machine, event, now_ms)
        for other in others:
            assert _plain(other) == _plain(found), f"{event} has another outcome on a machine from records"
        if isinstance(found, ShardyardError):
            raise found
        self.persisted += [effect for effect in found if isinstance(effect, effects.Persist)]
        return found

    def fold(self, persisted: Iterable[effects.Persist], now_ms: int, term: Term | None = None) -> Machine:
        made = Machine(term=term or self.machine.term, lease_ms=self._lease_ms, now_ms=now_ms)
        return made.restored(numbered(persisted))

    def check(self, now_ms: int) -> None:
        """All records, and the snapshot's, make a machine equal to the living one."""
        wanted, snapshot = state_of(self.machine), self.machine.snapshot()
        folded, short = self.fold(self.persisted, now_ms), self.fold(snapshot, now_ms)
        assert state_of(folded) == wanted, "the fold of all records is another machine"
        assert state_of(short) == wanted, "the fold of the snapshot is another machine"
        assert short.snapshot() == folded.snapshot() == snapshot
        for other in self._others:
            assert state_of(other) == wanted

    def split(self, now_ms: int) -> None:
        """From here on two machines from records go along."""
        self.check(now_ms)
        snapshot = self.machine.snapshot()
        renew(self.machine, now_ms)
        self._others = [self.fold(self.persisted, now_ms), self.fold(snapshot, now_ms)]
        self.persisted = snapshot

    def restart(self, now_ms: int) -> tuple[list[effects.Effect], frozenset[Incarnation]]:
        """The machine dies, and another goes on in the next term. What it does again, and whose fence was under way."""
        self.check(now_ms)
        waiting = frozenset(worker for job in self.machine.jobs if not job.phase.ended for worker in job.roster.fencing)
        self._others = []
        self.machine = self.fold(self.persisted, now_ms, Term(self.machine.term + 1))
        self.persisted = self.machine.snapshot()
        return self.machine.resume(), waiting


def _outcome(machine: Machine, event: events.Event, now_ms: int) -> list[effects.Effect] | ShardyardError:
    try:
        return machine.handle(event, now_ms)
    except ShardyardError as error:
        return error


def _plain(outcome: list[effects.Effect] | ShardyardError) -> object:
    if isinstance(outcome, ShardyardError):
        return type(outcome), outcome.what
    # since when something is waited for is not recorded, and so neither is what is said of it
    return repr([each for each in outcome if not (isinstance(each, effects.LogMessage) and _WAIT.search(each.text))])
