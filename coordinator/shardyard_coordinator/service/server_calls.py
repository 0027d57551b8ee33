"""Carries out effects on threads of a pool, and reports the results to the machine.

Owns: the pool. Invariants: no call to a server is made under the mailbox's lock. Every call that the machine waits for
ends with an event, whether the call succeeds or fails. Must not know: what is decided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from shardyard.domain.errors import Internal, NotReady, ShardyardError
from shardyard.domain.ids import JobId
from shardyard.domain.layout.layouts import PartitionMap
from shardyard.domain.push_names import LeasedSource, SourceKey
from shardyard.runtime.waits import WaitRegistry
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.flows.work_verdicts import verdicts_before
from shardyard_coordinator.placement.placement import servers_of
from shardyard_coordinator.records import Entry
from shardyard_coordinator.service.checkpoint_io import CheckpointIO
from shardyard_coordinator.service.mailbox import Mailbox
from shardyard_coordinator.service.server_client import ServerClient

log = logging.getLogger("shardyard.coordinator")

THREADS: Final = 8
"""Threads that call servers, for all jobs together."""
LEASES_READ_MAX: Final = 64
"""When workers are lost, the watermarks of at most this many of their leases are read for the audit."""

_UNEXPECTED: Final = Internal("the coordinator met an unexpected error; its log has the traceback")

A = TypeVar("A")


class ServerCalls:
    def __init__(
        self, mailbox: Mailbox, servers: ServerClient, checkpoint_io: CheckpointIO, wait_registry: WaitRegistry
    ) -> None:
        self._mailbox = mailbox
        self._servers = servers
        self._checkpoint_io = checkpoint_io
        self._wait_registry = wait_registry
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="coordinator-calls")
        self._background: dict[type[effects.Effect], Callable[[Any], None]] = {
            effects.FenceOnServers: self._fence,
            effects.DropJob: self._drop,
            effects.TakeCheckpoint: self._take_checkpoint,
            effects.ForgetSources: self._forget_sources,
            effects.ReadDeparted: self._read_departed,
            effects.ReadSteps: self._read_steps,
            effects.PaceServers: self._pace,
            effects.RestorePartitions: self._restore_partitions,
            effects.ForgetServer: lambda effect: self._servers.forget(effect.server),
        }
        """The effects that no request waits for."""

    def handle(self, event: events.Event) -> list[effects.Effect]:
        """Gives an event to the machine and starts its effects. Raises as `Mailbox.handle`."""
        return self._mailbox.handle(event, self.start)

    def start(self, effect: effects.Effect) -> None:
        """Logs it, or gives it to the pool. Effects that a request or the ticker waits for are not started here."""
        if isinstance(effect, effects.LogMessage):
            log.log(logging.WARNING if effect.warning else logging.INFO, "%s", effect.text)
        elif work := self._background.get(type(effect)):
            self._later(work, effect)

    def tick(self) -> None:
        """Has the machine do what is due. Raises as `Mailbox.handle`."""
        found = self.handle(events.Ticked())
        self._open_later(effect for effect in found if isinstance(effect, effects.OpenPartitions))

    def _open_later(self, openings: Iterable[effects.OpenPartitions]) -> None:
        """Opens partitions in the background, the servers of one job one after the other."""
        by_job: dict[JobId, list[effects.OpenPartitions]] = {}
        for effect in openings:
            by_job.setdefault(effect.job, []).append(effect)
        for of_job in by_job.values():
            self._later(self.open, of_job)

    def close(self) -> None:
        """Waits for the calls under way. Those that have not begun are dropped."""
        with self._wait_registry.over(lambda: "calls to servers to end, before the coordinator does"):
            self._pool.shutdown(wait=True, cancel_futures=True)

    # ---- calls that a request or the ticker waits for

    def create(self, wanted: Sequence[effects.CreatePartitions]) -> None:
        job, generation = wanted[0].spec.job, wanted[0].generation
        with self._reported(events.PartitionsCreated(job, generation), events.NotAnswered(job, wanted[0])):
            for effect in wanted:
                self._servers.create(effect)

    def open(self, wanted: Sequence[effects.OpenPartitions]) -> None:
        job, generation = wanted[0].job, wanted[0].generation
        with self._reported(events.PartitionsOpened(job, generation), events.NotAnswered(job, wanted[0])):
            for effect in wanted:
                self._servers.open(effect)
        self.tick()  # workers wait for the first checkpoint, which is due

    @contextmanager
    def _reported(self, done: events.Event, failed: events.Event) -> Iterator[None]:
        """Reports one of the events at the end of the block: `failed` if an error ends it."""
        event = failed
        try:
            yield
            event = done
        finally:
            self.handle(event)

    # ---- calls in the background

    def _fence(self, effect: effects.FenceOnServers) -> None:
        reached: tuple[tuple[LeasedSource, int], ...] = ()
        missed = False
        try:
            for server in effect.servers:
                try:
                    self._servers.fence(effect.job, server, effect.workers)
                except ShardyardError as error:
                    missed = True
                    log.warning(
                        "server %s was not told to refuse workers %s (%s); it learns that from its next heartbeat",
                        server.incarnation,
                        ", ".join(map(str, effect.workers)),
                        error.what,
                    )
            if not missed and effect.map is not None:
                reached = self._read_final(effect.job, effect.map, effect.held[:LEASES_READ_MAX])
        finally:
            self.handle(events.WorkersFenced(effect.job, effect.workers, reached))

    def _read_final(
        self, job: JobId, map_: PartitionMap, held: Sequence[LeasedSource]
    ) -> tuple[tuple[LeasedSource, int], ...]:
        """The lowest next sequence of each source. The sources' workers are fenced on every server, so it is final.
        Empty if a server does not answer."""
        try:
            return tuple(
                (source, self._servers.lowest_next(effects.ReadLedger(job, map_, (SourceKey(source),))))
                for source in held
            )
        except ShardyardError as error:
            log.debug("the watermarks of lost workers' leases were not read: %s", error.what)
            return ()

    def _drop(self, effect: effects.DropJob) -> None:
        try:
            self._servers.drop(effect)
        except ShardyardError as error:
            log.warning("server %s did not drop job %s: %s", effect.server.incarnation, effect.job, error.what)

    def _take_checkpoint(self, wanted: effects.TakeCheckpoint) -> None:
        job, name, number = wanted.spec.job, wanted.spec.settings.name, wanted.draft.number
        event: events.Event = events.CheckpointFailed(job, number, _UNEXPECTED)
        try:
            with self._wait_registry.over(lambda: f"checkpoint {number} of job {name!r} to be written to {wanted.url}"):
                event = self._checkpoint_io.take(wanted, partial(self._verdicts_before, job))
        except ShardyardError as error:
            event = events.CheckpointFailed(job, number, error)
        finally:
            self.handle(event)

    def _verdicts_before(self, job: JobId, step: int) -> list[Entry]:
        with self._mailbox.machine() as machine:
            return [entry for each in machine.jobs if each.id == job for entry in verdicts_before(each, step)]

    def _forget_sources(self, wanted: effects.ForgetSources) -> None:
        for server, _ in servers_of(wanted.map):
            try:
                self._servers.forget_sources(wanted, server)
            except ShardyardError as error:
                what = "server %s forgets no sources of job %s now: %s"
                log.debug(what, server.incarnation, wanted.job, error.what)

    def _read_departed(self, wanted: effects.ReadDeparted) -> None:
        job, map_ = wanted.job, wanted.map

        def read() -> events.Event:
            found = tuple((worker, self._servers.watermarks(job, map_, worker)) for worker in wanted.workers)
            return events.DepartedRead(job, map_.generation, found)

        self._try("read the watermarks of departed workers", read, wanted)

    def _read_steps(self, wanted: effects.ReadSteps) -> None:
        def read() -> events.Event:
            return events.StepsRead(wanted.job, wanted.map.generation, self._servers.highest_next(wanted))

        self._try("read its step", read, wanted)

    def _pace(self, wanted: effects.PaceServers) -> None:
        def pace() -> events.Event:
            self._servers.pace(wanted)
            return events.ServersPaced(wanted.job, wanted.map.generation, wanted.consistency.number)

        self._try("tell the servers its consistency mode", pace, wanted)

    def _try(self, what: str, call: Callable[[], events.Event], wanted: effects.MapEffect) -> None:
        """Reports the event that the calls to servers lead to, or that they were not answered. Then the machine asks
        again."""
        event: events.Event = events.NotAnswered(wanted.job, wanted)
        try:
            event = call()
        except ShardyardError as error:
            log.debug("job %s: could not %s, and will try again: %s", wanted.job, what, error.what)
        self.handle(event)

    def _restore_partitions(self, wanted: effects.RestorePartitions) -> None:
        job, generation, name = wanted.spec.job, wanted.map.generation, wanted.spec.settings.name
        event: events.Event = events.RestoreFailed(job, generation, _UNEXPECTED)
        what = f"checkpoint {wanted.bases[0].number} of job {name!r} to be restored from {wanted.url}"
        try:
            with self._wait_registry.over(lambda: what):
                self._checkpoint_io.restore(wanted)
            event = events.PartitionsRestored(job, generation)
        except ShardyardError as error:
            event = events.RestoreFailed(job, generation, error)
        finally:
            self.handle(event)

    def _later(self, work: Callable[[A], None], about: A) -> None:
        try:
            self._pool.submit(work, about).add_done_callback(_log_failure)
        except RuntimeError as error:
            # the pool is closed, or the interpreter is ending; in a yard inside one process, all roles end with it
            log.debug("not done any more: %s", error)


def _log_failure(future: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if isinstance(error, NotReady):
        log.debug("given up: %s", error)
    elif error is not None:
        log.error("a call to servers failed", exc_info=error)
