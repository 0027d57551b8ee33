"""A worker's membership in a yard and in one job, and the coordinator's last reply.

Owns: the connection to the coordinator, the membership, the failure of the job. Invariants: once the job has failed,
every call of `check` raises that failure; a call to the coordinator that gets no answer is retried within the budget,
since each is safe to repeat. Must not know: tensors.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from shardyard.config.configuration import parse_job_settings
from shardyard.config.settings import JobSettings, Settings
from shardyard.domain import errors
from shardyard.domain.consistency import Consistency, UpdateMode
from shardyard.domain.ids import Caller, Generation, JobId, RunName
from shardyard.domain.push_names import RankLease
from shardyard.domain.replica_groups import Strategy
from shardyard.runtime.log import bind_process
from shardyard.runtime.waits import WaitRegistry
from shardyard.security.passes import end_of
from shardyard.transport.error_codes import from_detail
from shardyard.transport.interfaces import Network
from shardyard.transport.membership_client import Membership, MembershipClient
from shardyard.wire import common_messages, lease_messages, methods
from shardyard.wire.method import Method
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.session.drain import Drain
from shardyard_worker.session.interrupts import INTERRUPTS
from shardyard_worker.session.retry import PAUSE_MS_MAX, RetryPolicy
from shardyard_worker.session.step_barrier import StepBarrier

log = logging.getLogger("shardyard.worker")

FIRST_CONNECT_MS: Final = 8_000
"""How long a process that somebody has started by hand tries to reach the coordinator."""

Request = TypeVar("Request")
Response = TypeVar("Response")


@dataclass
class Progress:
    """What the next heartbeat reports."""

    step: int = 0
    samples: int = 0
    residual_norm: float = 0.0
    pushed: int = 0
    """Acknowledged pushes without leased data."""
    needs_servers: str = ""
    """What in the script needs variables on the servers. Empty: workers may have them."""
    sums: str = ""
    """In which way gradients are summed with those of other workers. Empty: they are not."""
    residual_lost: float = 0.0
    """Reported on leaving: the 2-norm of the residual that was not sent. It is lost if other steps follow."""


class Regime(NamedTuple):
    """How a worker takes part in its job, until the partitions change to another one."""

    updates: UpdateMode
    strategy: Strategy


@dataclass(frozen=True)
class CheckpointTaken:
    """A committed checkpoint: its number, and the step at which it was taken."""

    number: int
    step: int


def _ignore(*_: object) -> None:
    """The default of a listener's functions."""


@dataclass(frozen=True, eq=False)
class Listener:
    """Functions that the session calls, from any thread, until it is told to stop."""

    on_failure: Callable[[], None] = _ignore
    """The job has failed."""
    on_newer_map: Callable[[], None] = _ignore
    """The coordinator has announced a higher generation."""
    on_heartbeat: Callable[[wire.HeartbeatReply], None] = _ignore


