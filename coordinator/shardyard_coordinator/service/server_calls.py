"""Carries out effects on threads of a pool, and reports the results to the machine.

Owns: the pool. Invariants: no call to a server is made under the mailbox's lock. Every call that the machine waits for
ends with an event, whether the call succeeds or fails. Must not know: what is decided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from shardyard.domain.errors import Internal, NotReady, ShardyardError
from shardyard.domain.ids import JobId
from shardyard.domain.layout.layouts import PartitionMap
from shardyard.domain.push_names import LeasedSource, SourceKey
from shardyard.runtime.waits import WaitRegistry
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.flows.work_verdicts import verdicts_before
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.records import Entry
from shardyard_coordinator.service.checkpoint_io import CheckpointIO
from shardyard_coordinator.service.mailbox import Mailbox
from shardyard_coordinator.service.server_client import ServerClient

log = logging.getLogger("shardyard.coordinator")

THREADS: Final = 8
"""Threads that call servers, for all jobs together."""
LEASES_READ_MAX: Final = 64
"""When workers are lost, the watermarks of at most this many of their leases are read for the audit."""

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

    def open_later(self, openings: Iterable[effects.OpenPartitions]) -> None:
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
        created = False
        try:
            for effect in wanted:
                self._servers.create(effect)
            created = True
        finally:
            ended = events.PartitionsCreated if created else events.PartitionsRefused
            self.handle(ended(wanted[0].job, wanted[0].generation))

    def open(self, wanted: Sequence[effects.OpenPartitions]) -> None:
        opened = False
        try:
            for effect in wanted:
                self._servers.open(effect)
            opened = True
        finally:
            ended = events.PartitionsOpened if opened else events.OpeningFailed
            self.handle(ended(wanted[0].job, wanted[0].generation))

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
        job, draft = wanted.subject.job, wanted.draft
        failure: ShardyardError = Internal("the coordinator could not take it; its log has more")
        try:
            what = f"checkpoint {draft.number} of job {wanted.subject.name!r} to be written to {wanted.url}"
            with self._wait_registry.over(lambda: what):
                taken = self._checkpoint_io.take(
                    wanted.subject,
                    wanted.map,
                    draft,
                    url=wanted.url,
                    base=wanted.base,
                    keep=wanted.keep,
                    oldest=wanted.oldest,
                    logs=wanted.logs,
                    keepers=wanted.keepers,
                    verdicts=partial(self._verdicts_before, job),
                )
        except ShardyardError as error:
            failure = error
        else:
            self.handle(
                events.CheckpointTaken(job, draft.number, taken.number, taken.step, taken.created_s, taken.feedback)
            )
            return
        finally:
            # the machine ignores it for a draft that was taken
            self.handle(events.CheckpointFailed(job, draft.number, failure))

    def _verdicts_before(self, job: JobId, step: int) -> list[Entry]:
        with self._mailbox.machine() as machine:
            return [entry for each in machine.jobs if each.id == job for entry in verdicts_before(each, step)]

    def _forget_sources(self, wanted: effects.ForgetSources) -> None:
        for server, owned in wanted.map.by_server().items():
            try:
                self._servers.forget_sources(wanted, Server(server, owned[0].address))
            except ShardyardError as error:
                log.debug("server %s forgets no sources of job %s now: %s", server, wanted.job, error.what)

    def _read_departed(self, wanted: effects.ReadDeparted) -> None:
        job, map_ = wanted.job, wanted.map
        try:
            found = tuple((worker, self._servers.watermarks(job, map_, worker)) for worker in wanted.workers)
        except ShardyardError as error:
            log.debug("job %s: the watermarks of departed workers will be read again: %s", job, error.what)
            self.handle(events.DepartedUnread(job))
        else:
            self.handle(events.DepartedRead(job, map_.generation, found))

    def _read_steps(self, wanted: effects.ReadSteps) -> None:
        try:
            step = self._servers.highest_next(wanted)
        except ShardyardError as error:
            log.debug("job %s: its step will be read again: %s", wanted.job, error.what)
            self.handle(events.StepsUnread(wanted.job))
        else:
            self.handle(events.StepsRead(wanted.job, wanted.map.generation, step))

    def _pace(self, wanted: effects.PaceServers) -> None:
        try:
            self._servers.pace(wanted)
        except ShardyardError as error:
            log.debug("job %s: the servers will be told their consistency mode again: %s", wanted.job, error.what)
            self.handle(events.ServersUnpaced(wanted.job))
        else:
            self.handle(events.ServersPaced(wanted.job, wanted.map.generation, wanted.consistency.number))

    def _restore_partitions(self, wanted: effects.RestorePartitions) -> None:
        job, generation = wanted.subject.job, wanted.map.generation
        failure: ShardyardError = Internal("partitions were not restored")
        try:
            number = wanted.bases[0].number
            what = f"checkpoint {number} of job {wanted.subject.name!r} to be restored from {wanted.url}"
            with self._wait_registry.over(lambda: what):
                self._checkpoint_io.restore(
                    wanted.subject,
                    wanted.map,
                    url=wanted.url,
                    bases=wanted.bases,
                    life=wanted.life,
                    partitions=wanted.partitions,
                    working=wanted.working,
                    begun=wanted.begun,
                    step=wanted.step,
                )
        except ShardyardError as error:
            failure = error
        else:
            self.handle(events.PartitionsRestored(job, generation))
            return
        finally:
            # the machine ignores it for partitions that were restored
            self.handle(events.RestoreFailed(job, generation, failure))

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
