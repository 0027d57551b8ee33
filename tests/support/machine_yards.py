"""A coordinator's machine, and members that do only what a test tells them to do: events in, effects out."""

from __future__ import annotations

import itertools
import json

from shardyard.config.settings import JobSettings
from shardyard.domain.ids import Caller, Incarnation, MemberRole, Term
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.domain.variables import VariableSpec
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.members.membership import Registration
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.records import Record
from shardyard_coordinator.service.status import describe


class MachineYard:
    """`effects` are those of the latest event. `persisted` has all records so far, `told` all log messages."""

    def __init__(self, *, lease_ms: int = 1_000, checkpoints: str | None = None, servers_expected: int = 1) -> None:
        self.now_ms = 0
        self.lease_ms = lease_ms
        self.checkpoints = checkpoints
        self.servers_expected = servers_expected
        self.machine = Machine(
            term=Term(1), lease_ms=lease_ms, now_ms=0, checkpoints=checkpoints, servers_expected=servers_expected
        )
        self.effects: list[effects.Effect] = []
        self.persisted: list[effects.Persist] = []
        self.told: list[str] = []
        self.latest: dict[type, effects.Effect] = {}
        """The latest effect of each kind."""
        self._pids = itertools.count(1)

    def handle(self, event: events.Event) -> object:
        """The answer, if there is one."""
        self.effects = self.machine.handle(event, self.now_ms)
        self.persisted += [each for each in self.effects if isinstance(each, effects.Persist)]
        self.latest.update({type(each): each for each in self.effects})
        self.told += [each.text for each in self.effects if isinstance(each, effects.LogMessage)]
        return next((each.answer for each in self.effects if isinstance(each, effects.Reply)), None)

    def wanted(self, *kinds: type) -> list[effects.Effect]:
        return [each for each in self.effects if isinstance(each, kinds)]

    # ---- members

    def register(
        self,
        role: MemberRole,
        address: str = "",
        *,
        pid: int | None = None,
        logs: str = "",
        agent: Incarnation | None = None,
        local_index: int = 0,
        host: str = "box",
    ) -> Incarnation:
        given = Registration(role, address, 1, "0.9", host, pid or next(self._pids), agent, local_index, logs)
        answer = self.handle(events.MemberRegistered(given))
        assert isinstance(answer, effects.Registered)
        return answer.incarnation

    def join_as(self, worker: Incarnation, settings: JobSettings) -> Caller:
        answer = self.handle(events.JobJoined(worker, settings.name, settings))
        assert isinstance(answer, effects.Joined)
        return Caller(answer.job, worker)

    def open_job(
        self,
        caller: Caller,
        variables: tuple[VariableSpec, ...],
        optimizer: OptimizerSpec,
        tables: tuple[TableSettings, ...] = (),
        places: tuple[int, ...] = (),
    ) -> None:
        """Takes a job that was joined to the point where its servers have first values."""
        self.handle(events.VariablesRegistered(caller, variables, optimizer, tables, places))
        self.handle(events.PartitionsCreated(caller.job))
        self.handle(events.VariablesCommitted(caller))
        self.handle(events.PartitionsOpened(caller.job))

    def complete_checkpoint(self, step: int | None = None) -> None:
        """The checkpoint that the latest event began is written, of this step or of its draft's."""
        (taking,) = self.wanted(effects.TakeCheckpoint)
        assert isinstance(taking, effects.TakeCheckpoint)
        draft = taking.draft
        step = draft.step if step is None else step
        self.handle(events.CheckpointTaken(taking.spec.job, draft.number, draft.number, step))

    def beat(self, member: Incarnation, report: Report | None = None) -> effects.HeartbeatReply:
        answer = self.handle(events.HeartbeatReceived(member, report or Report()))
        assert isinstance(answer, effects.HeartbeatReply)
        return answer

    def kill(self, worker: Incarnation) -> None:
        """Its agent reports that it has ended."""
        pid = next(each.registration.pid for each in self.machine.members if each.incarnation == worker)
        agent = self.register(MemberRole.AGENT, f"a:{worker}")
        self.handle(events.ExitReported(agent, pid, -9))

    def job(self) -> wire.JobStatus:
        return describe(self.machine, self.now_ms).jobs[-1]

    # ---- another machine

    def restart(self, *, from_snapshot: bool = False) -> list[effects.Effect]:
        """Replaces the machine by one of the next term that is made from the records. Returns the effects with which it
        begins."""
        written = self.machine.snapshot() if from_snapshot else self.persisted
        records = [
            Record(number, 1, 0.0, each.kind, json.loads(json.dumps(each.body)))
            for number, each in enumerate(written, 1)
        ]
        machine = Machine(
            term=Term(self.machine.term + 1),
            lease_ms=self.lease_ms,
            now_ms=self.now_ms,
            checkpoints=self.checkpoints,
            servers_expected=self.servers_expected,
        )
        self.machine = machine.restored(records)
        self.persisted = self.machine.snapshot()
        return self.machine.resume()
