"""The machine and its journal behind one lock.

Owns: the lock, the machine, and the order of writing. Invariants: the machine is touched under the lock only; the
records of an event are on disk before any other effect of it begins, and before the lock is released; the lock is
never held during a call to a server. If the journal cannot be written, every event is refused until it can be. Then
the machine is built again from the journal's records, as after a restart.
Must not know: messages, how effects are carried out.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from shardyard.config.settings import MembershipSettings
from shardyard.domain.errors import ConfigurationError, NotReady
from shardyard.domain.ids import Term
from shardyard.runtime.clock import Clock
from shardyard.runtime.waits import WaitRegistry
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.service.audit import Page
from shardyard_coordinator.service.journal import Journal

log = logging.getLogger("shardyard.coordinator")

COMPACT_RECORDS_MIN: Final = 4_096
"""The journal is replaced by a snapshot after this many records, or after twice the snapshot's records if those are
more."""
_BROKEN_WHY: Final = "each decision is written to disk before the reply; otherwise a restart could revoke it"
_BROKEN_TODO: Final = "make room on the disk; the coordinator then continues by itself"

Start = Callable[[effects.Effect], None]
"""Begins to carry out an effect. It is called under the lock, so it must not block."""


class Mailbox:
    """`checkpoints`: the URL of the checkpoints of jobs that name none. Raises ConfigurationError if the journal cannot
    be read."""

    def __init__(
        self,
        journal: Journal,
        *,
        clock: Clock,
        membership: MembershipSettings,
        checkpoints: str | None,
        wait_registry: WaitRegistry,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._membership = membership
        self._checkpoints = checkpoints
        self._wait_registry = wait_registry
        self._lock = threading.Lock()
        self._machine = self._restore()
        self._log_restored()
        self._closed = False
        self._broken: str | None = None
        """Why the journal could not be written. The machine is then ahead of the journal."""
        self._records_until_compaction = 0
        self._compact()

    @property
    def term(self) -> Term:
        return self._journal.term

    def now_ms(self) -> int:
        return self._clock.now_ms()

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
        the machine refuses, and NotReady while the journal cannot be written or the coordinator stops."""
        with self._lock:
            if self._closed:
                raise NotReady("the coordinator is stopping")
            if self._broken is not None:
                raise NotReady(self._broken, why=_BROKEN_WHY, todo=_BROKEN_TODO)
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
        anything else, so this is a restart without a new term."""
        with self._lock:
            if self._broken is None or self._closed:
                return
            try:
                machine = self._restore()
                self._journal.replace([(record.kind, record.body) for record in machine.snapshot()])
            except (sqlite3.Error, ConfigurationError) as error:
                log.debug("the journal cannot be written yet: %s", error)
                return
            self._machine, self._broken = machine, None
            self._log_restored()
            self._resume(start)

    def close(self) -> None:
        """From now on events are refused."""
        with self._lock:
            self._closed = True

    def _resume(self, start: Start) -> None:
        for effect in self._machine.resume():
            start(effect)

    def _write(self, records: Sequence[effects.Persist]) -> None:
        if not records:
            return
        try:
            with self._wait_registry.over(lambda: f"the journal {self._journal.name} to be written"):
                self._journal.append([(record.kind, record.body) for record in records])
        except sqlite3.Error as error:
            self._broken = f"the journal {self._journal.name} cannot be written ({error})"
            log.critical("%s; nothing is decided until it can be", self._broken)
            raise NotReady(self._broken, why=_BROKEN_WHY, todo=_BROKEN_TODO) from error
        self._records_until_compaction -= len(records)
        if self._records_until_compaction <= 0:
            self._compact()

    def _compact(self) -> None:
        """Replaces the journal's records by the fewest that make the same machine."""
        snapshot = self._machine.snapshot()
        try:
            with self._wait_registry.over(lambda: f"the journal {self._journal.name} to be made shorter"):
                self._journal.replace([(record.kind, record.body) for record in snapshot])
        except sqlite3.Error as error:
            log.warning("the journal %s could not be made shorter (%s); it grows", self._journal.name, error)
        self._records_until_compaction = max(COMPACT_RECORDS_MIN, 2 * len(snapshot))

    def _restore(self) -> Machine:
        """The machine that the journal's records make. Raises ConfigurationError."""
        journal = self._journal
        try:
            return Machine.restore(
                journal.records(),
                term=journal.term,
                lease_ms=self._membership.lease_ms,
                now_ms=self._clock.now_ms(),
                checkpoints=self._checkpoints,
                drain_ms=self._membership.drain_ms,
            )
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
