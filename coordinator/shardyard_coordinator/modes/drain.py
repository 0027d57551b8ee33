"""Switches a job between synchronous and asynchronous updates, before a fixed step (rules B8, B10 of
docs/internals/ledger.md).

Owns: the requested mode, how far each worker is, and the fixed step. Invariants: the step is fixed after every living
worker has reported how far it is and waits there, and after the servers have reported what they have from workers that
are gone. So no worker has contributed to that step, and all steps with a contribution are computed as steps. A worker's
report counts only for the drain that it names. If the job changes to steps, the step is fixed again whenever partitions
go back. The switch may be cancelled until the partitions are in the other mode. Must not know: what steps contain, data
shards, servers, time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from shardyard.domain import limits
from shardyard.domain.consistency import Consistency, SwitchPoint, UpdateMode
from shardyard.domain.ids import Incarnation
from shardyard_coordinator.modes.mode_setting import consistency_body, consistency_of
from shardyard_coordinator.modes.step_barrier import StepBarrier
from shardyard_coordinator.records import Body, Entry, require

HALTS_MAX: Final = (1 << 32) - 1


class Drain:
    def __init__(self) -> None:
        self._count = 0
        self._reached = StepBarrier()
        self.halt: SwitchPoint | None = None
        """What workers are told."""
        self.wanted: Consistency | None = None
        """The mode to which the job switches."""
        self.ticket = 0
        """Once the step of a drain is fixed: checkpoints that were begun before this ticket lack something."""

    def ask(self, wanted: Consistency) -> list[Entry]:
        """Returns the records."""
        assert self.halt is None
        self._begin(self._count + 1, wanted)
        return [self._asked]

    def give_up(self) -> list[Entry]:
        """Cancels the switch. Returns the records."""
        self.end()
        return [("halt_given_up", {})]

    def end(self) -> None:
        """The job has switched, or the switch was cancelled."""
        self.halt = self.wanted = None
        self.ticket = 0
        self._reached.clear()

    @property
    def drains(self) -> bool:
        """Whether the job changes to steps, so that its data shards must be computed to their end first."""
        return self.halt is not None and self.halt.drains

    def reopen(self) -> None:
        """Partitions have gone back. What they lack must be pushed again."""
        if self.halt is not None and self.halt.drains and self.halt.settled:
            self.halt, self.ticket = replace(self.halt, settled=False, step=0), 0

    def on_reached(self, worker: Incarnation, number: int, reached: int) -> None:
        """The worker waits, and contributes to no step from `reached` on."""
        if self._is_open and self.halt is not None and number == self.halt.number:
            self._reached.on_reached(worker, reached)

    def is_due(self, workers: Collection[Incarnation]) -> bool:
        """Whether all living workers have reported how far they are."""
        return self._is_open and self._reached.has_all(workers)

    def fix_step(self, step: int, ticket: int = 0) -> list[Entry]:
        """Fixes the step once `is_due`. Returns the records. `step`: the first to which no partition has any
        contribution, those of workers that are gone included. If the job changes to steps: a step above all versions,
        with `ticket` for the next checkpoint."""
        return self._fix(step if self.drains else self._reached.agreed_step(step), ticket)

    def missing(self, workers: Collection[Incarnation]) -> tuple[Incarnation, ...]:
        """The living workers that have not reported how far they are."""
        return self._reached.missing(workers) if self._is_open else ()

    @property
    def step(self) -> int | None:
        """The step before which the job switches, once it is fixed."""
        return self.halt.step if self.halt is not None and self.halt.settled else None

    @property
    def _is_open(self) -> bool:
        return self.halt is not None and not self.halt.settled

    def _begin(self, number: int, wanted: Consistency) -> None:
        drains = wanted.mode.updates is UpdateMode.SYNC
        self._count, self.halt, self.wanted = number, SwitchPoint(number, drains=drains), wanted

    def _fix(self, step: int, ticket: int) -> list[Entry]:
        assert self.halt is not None
        self.halt, self.ticket = replace(self.halt, settled=True, step=step), ticket
        self._reached.clear()
        return [self._settled]

    # ---- records

    @property
    def _asked(self) -> Entry:
        assert self.wanted is not None
        return "halt_asked", {"halt": self._count, "number": self.wanted.number, **consistency_body(self.wanted)}

    @property
    def _settled(self) -> Entry:
        assert self.halt is not None
        return "halt_settled", {"step": self.halt.step, **({"ticket": self.ticket} if self.ticket else {})}

    def entries(self) -> list[Entry]:
        if self.halt is not None:
            return [self._asked, *([self._settled] if self.halt.settled else [])]
        return [("halts_before", {"halt": self._count})] if self._count else []

    def restore(self, kind: str, body: Body) -> None:
        """Raises DamagedRecord."""
        match kind:
            case "halt_asked":
                require(self.halt is None, "a switch is asked for while another one is under way")
                number = body.number("halt", least=self._count + 1, most=HALTS_MAX)
                self._begin(number, consistency_of(body, body.number("number", least=1)))
            case "halt_settled":
                require(self._is_open, "the step of a switch is fixed, and no switch was asked for")
                ticket = body.number("ticket", least=1) if body.has("ticket") else 0
                self._fix(body.number("step", most=limits.SEQUENCE_MAX), ticket)
            case "halt_given_up":
                require(self.halt is not None, "a switch is cancelled, and none was asked for")
                self.end()
            case _:
                self._count = body.number("halt", least=1, most=HALTS_MAX)
