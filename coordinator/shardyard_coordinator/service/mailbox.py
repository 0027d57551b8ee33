"""The machine and its journal behind one lock.

Owns: the lock, the machine, and the order of writing. Invariants: the machine is touched under the lock only; the
records of an event are on disk before any other effect of it begins, and before the lock is released; the lock is
never held during a call to a server. While the journal cannot be written, the machine has what the journal has, and
nothing is decided (rule C8): reports of members and readers are taken and answered, every other event is refused. Then
the machine is built again from the journal's records, as after a restart.
Must not know: messages, how effects are carried out.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

from shardyard.config.settings import MembershipSettings, QuotaSettings
from shardyard.domain.errors import ConfigurationError, NotReady
from shardyard.domain.ids import Term
from shardyard.runtime.clock import Clock
from shardyard.runtime.waits import WaitRegistry
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.service.audit import Page
from shardyard_coordinator.service.disk_watch import DiskWatch, FullDisk
from shardyard_coordinator.service.journal import Journal

log = logging.getLogger("shardyard.coordinator")

COMPACT_RECORDS_MIN: Final = 4_096
"""The journal is replaced by a snapshot after this many records, or after twice the snapshot's records if those are
more."""
REPAIR_MS: Final = 500
"""The pause between two tries to write a journal that could not be written."""
_UNWRITABLE: Final = (sqlite3.Error, OSError)
_STALLED_WHY: Final = "each decision is written to disk before the reply; otherwise a restart could revoke it"
_STALLED_TODO: Final = "make room on the disk; the coordinator then continues by itself"

Start = Callable[[effects.Effect], None]
"""Begins to carry out an effect. It is called under the lock, so it must not block."""


@dataclass(slots=True)
class _Stall:
    """The journal `name` cannot be written. `why`: of the last try. `is_ahead`: the machine has decisions that the
    journal lacks. `disk`: how much room there is. `wait`: explains it in the log and to people."""

    name: str
    why: str
    disk: str
    retry_ms: int
    is_ahead: bool = True
    wait: ExitStack = field(default_factory=ExitStack)

    def __str__(self) -> str:
        return f"the journal {self.name} to be written ({self.why}{self.disk})"


class Mailbox:
    """`checkpoints`: the URL of the checkpoints of jobs that name none. Raises ConfigurationError if the journal cannot
    be read."""

    def __init__(
        self,
        journal: Journal,
        *,
        clock: Clock,
        membership: MembershipSettings,
        quotas: QuotaSettings,
        checkpoints: str | None,
        wait_registry: WaitRegistry,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._membership = membership
        self._quotas = quotas
        self._checkpoints = checkpoints
        self._wait_registry = wait_registry
        self._lock = threading.Lock()
        self.begun_ms = clock.now_ms()
        self._machine = self._restore()
        self._log_restored()
        self._closed = False
        self._stall: _Stall | None = None
        self._disk = DiskWatch(journal)
        self._records_until_compaction = 0
        self._compact()

    @property
    def term(self) -> Term:
        return self._journal.term

    def now_ms(self) -> int:
        return self._clock.now_ms()

    @property
    def waiting_for(self) -> str:
        """The journal that cannot be written, and why; empty while it can be. Any thread may ask."""
        stall = self._stall
        return "" if stall is None else str(stall)

    @property
    def full_disk(self) -> FullDisk | None:
        """The journal's disk, if it is full. Any thread may ask."""
        return self._disk.full

    @contextmanager
    def machine(self) -> Iterator[Machine]:
        """The machine, under the lock, to be read only."""
        with self._lock:
            yield self._machine

    def read_audit(self, job_name: str, after: int) -> tuple[int, Page]:
        """The job's id, and the page of its audit after that number. Raises NotFound."""
        with self._lock:
            job = self._journal.audit.find_job(job_name)
            return job, self._journal.audit.read(job, after)

    def handle(self, event: events.Event, start: Start) -> list[effects.Effect]:
        """Gives one event to the machine, writes its records, then starts its effects. Returns all effects. Raises what
        the machine refuses, and NotReady while the coordinator stops, or if the event must be recorded and the journal
        cannot be written."""
        with self._lock:
            if self._closed:
                raise NotReady("the coordinator is stopping")
            if self._stall is not None:
                found = self._hear(self._stall, event)
            else:
                found = self._machine.handle(event, self._clock.now_ms())
                self._write([effect for effect in found if isinstance(effect, effects.Persist)])
            for effect in found:
                start(effect)
        return found

    def resume(self, start: Start) -> None:
        """Starts the effects that the coordinator's former run may not have carried out."""
        with self._lock:
            self._resume(start)

    def repair(self, start: Start) -> None:
        """If the journal could not be written and can be now, continues from its records. No reply has depended on
        anything else, so this is a restart without a new term. Call it often; it tries now and then."""
        with self._lock:
            stall, now_ms = self._stall, self._clock.now_ms()
            if self._closed:
                return
            self._look_at_disk(now_ms)
            if stall is None or now_ms < stall.retry_ms:
                return
            stall.retry_ms = now_ms + REPAIR_MS
            stall.disk = _room(self._journal.free_bytes())
            try:
                if stall.is_ahead:
                    self._go_back(stall)
                self._journal.replace([(record.kind, record.body) for record in self._machine.snapshot()])
                self._go_back(stall)  # all times begin anew: a decision may be due only because it had to wait
            except (*_UNWRITABLE, ConfigurationError) as error:
                stall.why = str(error)
                log.debug("the journal cannot be written yet: %s", error)
                return
            self._end(stall)
            self._log_restored()
            self._resume(start)

    def close(self) -> None:
        """From now on events are refused."""
        with self._lock:
            self._closed = True
            if self._stall is not None:
                self._end(self._stall)

    def _resume(self, start: Start) -> None:
        for effect in self._machine.resume():
            start(effect)

    def _write(self, records: Sequence[effects.Persist]) -> None:
        if not records:
            return
        try:
            with self._wait_registry.over(lambda: f"the journal {self._journal.name} to be written"):
                self._journal.append([(record.kind, record.body) for record in records])
        except _UNWRITABLE as error:
            self._begin_stall(error)
            raise self._not_ready() from error
        self._records_until_compaction -= len(records)
        if self._records_until_compaction <= 0:
            self._compact()

    # ---- while the journal cannot be written

    def _begin_stall(self, error: Exception) -> None:
        """The journal has none of the event's records. The machine goes back to what the journal has."""
        now_ms, disk = self._clock.now_ms(), _room(self._journal.free_bytes())
        self._stall = stall = _Stall(self._journal.name, str(error), disk, now_ms + REPAIR_MS)
        stall.wait.enter_context(self._wait_registry.over(lambda: str(stall)))
        log.critical(
            "the journal %s cannot be written (%s%s); nothing is decided until it can be. Training goes on with the "
            "work that is leased, and members stay",
            stall.name,
            stall.why,
            stall.disk,
        )
        try:
            self._go_back(stall)
        except (*_UNWRITABLE, ConfigurationError) as unread:
            log.error("the journal %s cannot be read either: %s", stall.name, unread)

    def _look_at_disk(self, now_ms: int) -> None:
        try:
            self._disk.look(now_ms)
        except _UNWRITABLE as error:
            log.debug("the journal's disk was not looked at: %s", error)

    def _go_back(self, stall: _Stall) -> None:
        self._machine, stall.is_ahead = self._restore(), False

    def _hear(self, stall: _Stall, event: events.Event) -> list[effects.Effect]:
        """Raises what the machine refuses, and NotReady for an event that may have to be recorded."""
        if stall.is_ahead or not isinstance(event, events.HeartbeatReceived | events.ReaderHeard):
            raise self._not_ready()
        return self._machine.hear(event, self._clock.now_ms())

    def _not_ready(self) -> NotReady:
        stall = self._stall
        assert stall is not None
        return NotReady(
            f"the journal {stall.name} cannot be written ({stall.why}{stall.disk})",
            why=_STALLED_WHY,
            todo=_STALLED_TODO,
        )

    def _end(self, stall: _Stall) -> None:
        self._stall = None
        stall.wait.close()

    # ---- the journal's records

    def _compact(self) -> None:
        """Replaces the journal's records by the fewest that make the same machine."""
        snapshot = self._machine.snapshot()
        try:
            with self._wait_registry.over(lambda: f"the journal {self._journal.name} to be made shorter"):
                self._journal.replace([(record.kind, record.body) for record in snapshot])
                self._journal.make_room()
        except _UNWRITABLE as error:
            log.warning("the journal %s could not be made shorter (%s); it grows", self._journal.name, error)
        self._records_until_compaction = max(COMPACT_RECORDS_MIN, 2 * len(snapshot))

    def _restore(self) -> Machine:
        """The machine that the journal's records make. Raises ConfigurationError."""
        journal = self._journal
        try:
            machine = Machine(
                term=journal.term,
                lease_ms=self._membership.lease_ms,
                now_ms=self._clock.now_ms(),
                checkpoints=self._checkpoints,
                drain_ms=self._membership.drain_ms,
                servers_expected=self._membership.servers_expected,
                quotas=self._quotas,
            )
            return machine.restored(journal.records())
        except ConfigurationError as error:
            if "file" in error.facts:
                raise
            raise ConfigurationError(
                f"the journal {journal.name}: {error.what}",
                why=error.why_text,
                todo=error.todo_text,
                facts={**error.facts, "file": journal.name},
            ) from error

    def _log_restored(self) -> None:
        if self._machine.members or self._machine.jobs:
            log.info(
                "continuing from the journal %s: %d members, %d unfinished jobs",
                self._journal.name,
                len(self._machine.members),
                sum(not job.phase.ended for job in self._machine.jobs),
            )


def _room(free_bytes: int | None) -> str:
    return "" if free_bytes is None else f"; {free_bytes:,} bytes free on its disk"
