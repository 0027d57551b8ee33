"""Switches a job between synchronous and asynchronous updates, or to another strategy, before a fixed step (rules B8,
B10 and D9 of docs/internals/ledger.md).

Owns: the requested mode, how far each worker is, and the fixed step. Invariants: the step is fixed after every living
worker has reported how far it is and waits there, and after the servers have reported what they have from workers that
are gone. So no worker has contributed to that step, and all steps with a contribution are computed as steps. A worker's
report counts only for the switch that it names. If the job changes to steps, the step is fixed again whenever
partitions go back. The switch may be cancelled until the partitions are in the other mode. Must not know: what steps
contain, data shards, servers, time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardyard.domain import limits
from shardyard.domain.consistency import Consistency, SwitchPoint
from shardyard.domain.ids import Incarnation
from shardyard_coordinator.modes.mode_setting import SWITCHES_MAX, consistency_body, consistency_of
from shardyard_coordinator.modes.step_barrier import StepBarrier
from shardyard_coordinator.records import Body, Entry, require


class PendingSwitch:
    def __init__(self) -> None:
        self._count = 0
        self._reached = StepBarrier()
        self.switch_point: SwitchPoint | None = None
        """In the replies to workers, while a switch is under way."""
        self.wanted: Consistency | None = None
        """The mode to which the job switches."""
        self.ticket = 0
        """Once the first step is fixed: checkpoints that were begun before this ticket lack something."""

    def ask(self, wanted: Consistency, *, to_steps: bool = False) -> list[Entry]:
        """Returns the records. `to_steps`: the job has none yet."""
        assert self.switch_point is None
        self._begin(self._count + 1, wanted, to_steps=to_steps)
        return [self._asked]

    def cancel(self) -> list[Entry]:
        """Cancels the switch. Returns the records."""
        self.end()
        return [("switch_cancelled", {})]

    def end(self) -> None:
        """The job has switched, or the switch was cancelled."""
        self.switch_point = self.wanted = None
        self.ticket = 0
        self._reached.clear()

    @property
    def to_steps(self) -> bool:
        """Whether the job changes to steps, so that its data shards must be computed to their end first."""
        return self.switch_point is not None and self.switch_point.to_steps

    def reopen(self) -> None:
        """Partitions have gone back. What they lack must be pushed again."""
        if self.switch_point is not None and self.switch_point.to_steps and self.switch_point.settled:
            self.switch_point, self.ticket = replace(self.switch_point, settled=False, step=0), 0

    def on_reached(self, worker: Incarnation, number: int, reached: int) -> None:
        """The worker waits, and contributes to no step from `reached` on."""
        if self._is_open and self.switch_point is not None and number == self.switch_point.number:
            self._reached.on_reached(worker, reached)

    def is_due(self, workers: Collection[Incarnation]) -> bool:
        """Whether all living workers have reported how far they are."""
        return self._is_open and self._reached.has_all(workers)

    def fix_step(self, step: int, ticket: int = 0) -> list[Entry]:
        """Fixes the step once `is_due`. Returns the records. `step`: the first to which no partition has any
        contribution, those of departed workers included. If the job changes to steps: a step above all versions,
        with `ticket` for the next checkpoint."""
        return self._fix(step if self.to_steps else self._reached.agreed_step(step), ticket)

    def missing(self, workers: Collection[Incarnation]) -> tuple[Incarnation, ...]:
        """The living workers that have not reported how far they are."""
        return self._reached.missing(workers) if self._is_open else ()

    @property
    def step(self) -> int | None:
        """The step before which the job switches, once it is fixed."""
        return self.switch_point.step if self.switch_point is not None and self.switch_point.settled else None

    @property
    def _is_open(self) -> bool:
        return self.switch_point is not None and not self.switch_point.settled

    def _begin(self, number: int, wanted: Consistency, *, to_steps: bool) -> None:
        self._count, self.switch_point, self.wanted = number, SwitchPoint(number, to_steps=to_steps), wanted

    def _fix(self, step: int, ticket: int) -> list[Entry]:
        assert self.switch_point is not None
        self.switch_point, self.ticket = replace(self.switch_point, settled=True, step=step), ticket
        self._reached.clear()
        return [self._settled]

    # ---- records

    @property
    def _asked(self) -> Entry:
        assert self.wanted is not None
        asked = {"switch": self._count, "number": self.wanted.number, **consistency_body(self.wanted)}
        return "switch_asked", {**asked, "to_steps": self.to_steps}

    @property
    def _settled(self) -> Entry:
        assert self.switch_point is not None
        return "switch_settled", {"step": self.switch_point.step, **({"ticket": self.ticket} if self.ticket else {})}

    def entries(self) -> list[Entry]:
        if self.switch_point is not None:
            return [self._asked, *([self._settled] if self.switch_point.settled else [])]
        return [("switches_before", {"switch": self._count})] if self._count else []

    def restore(self, kind: str, body: Body) -> None:
        """Raises DamagedRecord."""
        match kind:
            case "switch_asked":
                require(self.switch_point is None, "a switch is asked for while another one is under way")
                number = body.number("switch", least=self._count + 1, most=SWITCHES_MAX)
                wanted = consistency_of(body, body.number("number", least=1))
                self._begin(number, wanted, to_steps=body.flag("to_steps"))
            case "switch_settled":
                require(self._is_open, "the step of a switch is fixed, and no switch was asked for")
                ticket = body.number("ticket", least=1) if body.has("ticket") else 0
                self._fix(body.number("step", most=limits.SEQUENCE_MAX), ticket)
            case "switch_cancelled":
                require(self.switch_point is not None, "a switch is cancelled, and none was asked for")
                self.end()
            case _:
                self._count = body.number("switch", least=1, most=SWITCHES_MAX)
