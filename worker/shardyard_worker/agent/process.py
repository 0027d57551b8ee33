"""The agent as a process: a member of the yard that serves launches, or runs one script and ends with it.

Owns: the agent's membership (it enrols again after it was declared dead or the coordinator came back; training goes on
meanwhile), the reports of ended processes. Invariant: when `serve` returns, every process that the agent started is
gone. Must not know: torch, command lines.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Final

from shardyard.config.settings import Settings
from shardyard.domain import errors
from shardyard.domain.ids import Incarnation, MemberRole
from shardyard.runtime import log as logs
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.interfaces import Peer
from shardyard.transport.membership_client import Membership, MembershipClient
from shardyard.wire import common_messages, methods
from shardyard.wire.v1 import agent_pb2 as wire
from shardyard.wire.v1 import coordinator_pb2 as coordinator_wire
from shardyard_worker.agent.error_report import ShownOutput
from shardyard_worker.agent.launch import RunningLaunch
from shardyard_worker.agent.service import AgentPlan, AgentService
from shardyard_worker.agent.supervision import LaunchEnded, ProcessOutput

log = logging.getLogger("shardyard.agent")

REGISTER_PATIENCE_MS: Final = 30_000
"""How long an agent tries to reach its coordinator when it starts."""
SLICE_MS: Final = 200
REPORTS_QUEUED_MAX: Final = 4_096
REPORT_TIMEOUT_MS: Final = 2_000


class AgentMembership:
    """The agent's membership. One thread calls `enrol` and `tend`; the rest is safe for several. `waiting_for`:
    describes what the agent waits for, for its heartbeats."""

    def __init__(
        self, peer: Peer, membership: Membership, *, coordinator_grace_ms: int, waiting_for: Callable[[], str]
    ) -> None:
        self._grace_ms = coordinator_grace_ms
        self._waiting_for = waiting_for
        self._peer = peer
        self._membership = membership
        self._lost = threading.Event()
        self._enrolment = self._new()

    @property
    def incarnation(self) -> Incarnation:
        return self._enrolment.incarnation

    def enrol(self, stop: threading.Event) -> None:
        """Raises CoordinatorUnavailable if the coordinator does not answer for REGISTER_PATIENCE_MS."""
        try:
            self._enrol(REGISTER_PATIENCE_MS, stop)
        except errors.Unavailable:
            if not stop.is_set():
                raise

    def tend(self) -> None:
        """Enrols again if the membership was lost. Called regularly."""
        if not self._lost.is_set():
            return
        self._lost.clear()
        self._enrolment.stop()
        self._enrolment = self._new()
        try:
            self._enrol(0, None)
        except errors.ShardyardError as error:
            log.debug("not enrolled again yet: %s", error)
            self._lost.set()

    def report_exit(self, pid: int, exit_code: int) -> None:
        request = coordinator_wire.ReportExitRequest(
            caller=common_messages.caller_to_wire(self._enrolment.caller), pid=pid, exit_code=exit_code
        )
        try:
            self._peer.call(methods.REPORT_EXIT, request, timeout_ms=REPORT_TIMEOUT_MS)
        except errors.ShardyardError as error:
            # without the report its lease still expires, only later
            log.debug("the end of process %d was not reported: %s", pid, error)

    def leave(self) -> None:
        if self.incarnation:
            self._enrolment.leave()
        else:
            self._enrolment.stop()

    def _enrol(self, patience_ms: int, stop: threading.Event | None) -> None:
        self._enrolment.register(patience_ms=patience_ms, stop=stop)
        self._enrolment.start()
        logs.bind_process(id=self.incarnation)
        log.info("enrolled with %s", self._peer.name)

    def _new(self) -> MembershipClient:
        return MembershipClient(
            self._peer,
            self._membership,
            on_reply=_ignore,
            on_lost=self._on_lost,
            report=self._report,
            grace_ms=self._grace_ms,
        )

    def _report(self, request: coordinator_wire.HeartbeatRequest) -> None:
        request.waiting_for = self._waiting_for()

    def _on_lost(self, error: errors.ShardyardError) -> None:
        log.warning("no member any more, will enrol again: %s", error)
        self._lost.set()


def _ignore(reply: coordinator_wire.HeartbeatReply) -> None:
    """A heartbeat's reply has nothing for an agent."""


