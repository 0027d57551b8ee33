"""A worker's place in a yard: its membership, its job, and the coordinator's last reply.

Owns: the connection to the coordinator, the membership, the failure of the job. Invariants: once the job has failed,
every call of `check` raises that failure; a call to the coordinator that gets no answer is retried within the budget,
since each is safe to repeat. Must not know: tensors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from shardyard.config.configuration import parse_job_settings
from shardyard.config.settings import JobSettings, Settings
from shardyard.domain import errors
from shardyard.domain.consistency import Consistency, UpdateMode
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, MemberRole
from shardyard.domain.push_names import RankLease
from shardyard.runtime.log import bind_process
from shardyard.runtime.waits import WaitRegistry
from shardyard.transport.error_codes import from_detail
from shardyard.transport.interfaces import Network
from shardyard.transport.membership_client import Membership, MembershipClient
from shardyard.wire import common_messages, lease_messages, methods
from shardyard.wire.method import Method
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.session.interrupts import Interrupts
from shardyard_worker.session.retry import RetryPolicy
from shardyard_worker.session.step_barrier import StepBarrier

log = logging.getLogger("shardyard.worker")

ASK_AGAIN_MS: Final = 100
"""The pause between two calls that ask whether a checkpoint is committed."""

Request = TypeVar("Request")
Response = TypeVar("Response")


@dataclass(frozen=True)
class ProcessPlace:
    """Where this process runs, as its agent told it."""

    agent: Incarnation | None = None
    local_index: int = 0


@dataclass
class Progress:
    """What the next heartbeat reports."""

    step: int = 0
    samples: int = 0
    residual_norm: float = 0.0
    pushed: int = 0
    """Acknowledged pushes without leased data."""
    residual_lost: float = 0.0
    """Reported on leaving: the 2-norm of the residual that is lost with this worker."""


@dataclass(frozen=True)
class CheckpointTaken:
    """A committed checkpoint: its number, and the step at which it was taken."""

    number: int
    step: int


class Session:
    """One worker in one job, from joining to leaving. Safe for several threads."""

    def __init__(
        self,
        network: Network,
        coordinator: str,
        settings: Settings,
        place: ProcessPlace,
        metrics: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """`metrics` returns those for the next heartbeat."""
        self.network = network
        self.settings = settings
        self.progress = Progress()
        self.wait_registry = WaitRegistry(logger=log)
        """Explains all waits of this worker, in its log and to the coordinator."""
        self._metrics = metrics
        self._peer = network.connect(coordinator, name="coordinator", unavailable=errors.CoordinatorUnavailable)
        self._lock = threading.Lock()
        self._failure: errors.ShardyardError | None = None
        self._on_failure: list[Callable[[], None]] = []
        self._on_newer_map: list[Callable[[], None]] = []
        self._ranks: tuple[RankLease, ...] = ()
        self._left = False
        self.initializer = False
        self.chief = False
        self.generation = Generation(0)
        self.recovering = False
        self.step_barrier = StepBarrier()
        self.interrupts = Interrupts()
        self._goes_by: int | None = None
        self.checkpoint: CheckpointTaken | None = None
        """The job's newest checkpoint."""
        self.on_heard: Callable[[wire.HeartbeatReply], None] | None = None
        """Called with each heartbeat's reply, by the thread that sent the heartbeat."""
        self._enrolment = MembershipClient(
            self._peer,
            Membership(MemberRole.WORKER, agent=place.agent, local_index=place.local_index),
            on_reply=self._hear,
            on_lost=self.fail,
            report=self._report,
            grace_ms=settings.membership.coordinator_grace_ms,
        )

    # ---- joining and leaving

    def join(self) -> None:
        """Registers, and joins the job of the settings' name or starts it. Raises CoordinatorUnavailable, ..."""
        budget_ms = self.settings.worker.retry_budget_ms
        self._enrolment.register(patience_ms=budget_ms)
        bind_process(role="worker", id=self._enrolment.incarnation)
        wanted = self.settings.job
        request = wire.JoinJobRequest(
            caller=common_messages.caller_to_wire(self._enrolment.caller),
            name=wanted.name,
            settings_json=wanted.model_dump_json(),
        )
        reply = self.ask(methods.JOIN_JOB, request)
        self.job_settings: JobSettings = parse_job_settings(reply.settings_json)
        given = self.job_settings.consistency
        self.consistency = Consistency(0, given.mode, given.bound)
        if reply.HasField("consistency"):  # not all servers may use the settings' mode yet
            self.consistency = lease_messages.consistency_from_wire(reply.consistency)
        self._enrolment.job = JobId(reply.job)
        self.seed = reply.seed
        self.logical_ranks = reply.logical_ranks
        self.chief = reply.chief
        with self._lock:
            self._ranks = lease_messages.rank_leases_from_wire(reply.ranks)
        self._hear_news(reply)
        bind_process(job=wanted.name)
        log.info("%s job %r", "started" if reply.started else "joined", wanted.name)
        self._tell_differences(wanted, self.job_settings)
        self._enrolment.start()

    @property
    def has_left(self) -> bool:
        return self._left

    def leave(self, error: str = "") -> None:
        """Leaves the job and the yard. A second call does nothing."""
        with self._lock:
            if self._left:
                return
            self._left = True
            lost = self._failure is not None
        if not lost:
            self._report_last()
        # a coordinator that is being restarted must hear that this worker is done, not that it died
        patience_ms = 0 if error or lost else self.settings.worker.retry_budget_ms
        said = self.progress
        self._enrolment.leave(error, patience_ms=patience_ms, pushed=said.pushed, residual_lost=said.residual_lost)
        self._peer.close()
        self.wait_registry.close()

    def _report_last(self) -> None:
        """Sends a last heartbeat, so that `status` shows a finished job completely."""
        try:
            self._enrolment.beat_last()
        except Exception as error:  # noqa: BLE001 - metrics are the script's
            # a metric that cannot be read, as after a device failure, must not keep this worker from leaving
            log.debug("no last heartbeat: %s", error)

    def _tell_differences(self, wanted: JobSettings, given: JobSettings) -> None:
        theirs, mine = given.model_dump(mode="json"), wanted.model_dump(mode="json")
        differing = [name for name in mine if mine[name] != theirs[name] and name != "workers_expected"]
        if differing:
            log.warning(
                "the job runs with the settings of the worker that started it; they differ from this worker's in %s",
                ", ".join(f"job.{name} ({theirs[name]!r}, not {mine[name]!r})" for name in differing),
            )

    # ---- standing

    @property
    def caller(self) -> Caller:
        return self._enrolment.caller

    @property
    def mode(self) -> UpdateMode:
        return self.job_settings.consistency.mode.updates

    def follow(self, reply: wire.RegisterVariablesReply) -> None:
        """From now on follows the reply's map, and the mode of its partitions."""
        if not reply.HasField("consistency"):
            return
        given = lease_messages.consistency_from_wire(reply.consistency)
        if given.number > self.consistency.number:
            self.consistency = given
        if given.mode.updates is self.mode:
            return
        log.info("the job's partitions go over from %s to %s", self.mode.value, given)
        changed = {"mode": given.mode} | ({} if given.bound is None else {"staleness": given.bound})
        settings = self.job_settings
        self.job_settings = settings.model_copy(update={"consistency": settings.consistency.model_copy(update=changed)})
        self.logical_ranks = self.job_settings.logical_rank_count if self.mode is UpdateMode.SYNC else 0

    def acknowledge_mode(self, consistency: Consistency) -> None:
        """Reports that this worker now uses the mode that its job was switched to or started with. Returns when the
        coordinator knows. From then on servers that are new to the job expect this worker's step."""
        self._goes_by = consistency.number
        if consistency.number:
            self.learn()

    def ranks(self) -> tuple[RankLease, ...]:
        """The logical ranks that this worker had at the last heartbeat."""
        with self._lock:
            return self._ranks

    def refresh(self) -> None:
        """Asks the coordinator now instead of at the next heartbeat."""
        self.check()
        try:
            self._enrolment.beat()
        except (errors.Unavailable, errors.NotReady):
            log.debug("the coordinator did not answer a heartbeat")

    def learn(self) -> None:
        """As `refresh`, repeated until the coordinator answers: only it can explain a server's error."""
        patience = self._patience("the coordinator to say how the job stands", self.check)
        with self.wait_registry.over(lambda: patience.explanation):
            patience.call(self._enrolment.beat)

    def check(self) -> None:
        """Raises the job's failure if it has failed, InvalidRequest after this worker has left, and KeyboardInterrupt
        if one was held back."""
        self.interrupts.check()
        with self._lock:
            failure, left = self._failure, self._left
        if failure is not None:
            raise failure.anew() from None
        if left:
            raise errors.InvalidRequest(
                "the job has been left", why="this worker is not in it any more", todo="call shardyard.connect again"
            )

    def fail(self, error: errors.ShardyardError) -> None:
        """Ends the job for this worker: wakes all waits; from now on `check` raises."""
        with self._lock:
            if self._failure is not None or self._left:
                return
            self._failure = error
            wake = list(self._on_failure)
        log.error("the job has failed: %s", error)
        for callback in wake:
            callback()

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Calls `callback`, from another thread, when the job fails."""
        with self._lock:
            self._on_failure.append(callback)

    def not_on_failure(self, callback: Callable[[], None]) -> None:
        """Undoes `on_failure`."""
        with self._lock:
            if callback in self._on_failure:
                self._on_failure.remove(callback)

    def on_newer_map(self, callback: Callable[[], None]) -> None:
        """Calls `callback`, from any thread, whenever the coordinator announces a higher generation."""
        with self._lock:
            self._on_newer_map.append(callback)

    def not_on_newer_map(self, callback: Callable[[], None]) -> None:
        """Undoes `on_newer_map`."""
        with self._lock:
            if callback in self._on_newer_map:
                self._on_newer_map.remove(callback)

    def reached(self, step: int) -> None:
        """Notes that the worker is at a step."""
        self.progress.step = step
        bind_process(step=step)

    # ---- calls

    def ask(
        self, method: Method[Request, Response], request: Request, *, check: Callable[[], None] | None = None
    ) -> Response:
        """Calls the coordinator. Retries while it is not ready or does not answer, since it may be restarting. The
        default budget is the session's own; it is longer than the grace time after which the coordinator counts as
        lost, and `check` raises that."""
        patience = self._patience(f"the coordinator to answer {method.name}", check or self.check)
        with self.wait_registry.over(lambda: patience.explanation):
            return patience.call(
                lambda: self._peer.call(method, request, timeout_ms=self.settings.worker.rpc_deadline_ms)
            )

    def _patience(self, waiting_for: str, check: Callable[[], None]) -> RetryPolicy:
        budget_ms = self.settings.membership.coordinator_grace_ms + self.settings.worker.retry_budget_ms
        return RetryPolicy(budget_ms, check, waiting_for)

    def take_checkpoint(self) -> int:
        """Waits until a checkpoint that begins after now is committed. Returns its number, or raises its error."""
        self.learn()  # the checkpoint's step is the one that workers have reported
        request = wire.TakeCheckpointRequest(caller=common_messages.caller_to_wire(self.caller))
        with self.wait_registry.over(lambda: "a checkpoint of the job to be committed"):
            while True:
                reply = self.ask(methods.TAKE_CHECKPOINT, request)
                if reply.done:
                    self.checkpoint = CheckpointTaken(reply.number, reply.step)
                    return self.checkpoint.number
                if reply.HasField("failure"):
                    raise from_detail(reply.failure)
                request.ticket = reply.ticket
                time.sleep(ASK_AGAIN_MS / 1000)

    def stop(self, reason: str) -> None:
        """Stops the job before its data ends, unless it was already told to stop."""
        request = wire.StopJobRequest(caller=common_messages.caller_to_wire(self.caller), reason=reason)
        self.step_barrier.take(lease_messages.stop_from_wire(self.ask(methods.STOP_JOB, request).stop))
        if self.step_barrier.heard is not None:
            self.refresh()  # otherwise the others would wait for this worker's next heartbeat

    def _hear_news(self, reply: wire.JoinJobReply | wire.HeartbeatReply) -> None:
        if reply.HasField("stop"):
            self.step_barrier.take(lease_messages.stop_from_wire(reply.stop))
        if reply.HasField("consistency") and reply.consistency.number > self.consistency.number:
            self.consistency = lease_messages.consistency_from_wire(reply.consistency)
        # after the number of the map, under which no worker is halted
        self.step_barrier.take_halt(lease_messages.halt_from_wire(reply.halt) if reply.HasField("halt") else None)
        if reply.HasField("checkpoint"):
            self.checkpoint = CheckpointTaken(reply.checkpoint.number, reply.checkpoint.step)

    def _report(self, request: wire.HeartbeatRequest) -> None:
        request.step = self.progress.step
        request.samples = self.progress.samples
        request.residual_norm = self.progress.residual_norm
        request.pushed = self.progress.pushed
        reached = self.step_barrier.heard
        if reached is not None:
            request.stop_heard.reached = reached
        halted = self.step_barrier.halted
        if halted is not None:
            request.halt_heard.number, request.halt_heard.reached = halted
        # a worker that does not compute yet reports the mode that it will begin with
        request.switches = self.consistency.number if self._goes_by is None else self._goes_by
        request.waiting_for = self.wait_registry.waiting_for
        for name, value in sorted(self._metrics().items()):
            request.metrics.add(name=name, value=value)

    def _hear(self, reply: wire.HeartbeatReply) -> None:
        with self._lock:
            self._ranks = lease_messages.rank_leases_from_wire(reply.ranks)
            moved = list(self._on_newer_map) if reply.generation > self.generation else []
            self.generation = Generation(max(self.generation, reply.generation))
        self.initializer = reply.initializer
        self.chief = reply.chief
        self.recovering = reply.recovering
        self._hear_news(reply)
        if self.on_heard is not None:
            self.on_heard(reply)
        for callback in moved:
            callback()
        if reply.job_state == wire.JOB_STATE_FAILED:
            self.fail(from_detail(reply.failure))