class Session:
    """One worker in one job, from joining to leaving. Safe for several threads."""

    def __init__(
        self,
        network: Network,
        coordinator: str,
        settings: Settings,
        membership: Membership,
        metrics: Callable[[], dict[str, float]] = dict,
        *,
        run: RunName | None = None,
    ) -> None:
        """`metrics` returns those for the next heartbeat. `run`: what this process belongs to, if that is known."""
        self.network = network
        self.settings = settings
        self.progress = Progress()
        self.wait_registry = WaitRegistry(logger=log)
        """Explains all waits of this worker, in its log and to the coordinator."""
        self._metrics = metrics
        self._run = run
        self._is_launched = run is not None or membership.agent is not None
        self._peer = network.connect(coordinator, name="coordinator", unavailable=errors.CoordinatorUnavailable)
        self._lock = threading.Lock()
        self._failure: errors.ShardyardError | None = None
        self._listeners: list[Listener] = []
        self.has_left = False
        self.ranks: tuple[RankLease, ...] = ()
        """The logical ranks that this worker had at the last heartbeat."""
        self.initializer = False
        self.chief = False
        self.number = 0
        """This worker's number among the job's living workers."""
        self.world_size = 1
        self.is_alone = False
        """Whether the yard is in this process, for this worker only."""
        self.generation = Generation(0)
        self.recovering = False
        self.step_barrier = StepBarrier()
        self._holds_interrupts = False
        self.drain = Drain()
        self._acknowledged: int | None = None
        """The number of the mode that this worker computes in. None: it does not compute yet."""
        self.replica_generation = 0
        """A mirrored job's worker leaves replica groups of a lower generation."""
        self.lost_replica_generation = 0
        """The newest replica group that lacks a member."""
        self.is_to_publish = False
        """Whether replicas give the servers their state."""
        self.checkpoint: CheckpointTaken | None = None
        """The job's newest checkpoint."""
        self._membership = MembershipClient(
            self._peer,
            membership,
            on_reply=self._on_heartbeat,
            on_lost=self.fail,
            report=self._report,
            grace_ms=settings.membership.coordinator_grace_ms,
        )

    # ---- joining and leaving

    def join(self) -> None:
        """Registers, and joins the job of the settings' name or starts it. Raises CoordinatorUnavailable, RunFinished,
        ..."""
        self._membership.register(patience_ms=self._connect_ms)
        bind_process(role="worker", id=self._membership.incarnation, job=None, step=None)
        wanted = self.settings.job
        request = wire.JoinJobRequest(
            caller=common_messages.caller_to_wire(self.caller),
            name=wanted.name,
            settings_json=wanted.model_dump_json(),
            run_id="" if self._run is None else self._run.id,
            run_number=0 if self._run is None else self._run.number,
        )
        reply = self.ask(methods.JOIN_JOB, request)
        self.job_settings: JobSettings = parse_job_settings(reply.settings_json)
        self.mode = self.job_settings.consistency.mode.updates
        given = self.job_settings.consistency
        self.consistency = Consistency(0, given.mode, given.bound)
        if reply.HasField("consistency"):  # not all servers may use the settings' mode yet
            self.consistency = lease_messages.consistency_from_wire(reply.consistency)
        self._membership.job = JobId(reply.job)
        self.network.job_pass = reply.job_pass
        self.seed = reply.seed
        self.logical_ranks = reply.logical_ranks
        self.chief = reply.chief
        self.number, self.world_size = reply.number, max(1, reply.world_size)
        self.ranks = lease_messages.rank_leases_from_wire(reply.ranks)
        self._take_news(reply)
        bind_process(job=wanted.name)
        log.info("%s job %r", "started" if reply.started else "joined", wanted.name)
        _log_differences(wanted, self.job_settings)
        self._membership.start()
        self._holds_interrupts = INTERRUPTS.stay()

    @property
    def has_lost_the_yard(self) -> bool:
        """This process is no member any more, or cannot reach the coordinator. A new process can go on."""
        with self._lock:
            return self._failure is not None and self._failure.new_process_helps

    @property
    def _connect_ms(self) -> int:
        """How long this process tries to reach the coordinator. A launch has reached it before. Otherwise the address
        may be wrong, and a person waits."""
        grace_ms = self.settings.membership.coordinator_grace_ms
        return grace_ms if self._is_launched else min(grace_ms, FIRST_CONNECT_MS)

    def leave(self, error: str = "", *, lost: bool = False) -> None:
        """Leaves the job and the yard. A second call does nothing. `error`: why the script failed, if it did. `lost`:
        it failed because this process has lost the yard. Then the coordinator is not told, and takes this for a death:
        the job goes on, and waits for another process. If this worker was told to leave before its work was done,
        others continue it."""
        lost = lost or self.has_lost_the_yard
        with self._lock:
            if self.has_left:
                return
            self.has_left = True
            has_failed = self._failure is not None
        if lost:
            self._membership.stop()
            self._close()
            return
        if not has_failed:
            try:
                self._membership.beat_last()  # so that `status` shows a finished job completely
            except Exception as unsent:  # noqa: BLE001 - metrics are the script's
                # a metric that cannot be read, as after a device failure, must not keep this worker from leaving
                log.debug("no last heartbeat: %s", unsent)
        # a coordinator that restarts must learn that this worker is done; otherwise it looks like a death
        patience_ms = 0 if error or has_failed else self.settings.membership.coordinator_grace_ms
        pushed, residual_lost = self.progress.pushed, self.progress.residual_lost
        drained = self.drain.hands_over and not error
        is_lost = self._membership.leave(
            error, patience_ms=patience_ms, pushed=pushed, residual_lost=residual_lost, drained=drained
        )
        if drained and not has_failed:
            log.info("has left in order at step %d; its work is free for others", self.progress.step)
        if is_lost and residual_lost:
            log.warning("the residual of this worker is lost with it (2-norm %.3g)", residual_lost)
        self._close()

    def _close(self) -> None:
        self._peer.close()
        self.wait_registry.close()
        if self._holds_interrupts:
            self._holds_interrupts = False
            INTERRUPTS.leave()
        bind_process(job=None, step=None)

    @property
    def caller(self) -> Caller:
        return self._membership.caller

    # ---- the job's mode

    @property
    def regime(self) -> Regime:
        """That of the partitions under the map that this worker follows."""
        return Regime(self.mode, self.job_settings.strategy)

    def follow(self, reply: wire.RegisterVariablesReply) -> None:
        """From now on follows the mode and the strategy of the partitions in the reply's map."""
        if not reply.HasField("consistency"):
            return
        given = lease_messages.consistency_from_wire(reply.consistency)
        if given.number > self.consistency.number:
            self.consistency = given
        before = self.regime
        strategy = given.strategy or before.strategy
        if before == Regime(given.mode.updates, strategy):
            return
        log.info("the job's partitions change from %s, %s, to %s", before.updates.value, before.strategy.value, given)
        changed = {"mode": given.mode} | ({} if given.bound is None else {"staleness": given.bound})
        consistency = self.job_settings.consistency.model_copy(update=changed)
        self.job_settings = self.job_settings.model_copy(update={"consistency": consistency, "strategy": strategy})
        self.mode = given.mode.updates
        self.logical_ranks = self.job_settings.logical_rank_count if self.mode is UpdateMode.SYNC else 0

    def acknowledge_mode(self, consistency: Consistency) -> None:
        """Reports that this worker now uses the mode that its job was switched to or started with. Returns when the
        coordinator knows. From then on servers that are new to the job expect this worker's step."""
        self._acknowledged = consistency.number
        if consistency.number:
            self.learn()

    # ---- the job's failure, and other news

    def check(self) -> None:
        """Raises the job's failure if it has failed, InvalidRequest after this worker has left, and KeyboardInterrupt
        if one was held back."""
        INTERRUPTS.check()
        failure = self._failure
        if failure is not None:
            raise failure.anew() from None
        if self.has_left:
            raise errors.InvalidRequest(
                "the job has been left", why="this worker is not in it any more", todo="call shardyard.connect again"
            )

    def check_waiting(self) -> None:
        """As `check`, in a wait for others that this worker gives up if it is told to leave: then raises Drained."""
        self.check()
        self.drain.check()

    def fail(self, error: errors.ShardyardError) -> None:
        """Ends the job for this worker: wakes all waits; from now on `check` raises."""
        with self._lock:
            if self._failure is not None or self.has_left:
                return
            self._failure = error
            listeners = list(self._listeners)
        what = "this worker has lost the yard" if error.new_process_helps else "the job has failed"
        log.error("%s: %s", what, error)
        for listener in listeners:
            listener.on_failure()

    def listen(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.append(listener)

    def stop_listening(self, listener: Listener) -> None:
        """A second call does nothing."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    # ---- calls

    def ask(
        self,
        method: Method[Request, Response],
        request: Request,
        *,
        check: Callable[[], None] | None = None,
        pause_ms_max: int = PAUSE_MS_MAX,
    ) -> Response:
        """Calls the coordinator. Retries while it is not ready or does not answer, since it may be restarting. Ends
        early with what `check` raises (by default the session's own)."""
        deadline_ms = self.settings.worker.rpc_deadline_ms
        policy = self._retry_policy(f"the coordinator to answer {method.name}", check or self.check, pause_ms_max)
        with self.wait_registry.over(lambda: policy.explanation):
            return policy.call(lambda: self._peer.call(method, request, timeout_ms=deadline_ms))

    def ask_once(self, method: Method[Request, Response], request: Request) -> Response:
        """Calls the coordinator. Raises Unavailable or NotReady instead of waiting for it."""
        with self.wait_registry.over(lambda: f"the coordinator to answer {method.name}"):
            return self._peer.call(method, request, timeout_ms=self.settings.worker.rpc_deadline_ms)

    def learn(self) -> None:
        """Sends a heartbeat until the coordinator answers one: only it can explain a server's error."""
        policy = self._retry_policy("the coordinator to say how the job stands", self.check)
        with self.wait_registry.over(lambda: policy.explanation):
            policy.call(self._membership.beat)

    def report_drain(self) -> int:
        """Tells the coordinator that this worker leaves in order. Returns how long that may take, in milliseconds."""
        try:
            with self.wait_registry.over(lambda: "the coordinator to learn that this worker leaves in order"):
                return self._membership.drain().left_ms
        except errors.ShardyardError as error:
            log.debug("the coordinator was not told that this worker leaves: %s", error)
            return self._membership.drain_ms

    def refresh(self) -> None:
        """Sends a heartbeat now. If the coordinator does not answer, the next regular one will do."""
        self.check()
        try:
            self._membership.beat()
        except (errors.Unavailable, errors.NotReady):
            log.debug("the coordinator did not answer a heartbeat")

    def _retry_policy(
        self, waiting_for: str, check: Callable[[], None], pause_ms_max: int = PAUSE_MS_MAX
    ) -> RetryPolicy:
        # longer than the grace time, after which the coordinator counts as lost and `check` raises that
        budget_ms = 2 * self.settings.membership.coordinator_grace_ms
        return RetryPolicy(budget_ms, check, waiting_for, pause_ms_max=pause_ms_max)

    # ---- heartbeats

    def reached(self, step: int) -> None:
        """Notes that the worker is at a step."""
        self.progress.step = step
        bind_process(step=step)

    def _report(self, request: wire.HeartbeatRequest) -> None:
        request.step = self.progress.step
        request.samples = self.progress.samples
        request.residual_norm = self.progress.residual_norm
        request.pushed = self.progress.pushed
        stop_report = self.step_barrier.stop_report
        if stop_report is not None:
            request.stop_reached.reached = stop_report
        switch_report = self.step_barrier.switch_report
        if switch_report is not None:
            request.switch_reached.number, request.switch_reached.reached = switch_report
        # a worker that does not compute yet reports the mode that it will begin with
        request.switches = self.consistency.number if self._acknowledged is None else self._acknowledged
        request.needs_servers = self.progress.needs_servers
        request.sums = self.progress.sums
        request.waiting_for = self.wait_registry.waiting_for
        request.pass_until_s = end_of(self.network.job_pass)
        for name, value in sorted(self._metrics().items()):
            request.metrics.add(name=name, value=value)

    def _on_heartbeat(self, reply: wire.HeartbeatReply) -> None:
        self.ranks = lease_messages.rank_leases_from_wire(reply.ranks)
        self.initializer = reply.initializer
        self.chief = reply.chief
        self.world_size = max(1, reply.world_size)
        self.recovering = reply.recovering
        self.replica_generation = reply.replica_generation
        self.lost_replica_generation = max(self.lost_replica_generation, reply.lost_replica_generation)
        with self._lock:
            is_newer = reply.generation > self.generation
            self.generation = Generation(max(self.generation, reply.generation))
            listeners = list(self._listeners)
        self.is_to_publish = reply.publish  # after the generation: what is published is under that map
        self._take_news(reply)
        if reply.job_pass:
            self.network.job_pass = reply.job_pass
        if reply.HasField("drain"):
            self.drain.begin("the coordinator tells this worker to leave")
        for listener in listeners:
            listener.on_heartbeat(reply)
            if is_newer:
                listener.on_newer_map()
        if reply.job_state == wire.JOB_STATE_FAILED:
            self.fail(from_detail(reply.failure))

    def _take_news(self, reply: wire.JoinJobReply | wire.HeartbeatReply) -> None:
        if reply.HasField("stop"):
            self.step_barrier.take_stop(lease_messages.stop_from_wire(reply.stop))
        if reply.HasField("consistency") and reply.consistency.number > self.consistency.number:
            self.consistency = lease_messages.consistency_from_wire(reply.consistency)
        # after the number of the map, under which no worker is halted
        self.step_barrier.take_switch_point(
            lease_messages.switch_point_from_wire(reply.switch_point) if reply.HasField("switch_point") else None
        )
        if reply.HasField("checkpoint"):
            self.checkpoint = CheckpointTaken(reply.checkpoint.number, reply.checkpoint.step)


def _log_differences(wanted: JobSettings, given: JobSettings) -> None:
    theirs, mine = given.model_dump(mode="json"), wanted.model_dump(mode="json")
    differing = [name for name in mine if mine[name] != theirs[name] and name != "workers_expected"]
    if differing:
        log.warning(
            "the job runs with the settings of the worker that started it; they differ from this worker's in %s",
            ", ".join(f"job.{name} ({theirs[name]!r}, not {mine[name]!r})" for name in differing),
        )