class ExitReporter:
    """Reports ended processes to the coordinator from its own thread, so that watching them never waits for it."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self._report = report
        self._waiting: queue.Queue[tuple[int, int] | None] = queue.Queue(REPORTS_QUEUED_MAX)
        self._thread = threading.Thread(target=self._run, name="exit-reports", daemon=True)
        self._thread.start()

    def put(self, pid: int, exit_code: int) -> None:
        try:
            self._waiting.put_nowait((pid, exit_code))
        except queue.Full:
            log.debug("the end of process %d was not reported: too many wait", pid)

    def close(self) -> None:
        """Sends the reports that wait, within a few seconds, and ends the thread."""
        try:
            self._waiting.put(None, timeout=REPORT_TIMEOUT_MS / 1000)
        except queue.Full:
            return
        self._thread.join(2 * REPORT_TIMEOUT_MS / 1000)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._report(*item)


def serve(
    *,
    coordinator: str,
    bind: str,
    advertise: str | None,
    workers: int,
    settings: Settings,
    allow_remote_launch: bool,
    command: list[str] | None,
    stop: threading.Event,
    ready: Callable[[str], None],
) -> int:
    """Runs an agent until `stop` is set, or, with a `command` (script and arguments), until that script has ended.

    Returns 0, or the command's exit code (negative: the signal that ended its first failed process). `ready` is called
    with the agent's address. Raises AddressInUse, CoordinatorUnavailable, and for a bad command InvalidRequest.
    """
    logs.bind_process(role="agent")
    plan = AgentPlan(
        coordinator=coordinator,
        workers=workers,
        allow_remote_launch=allow_remote_launch,
        device=settings.worker.device,
        threads=settings.worker.threads,
    )
    peer = GrpcNetwork().connect(coordinator, name="coordinator", unavailable=errors.CoordinatorUnavailable)
    standing: AgentMembership | None = None
    reporter = ExitReporter(lambda pid, exit_code: standing.report_exit(pid, exit_code) if standing else None)
    service = AgentService(plan, incarnation=lambda: standing.incarnation if standing else 0, report_exit=reporter.put)
    listener: GrpcServer | None = None
    try:
        listener = GrpcServer(bind, [service.service])
        address = advertise or listener.address
        grace_ms = settings.membership.coordinator_grace_ms
        standing = AgentMembership(
            peer,
            Membership(MemberRole.AGENT, address),
            coordinator_grace_ms=grace_ms,
            waiting_for=lambda: service.wait_registry.waiting_for,
        )
        listener.start()
        standing.enrol(stop)
        if stop.is_set():
            return 0
        listener.set_ready(ready=True)
        ready(address)
        if command is not None:
            launch = service.launch(_request(command, settings))
            return _follow(launch, standing, stop)
        while not stop.wait(SLICE_MS / 1000):
            standing.tend()
        return 0
    finally:
        service.close()
        reporter.close()
        if standing is not None:
            standing.leave()
        if listener is not None:
            listener.stop()
        peer.close()


def _request(command: list[str], settings: Settings) -> wire.LaunchRequest:
    return wire.LaunchRequest(
        script=os.path.abspath(command[0]),
        arguments=command[1:],
        working_directory=os.getcwd(),
        restarts_max=settings.yard.restarts_max,
    )


def _follow(launch: RunningLaunch, standing: AgentMembership, stop: threading.Event) -> int:
    """Prints a launch's output on this process's own streams, until it has ended or `stop` is set."""
    wanted = 0
    several = launch.order.workers > 1
    shown = ShownOutput()
    while not stop.is_set():
        for number, happening in launch.events.after(wanted, wait_ms=SLICE_MS):
            wanted = number + 1
            if isinstance(happening, ProcessOutput):
                shown.note(happening.index, happening.standard_error, happening.line)
                stream = sys.stderr if happening.standard_error else sys.stdout
                stream.write((f"[{happening.index}] " if several else "") + happening.line + "\n")
                stream.flush()
            elif isinstance(happening, LaunchEnded):
                if happening.exit_code:
                    index = happening.first_error_index
                    said = shown.tell(index, happening.first_error, several=several)
                    log.error("process %d failed first:\n%s", index, said)
                return happening.exit_code
        standing.tend()
    return -signal.SIGTERM
