"""The coordinator as a service: requests to events, the machine under one lock, effects carried out.

Owns: the lock, the ticker thread, the threads that call servers. Invariants: the machine is touched under the lock
only; records are on the disk before any other effect of the same event begins, and before the lock is given up; the
lock is never held over a call to a server; if the journal cannot be written, nothing is decided until it can be, and
then the machine begins anew where the journal's records end, as after a restart.
Must not know: what is decided (the machine does), how messages look (the door does).
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from typing import Final, TypeVar

from shardyard.config.settings import MembershipSettings
from shardyard.domain.errors import ConfigurationError, Internal, NotReady, ShardyardError
from shardyard.domain.ids import Incarnation, JobId
from shardyard.domain.layout.layouts import PartitionMap
from shardyard.domain.limits import PROTOCOL
from shardyard.domain.push_names import DataLease, LeasedSource, SourceKey
from shardyard.runtime.clock import Clock
from shardyard.runtime.waits import WaitRegistry
from shardyard.transport.interfaces import Context, Network, Service
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.records import Entry
from shardyard_coordinator.service import door, status
from shardyard_coordinator.service.checkpoint_io import CheckpointIO
from shardyard_coordinator.service.journal import Journal
from shardyard_coordinator.service.residual_collection import ResidualCollections
from shardyard_coordinator.service.server_client import ServerClient
from shardyard_coordinator.work.feeds import FeedDone, FeedOpening, LeaseWait

log = logging.getLogger("shardyard.coordinator")

TICK_MS: Final = 100
CALLERS: Final = 8
"""Threads that call servers at a time, for all jobs."""
COMPACT_RECORDS_MIN: Final = 4_096
"""After so many records, and no fewer than twice those of a snapshot, the journal is replaced by a snapshot."""
ROUNDS_MAX: Final = 4
"""A request that has partitions created or opened is put to the machine again; once is enough."""

HELD_READ_MAX: Final = 64
"""Of so many leases of workers that are lost at once it is read, for the audit, where they ended."""
_BROKEN_WHY: Final = "what is decided is written down before anybody is told, or a restart would decide against it"
_BROKEN_TODO: Final = "make room on the disk; the coordinator goes on by itself then"

A = TypeVar("A")


class Coordinator:
    """Serves `service` from `start` until `stop`, going on from the journal's records. The journal stays the caller's
    to close, after `stop`. `checkpoints`: the URL of checkpoints of jobs that leave it to the coordinator. Raises
    ConfigurationError for a journal that cannot be read."""

    def __init__(
        self,
        *,
        network: Network,
        journal: Journal,
        clock: Clock,
        membership: MembershipSettings,
        checkpoints: str | None = None,
        tick_ms: int = TICK_MS,
    ) -> None:
        self._tick_ms = tick_ms
        self._journal = journal
        self._clock = clock
        self._membership = membership
        self._lock = threading.Lock()
        self._checkpoints = checkpoints
        self._machine = self._restore()
        self._tell_what_is_there()
        self._wait_registry = WaitRegistry(logger=log)
        self._servers = ServerClient(network, journal.term, self._wait_registry)
        self._feedback = ResidualCollections(self._workers_of, self._wait_registry)
        self._archive = CheckpointIO(self._servers, feedback=self._feedback, heartbeat_ms=membership.heartbeat_ms)
        self._callers = ThreadPoolExecutor(CALLERS, thread_name_prefix="coordinator-calls")
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="coordinator-ticker", daemon=True)
        self._broken: str | None = None
        """Why the journal could not be written; the machine is ahead of it then."""
        self._release = version("shardyard")
        self._records_until_compaction = 0
        self._compact()
        self.service = self._make_service()

    def start(self) -> None:
        """Begins to notice that time passes, and does again what a former life may not have done."""
        with self._lock:
            for effect in self._machine.resume():
                self._dispatch(effect)
        self._ticker.start()

    def stop(self) -> None:
        """Waits for its threads. Requests that still come are answered with NotReady."""
        with self._lock:
            self._stop.set()
        self._feedback.close()
        with self._wait_registry.over(lambda: "calls to servers to end, before the coordinator does"):
            if self._ticker.is_alive():
                self._ticker.join()
            self._callers.shutdown(wait=True, cancel_futures=True)
        self._servers.close()
        self._wait_registry.close()

    @property
    def is_finishing(self) -> bool:
        """Whether a job waits for its last checkpoint, or its final values are being read."""
        with self._lock:
            return any(
                job.state is effects.JobState.FINISHING or (job.readers.keep_values and len(job.readers))
                for job in self._machine.jobs
            )

    def _make_service(self) -> Service:
        service = Service("Coordinator")
        service.on(methods.REGISTER, self._register)
        service.on(methods.HEARTBEAT, self._heartbeat)
        service.on(methods.LEAVE, self._leave)
        service.on(methods.REPORT_EXIT, self._report_exit)
        service.on(methods.JOIN_JOB, self._join_job)
        service.on(methods.REGISTER_VARIABLES, self._register_variables)
        service.on(methods.COMMIT_VARIABLES, self._commit_variables)
        service.on(methods.OPEN_FEED, self._open_feed)
        service.on(methods.LEASE_DATA, self._lease_data)
        service.on(methods.CLOSE_LEASE, self._close_lease)
        service.on(methods.BEGIN_BATCH, self._begin_batch)
        service.on(methods.REPORT_NOT_FINITE, self._report_not_finite)
        service.on(methods.DECIDE_STEP, self._decide_step)
        service.on(methods.READ_MAKE_UP, self._read_make_up)
        service.on(methods.REBASE_SOURCE, self._rebase_source)
        service.on(methods.TAKE_CHECKPOINT, self._take_checkpoint)
        service.on(methods.STOP_JOB, self._stop_job)
        service.on(methods.SWITCH_CONSISTENCY, self._switch_consistency)
        service.on(methods.REPORT_FEEDBACK, self._report_feedback)
        service.on(methods.TAKE_UP_FEEDBACK, self._take_up_feedback)
        service.on(methods.RESTORE_CHECKPOINT, self._restore_checkpoint)
        service.on(methods.FOLLOW_JOB, self._follow_job)
        service.on(methods.REPORT_EVALUATION, self._report_evaluation)
        service.on(methods.STATUS, self._status)
        service.on(methods.LIST_QUARANTINED, self._list_quarantined)
        service.on(methods.READ_AUDIT, self._read_audit)
        return service

    # ---- handlers: one per method

    def _register(self, request: wire.RegisterRequest, _: Context) -> wire.RegisterReply:
        answer = self._ask(door.registered(request), effects.Registered)
        return door.register_reply(answer.incarnation, self._journal.term, self._membership)

    def _heartbeat(self, request: wire.HeartbeatRequest, _: Context) -> wire.HeartbeatReply:
        event = door.heartbeat(request)
        answer = self._ask(event, effects.HeartbeatReply)
        wanted = self._feedback.wanted(JobId(request.caller.job), event.incarnation)
        return door.heartbeat_reply(answer, self._journal.term, wanted)

    def _leave(self, request: wire.LeaveRequest, _: Context) -> wire.LeaveReply:
        self._ask(door.left(request), effects.Acknowledged)
        return wire.LeaveReply()

    def _report_exit(self, request: wire.ReportExitRequest, _: Context) -> wire.ReportExitReply:
        self._ask(door.exit_reported(request), effects.Acknowledged)
        return wire.ReportExitReply()

    def _join_job(self, request: wire.JoinJobRequest, _: Context) -> wire.JoinJobReply:
        return door.join_reply(self._ask(door.joined(request), effects.Joined))

    def _register_variables(self, request: wire.RegisterVariablesRequest, _: Context) -> wire.RegisterVariablesReply:
        return door.placed_reply(self._ask(door.variables_registered(request), effects.VariablesPlaced))

    def _commit_variables(self, request: wire.CommitVariablesRequest, _: Context) -> wire.CommitVariablesReply:
        self._ask(door.variables_committed(request), effects.Acknowledged)
        return wire.CommitVariablesReply()

    def _open_feed(self, request: wire.OpenFeedRequest, _: Context) -> wire.OpenFeedReply:
        return door.feed_reply(self._ask(door.feed_opened(request), FeedOpening))

    def _lease_data(self, request: wire.LeaseDataRequest, _: Context) -> wire.LeaseDataReply:
        answer = self._ask(door.lease_requested(request), object)
        assert isinstance(answer, DataLease | LeaseWait | FeedDone), answer
        return door.lease_reply(answer)

    def _close_lease(self, request: wire.CloseLeaseRequest, _: Context) -> wire.CloseLeaseReply:
        answer = self._ask(door.lease_returned(request), effects.LeaseClosed)
        return wire.CloseLeaseReply(done=answer.done)

    def _begin_batch(self, request: wire.BeginBatchRequest, _: Context) -> wire.BeginBatchReply:
        return door.batch_reply(self._ask(door.batch_begun(request), effects.BatchVerdict))

    def _report_not_finite(self, request: wire.ReportNotFiniteRequest, _: Context) -> wire.ReportNotFiniteReply:
        return door.not_finite_reply(self._ask(door.not_finite_reported(request), effects.NotFiniteVerdict))

    def _decide_step(self, request: wire.DecideStepRequest, _: Context) -> wire.DecideStepReply:
        return door.decision_reply(self._ask(door.step_told_of(request), effects.StepDecision))

    def _read_make_up(self, request: wire.ReadMakeUpRequest, _: Context) -> wire.ReadMakeUpReply:
        return door.make_up_reply(self._ask(door.make_up_asked(request), effects.MakeupBatches))

    def _list_quarantined(self, request: wire.ListQuarantinedRequest, _: Context) -> wire.ListQuarantinedReply:
        with self._lock:
            found = status.list_quarantined(self._machine, JobId(request.job))
        return door.quarantined_reply(found)

    def _read_audit(self, request: wire.ReadAuditRequest, _: Context) -> wire.ReadAuditReply:
        name, after = door.audit_wanted(request)
        with self._lock:
            job = self._journal.find_job(name)
            page = self._journal.read_audit(job, after)
        return door.audit_reply(job, page)

    def _rebase_source(self, request: wire.RebaseSourceRequest, _: Context) -> wire.RebaseSourceReply:
        return door.rebase_reply(self._ask(door.rebase_asked(request), effects.Rebased))

    def _take_checkpoint(self, request: wire.TakeCheckpointRequest, _: Context) -> wire.TakeCheckpointReply:
        return door.checkpoint_reply(self._ask(door.checkpoint_asked(request), effects.CheckpointProgress))

    def _stop_job(self, request: wire.StopJobRequest, _: Context) -> wire.StopJobReply:
        return door.stop_reply(self._ask(door.stop_asked(request), effects.StopTaken))

    def _switch_consistency(self, request: wire.SwitchConsistencyRequest, _: Context) -> wire.SwitchConsistencyReply:
        return door.switch_reply(self._ask(door.switch_asked(request), effects.SwitchTaken))

    def _report_feedback(self, request: wire.ReportFeedbackRequest, _: Context) -> wire.ReportFeedbackReply:
        caller, said = door.feedback_reported(request)
        copy = self._feedback.report(caller.job, caller.incarnation, request.number, said)
        return wire.ReportFeedbackReply(copy=copy)

    def _take_up_feedback(self, request: wire.TakeUpFeedbackRequest, _: Context) -> wire.TakeUpFeedbackReply:
        answer = self._ask(door.feedback_read(request), effects.FeedbackVerdict)
        return wire.TakeUpFeedbackReply(taken=answer.taken)

    def _restore_checkpoint(self, request: wire.RestoreCheckpointRequest, _: Context) -> wire.RestoreCheckpointReply:
        """What is on the storage is looked at here: the machine knows of none."""
        name, number, url = door.restore_asked(request)
        if request.cancel:
            self._ask(events.RestoreCancelled(name), effects.RestorePlanned)
            return wire.RestoreCheckpointReply()
        with self._lock:
            urls = [job.keeping.book.url for job in self._machine.jobs if job.settings.name == name]
        url = url or next((each for each in reversed(urls) if each), None) or self._checkpoints or ""
        if not url:
            raise ConfigurationError("nobody knows where the checkpoints are", why="", todo="say it with --url")
        origin, damaged = self._archive.find(url, name, number)
        planned = self._ask(events.RestoreOrdered(origin), effects.RestorePlanned)
        return wire.RestoreCheckpointReply(
            number=origin.number, step=origin.step, url=url, running=planned.running, damaged=damaged
        )

    def _follow_job(self, request: wire.FollowJobRequest, _: Context) -> wire.FollowJobReply:
        followed = self._ask(door.reader_heard(request), effects.JobView)
        return door.follow_reply(followed, layout=request.layout)

    def _report_evaluation(self, request: wire.ReportEvaluationRequest, _: Context) -> wire.ReportEvaluationReply:
        self._ask(door.evaluation_reported(request, int(time.time())), effects.Acknowledged)
        return wire.ReportEvaluationReply()

    def _status(self, _request: wire.StatusRequest, _: Context) -> wire.StatusReply:
        with self._lock:
            yard = status.describe(self._machine, self._clock.now_ms())
        reply = door.status_reply(yard, waiting_for=self._wait_registry.waiting_for)
        reply.time_ms, reply.protocol, reply.release = time.time_ns() // 1_000_000, PROTOCOL, self._release
        return reply

    # ---- the machine and its effects

    def _ask(self, event: events.Event, kind: type[A]) -> A:
        """Puts a request to the machine and does what its answer waits for. Raises what refuses it."""
        asked = event
        for _ in range(ROUNDS_MAX):
            wanted = self._handle(asked)
            for effect in wanted:
                if isinstance(effect, effects.Reply):
                    assert isinstance(effect.answer, kind), effect
                    return effect.answer
            asked = self._await(event, wanted)
        raise Internal(f"{type(event).__name__} was put to the machine {ROUNDS_MAX} times and has no answer")

    def _await(self, event: events.Event, wanted: Sequence[effects.Effect]) -> events.Event:
        """Carries out the effects that a request's answer waits for. Returns the event that brings the answer."""
        for effect in wanted:
            match effect:
                case effects.CreatePartitions():
                    self._create([each for each in wanted if isinstance(each, effects.CreatePartitions)])
                    return event
                case effects.OpenPartitions():
                    self._open([each for each in wanted if isinstance(each, effects.OpenPartitions)])
                    return event
                case effects.ReadLedger():
                    assert isinstance(event, events.LeaseReturned), event
                    return events.LedgerRead(event, self._servers.lowest_next(effect), effect.map.generation)
                case effects.ReadWatermarks():
                    assert isinstance(event, events.RebaseRequested), event
                    nexts = self._servers.watermarks(effect.job, effect.map, effect.worker)
                    return events.WatermarksRead(event, effect.map.generation, nexts)
                case effects.SkipLostPushes():
                    assert isinstance(event, events.RebaseRequested), event
                    self._servers.pass_over(effect)
                    return events.LostPushesSkipped(event, effect.lost)
                case _:
                    continue
        raise Internal(f"{type(event).__name__} has no answer")

    def _handle(self, event: events.Event) -> list[effects.Effect]:
        """One step of the machine. Persists, logs, and hands to other threads what nobody waits for; returns all."""
        with self._lock:
            if self._stop.is_set():
                raise NotReady("the coordinator is stopping")
            if self._broken is not None:
                raise NotReady(self._broken, why=_BROKEN_WHY, todo=_BROKEN_TODO)
            wanted = self._machine.handle(event, self._clock.now_ms())
            self._persist([effect for effect in wanted if isinstance(effect, effects.Persist)])
            for effect in wanted:
                self._dispatch(effect)
        return wanted

    def _persist(self, records: Sequence[effects.Persist]) -> None:
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
        """Replaces the journal's records by the fewest that say the same."""
        snapshot = self._machine.snapshot()
        try:
            with self._wait_registry.over(lambda: f"the journal {self._journal.name} to be made shorter"):
                self._journal.replace([(record.kind, record.body) for record in snapshot])
        except sqlite3.Error as error:
            log.warning("the journal %s could not be made shorter (%s); it grows", self._journal.name, error)
        self._records_until_compaction = max(COMPACT_RECORDS_MIN, 2 * len(snapshot))

    def _mend(self) -> None:
        """Goes on from the journal's records if it can be written again. Nobody was told of anything that is not in it,
        so this is a restart without a new term."""
        with self._lock:
            if self._broken is None or self._stop.is_set():
                return
            try:
                machine = self._restore()
                self._journal.replace([(record.kind, record.body) for record in machine.snapshot()])
            except (sqlite3.Error, ConfigurationError) as error:
                log.debug("the journal cannot be written yet: %s", error)
                return
            self._machine, self._broken = machine, None
            self._tell_what_is_there()
            for effect in machine.resume():
                self._dispatch(effect)

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

    def _tell_what_is_there(self) -> None:
        if self._machine.members or self._machine.jobs:
            log.info(
                "going on from the journal %s: %d members, %d unfinished jobs",
                self._journal.name,
                len(self._machine.members),
                sum(not job.state.ended for job in self._machine.jobs),
            )

    def _dispatch(self, effect: effects.Effect) -> None:
        match effect:
            case effects.LogMessage(text, warning):
                log.log(logging.WARNING if warning else logging.INFO, "%s", text)
            case effects.FenceOnServers():
                self._later(self._fence, effect)
            case effects.DropJob():
                self._later(self._drop, effect)
            case effects.TakeCheckpoint():
                self._later(self._write_checkpoint, effect)
            case effects.ForgetSources():
                self._later(self._forget_sources, effect)
            case effects.ReadDeparted():
                self._later(self._read_departed, effect)
            case effects.ReadSteps():
                self._later(self._read_steps, effect)
            case effects.PaceServers():
                self._later(self._pace, effect)
            case effects.RestorePartitions():
                self._later(self._restore_partitions, effect)
            case effects.ForgetServer(server):
                self._later(self._servers.forget, server)
            case _:
                pass

    def _tick(self) -> None:
        while not self._stop.wait(self._tick_ms / 1000):
            self._mend()
            try:
                wanted = self._handle(events.Ticked())
            except ShardyardError as error:
                log.debug("no tick: %s", error)
                continue
            except Exception:
                log.exception("a tick failed")
                continue
            openings = [effect for effect in wanted if isinstance(effect, effects.OpenPartitions)]
            for job in dict.fromkeys(effect.job for effect in openings):
                self._later(self._open, [effect for effect in openings if effect.job == job])

    def _workers_of(self, job: JobId) -> frozenset[Incarnation]:
        with self._lock:
            return frozenset(worker for each in self._machine.jobs if each.id == job for worker in each.workers)

    # ---- calls to servers; never under the lock

    def _create(self, wanted: Sequence[effects.CreatePartitions]) -> None:
        created = False
        try:
            for effect in wanted:
                self._servers.create(effect)
            created = True
        finally:
            job, generation = wanted[0].job, wanted[0].generation
            ended = events.PartitionsCreated if created else events.PartitionsRefused
            self._handle(ended(job, generation))

    def _open(self, wanted: Sequence[effects.OpenPartitions]) -> None:
        opened = False
        try:
            for effect in wanted:
                self._servers.open(effect)
            opened = True
        finally:
            job, generation = wanted[0].job, wanted[0].generation
            ended = events.PartitionsOpened if opened else events.OpeningFailed
            self._handle(ended(job, generation))

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
                reached = self._read_for_good(effect.job, effect.map, effect.held[:HELD_READ_MAX])
        finally:
            self._handle(events.WorkersFenced(effect.job, effect.workers, reached))

    def _read_for_good(
        self, job: JobId, map_: PartitionMap, held: Sequence[LeasedSource]
    ) -> tuple[tuple[LeasedSource, int], ...]:
        """Where sources stand whose workers every server refuses; nothing of it if a server does not answer."""
        try:
            return tuple(
                (source, self._servers.lowest_next(effects.ReadLedger(job, map_, (SourceKey(source),))))
                for source in held
            )
        except ShardyardError as error:
            log.debug("where lost workers have left their work was not read: %s", error.what)
            return ()

    def _drop(self, effect: effects.DropJob) -> None:
        try:
            self._servers.drop(effect)
        except ShardyardError as error:
            log.warning("server %s did not drop job %s: %s", effect.server.incarnation, effect.job, error.what)

    def _write_checkpoint(self, wanted: effects.TakeCheckpoint) -> None:
        job, draft = wanted.subject.job, wanted.draft
        failure: ShardyardError = Internal("the coordinator could not take it; its log has more")
        try:
            what = f"checkpoint {draft.number} of job {wanted.subject.name!r} to be written to {wanted.url}"
            with self._wait_registry.over(lambda: what):
                taken = self._archive.take(
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
            self._handle(
                events.CheckpointTaken(job, draft.number, taken.number, taken.step, taken.created_s, taken.feedback)
            )
            return
        finally:
            # nothing happens where it was taken
            self._handle(events.CheckpointFailed(job, draft.number, failure))

    def _verdicts_before(self, job: JobId, step: int) -> list[Entry]:
        with self._lock:
            return [
                entry for each in self._machine.jobs if each.id == job for entry in each.counting.verdicts_before(step)
            ]

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
            log.debug("job %s: what partitions have of workers that are gone is asked again: %s", job, error.what)
            self._handle(events.DepartedUnread(job))
        else:
            self._handle(events.DepartedRead(job, map_.generation, found))

    def _read_steps(self, wanted: effects.ReadSteps) -> None:
        try:
            step = self._servers.highest_next(wanted)
        except ShardyardError as error:
            log.debug("job %s: where it stands is asked again: %s", wanted.job, error.what)
            self._handle(events.StepsUnread(wanted.job))
        else:
            self._handle(events.StepsRead(wanted.job, wanted.map.generation, step))

    def _pace(self, wanted: effects.PaceServers) -> None:
        try:
            self._servers.pace(wanted)
        except ShardyardError as error:
            log.debug("job %s: servers are told again: %s", wanted.job, error.what)
            self._handle(events.ServersUnpaced(wanted.job))
        else:
            self._handle(events.ServersPaced(wanted.job, wanted.map.generation, wanted.consistency.number))

    def _restore_partitions(self, wanted: effects.RestorePartitions) -> None:
        job, generation = wanted.subject.job, wanted.map.generation
        failure: ShardyardError = Internal("partitions were not restored")
        try:
            number = wanted.bases[0].number
            what = f"checkpoint {number} of job {wanted.subject.name!r} to be restored from {wanted.url}"
            with self._wait_registry.over(lambda: what):
                self._archive.restore(
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
            self._handle(events.PartitionsRestored(job, generation))
            return
        finally:
            # nothing happens where they were
            self._handle(events.RestoreFailed(job, generation, failure))

    def _later(self, work: Callable[[A], None], about: A) -> None:
        try:
            self._callers.submit(work, about).add_done_callback(_log_failure)
        except RuntimeError as error:
            # the interpreter is going down, and with it, in a yard inside one process, everybody who could be told
            log.debug("not done any more: %s", error)


def _log_failure(future: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if isinstance(error, NotReady):
        log.debug("given up: %s", error)
    elif error is not None:
        log.error("a call to servers failed", exc_info=error)
