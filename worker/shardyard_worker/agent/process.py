"""The agent as a process: a member of the yard that serves launches, or runs one script and ends with it.

Owns: the agent's membership (it enrols again after it was declared dead or the coordinator came back; training goes on
meanwhile), the reports of ended processes. An agent that is told to end leaves in order: its processes do so first.
Invariant: when `serve` returns, every process that the agent started is gone. Must not know: torch, command lines.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Final

from shardyard.config.settings import Settings
from shardyard.domain import errors
from shardyard.domain.ids import Incarnation, MemberRole
from shardyard.runtime import log as logs
from shardyard.runtime.waits import WaitRegistry
from shardyard.security.identity import Role
from shardyard.transport.enrolment import enrol_launch, own_credentials
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.interfaces import Network, Peer
from shardyard.transport.membership_client import Membership, MembershipClient
from shardyard.transport.tls import ServerSecurity
from shardyard.wire import common_messages, methods
from shardyard.wire.v1 import agent_pb2 as wire
from shardyard.wire.v1 import coordinator_pb2 as coordinator_wire
from shardyard_worker.agent.allowed import Allowed
from shardyard_worker.agent.error_report import ShownOutput
from shardyard_worker.agent.launch import RunningLaunch
from shardyard_worker.agent.service import LATE_S, AgentPlan, AgentService

log = logging.getLogger("shardyard.agent")

SLICE_MS: Final = 200
REPORT_TIMEOUT_MS: Final = 2_000
ELSEWHERE_TIMEOUT_MS: Final = 2_000


class AgentMembership:
    """The agent's membership. One thread calls `enrol` and `keep`; the rest is safe for several. `waiting_for`:
    describes what the agent waits for, for its heartbeats. `stop` is set when the coordinator tells it to leave."""

    def __init__(
        self,
        peer: Peer,
        membership: Membership,
        *,
        coordinator_grace_ms: int,
        waiting_for: Callable[[], str],
        stop: threading.Event,
        on_revoked: Callable[[frozenset[str]], None],
    ) -> None:
        self._on_revoked = on_revoked
        self._stop = stop
        self._grace_ms = coordinator_grace_ms
        self._waiting_for = waiting_for
        self._peer = peer
        self._membership = membership
        self._lost = threading.Event()
        self._client = self._new_client()

    @property
    def incarnation(self) -> Incarnation:
        return self._client.incarnation

    def enrol(self) -> None:
        """Raises CoordinatorUnavailable if the coordinator does not answer for `coordinator_grace_ms`."""
        try:
            self._enrol(self._grace_ms, self._stop)
        except errors.Unavailable:
            if not self._stop.is_set():
                raise

    def keep(self) -> None:
        """Enrols again if the membership was lost. Called regularly."""
        if not self._lost.is_set():
            return
        self._lost.clear()
        self._client.stop()
        self._client = self._new_client()
        try:
            self._enrol(0, None)
        except errors.ShardyardError as error:
            log.debug("not enrolled again yet: %s", error)
            self._lost.set()

    def report_exit(self, pid: int, exit_code: int) -> None:
        request = coordinator_wire.ReportExitRequest(
            caller=common_messages.caller_to_wire(self._client.caller), pid=pid, exit_code=exit_code
        )
        try:
            self._peer.call(methods.REPORT_EXIT, request, timeout_ms=REPORT_TIMEOUT_MS)
        except errors.ShardyardError as error:
            # without the report its lease still expires, only later
            log.debug("the end of process %d was not reported: %s", pid, error)

    @property
    def drain_ms(self) -> int:
        """How long this agent may take to leave in order."""
        return self._client.drain_ms

    def report_drain(self) -> None:
        """Tells the coordinator that this agent leaves in order."""
        try:
            self._client.drain()
        except errors.ShardyardError as error:
            log.debug("the coordinator was not told that this agent leaves: %s", error)

    def leave(self) -> None:
        if self.incarnation:
            self._client.leave()
        else:
            self._client.stop()

    def _enrol(self, patience_ms: int, stop: threading.Event | None) -> None:
        self._client.register(patience_ms=patience_ms, stop=stop)
        self._client.start()
        logs.bind_process(id=self.incarnation)
        log.info("enrolled with %s", self._peer.name)

    def _new_client(self) -> MembershipClient:
        return MembershipClient(
            self._peer,
            self._membership,
            on_reply=self._on_reply,
            on_lost=self._on_lost,
            report=self._report,
            grace_ms=self._grace_ms,
            on_revoked=self._on_revoked,
        )

    def _on_reply(self, reply: coordinator_wire.HeartbeatReply) -> None:
        if reply.HasField("drain") and not self._stop.is_set():
            log.warning("the coordinator tells this agent to leave")
            self._stop.set()

    def _report(self, request: coordinator_wire.HeartbeatRequest) -> None:
        request.waiting_for = self._waiting_for()

    def _on_lost(self, error: errors.ShardyardError) -> None:
        log.warning("this agent is no member any more, and enrols again: %s", error)
        self._lost.set()


def serve(
    *,
    coordinator: str,
    bind: str,
    advertise: str | None,
    workers: int,
    state: Path,
    settings: Settings,
    command: list[str] | None,
    stop: threading.Event,
    hurry: threading.Event,
    ready: Callable[[str], None],
) -> int:
    """Runs an agent until `stop` is set, or, with a `command` (script and arguments), until that script has ended. Once
    `stop` is set the agent leaves in order, at most for membership.drain_s. Once `hurry` is set too, its processes are
    killed.

    Returns 0, or the command's exit code (negative: the signal that ended its first failed process). `state`: the
    folder in which it keeps its launches. `ready` is called with the agent's address. Raises AddressInUse,
    CoordinatorUnavailable, and for a bad command InvalidRequest.
    """
    logs.bind_process(role="agent")
    try:
        credentials = own_credentials(settings, Role.AGENT, coordinator=coordinator, stop=stop)
    except errors.Unavailable:
        if stop.is_set():
            return 0
        raise
    security = None if credentials is None else ServerSecurity(credentials)
    network = GrpcNetwork(credentials)
    peer = network.connect(coordinator, name="coordinator", unavailable=errors.CoordinatorUnavailable)
    plan = AgentPlan(
        coordinator=coordinator,
        workers=workers,
        state=state,
        device=settings.worker.device,
        threads=settings.worker.threads,
        allowed=Allowed(settings.agent),
        certify=lambda launch, owner: None if credentials is None else enrol_launch(peer, launch, owner),
    )
    membership: AgentMembership | None = None
    # a thread of its own, so that watching processes never waits for the coordinator
    reporter = ThreadPoolExecutor(1, "exit-reports")
    service = AgentService(
        plan,
        incarnation=lambda: membership.incarnation if membership else 0,
        report_exit=lambda pid, code: reporter.submit(membership.report_exit, pid, code) if membership else None,
    )
    listener: GrpcServer | None = None
    try:
        listener = GrpcServer(bind, [service.service], security)
        address = advertise or listener.address
        grace_ms = settings.membership.coordinator_grace_ms
        membership = AgentMembership(
            peer,
            Membership(MemberRole.AGENT, address),
            coordinator_grace_ms=grace_ms,
            waiting_for=lambda: service.wait_registry.waiting_for,
            stop=stop,
            on_revoked=listener.revoke,
        )
        listener.start()
        membership.enrol()
        if stop.is_set():
            return 0
        if command is None:
            service.resume()
        listener.set_ready(ready=True)
        ready(address)
        if command is not None:
            request = wire.LaunchRequest(
                script=os.path.abspath(command[0]),
                arguments=command[1:],
                working_directory=os.getcwd(),
                restarts_max=settings.yard.restarts_max,
                restarts_window_ms=settings.yard.restarts_window_ms,
            )
            return _follow(service.launch(request), membership, stop, hurry)
        while not stop.wait(SLICE_MS / 1000):
            membership.keep()
        return 0
    finally:
        if stop.is_set() and membership is not None and membership.incarnation:
            reporter.submit(membership.report_drain)
            log.info("leaves in order, within %g s; another signal ends it at once", membership.drain_ms / 1000)
            here = membership.incarnation
            service.leave(
                membership.drain_ms, partial(_launch_elsewhere, network, peer, here, service.wait_registry), hurry
            )
        service.close()
        # sends the reports that wait, within a few seconds
        wait([reporter.submit(lambda: None)], timeout=2 * REPORT_TIMEOUT_MS / 1000)
        reporter.shutdown(wait=False, cancel_futures=True)
        if membership is not None:
            membership.leave()
        if listener is not None:
            listener.stop()
        peer.close()


def _launch_elsewhere(
    network: Network, coordinator: Peer, here: Incarnation, wait_registry: WaitRegistry, request: wire.LaunchRequest
) -> str:
    """Launches the script on another agent of the yard. Returns which launch that is, in words; nothing if no agent
    takes it."""
    try:
        with wait_registry.over(lambda: f"the {coordinator.name} to name the other agents"):
            status = coordinator.call(methods.STATUS, coordinator_wire.StatusRequest(), timeout_ms=ELSEWHERE_TIMEOUT_MS)
    except errors.ShardyardError as error:
        log.warning("the agents of the yard are not known: %s", error.what)
        return ""
    for member in status.members:
        if member.role != coordinator_wire.ROLE_AGENT or member.incarnation == here or member.HasField("drain"):
            continue
        agent = network.connect(member.address, name="agent")
        try:
            with wait_registry.over(lambda name=agent.name: f"the {name} to launch {request.script}"):  # type: ignore[misc]
                reply = agent.call(methods.LAUNCH, request, timeout_ms=ELSEWHERE_TIMEOUT_MS)
            return f"launch {reply.launch} of the agent at {member.address}"
        except errors.ShardyardError as error:
            log.warning("the agent at %s does not launch %s: %s", member.address, request.script, error.what)
        finally:
            agent.close()
    return ""


def _follow(launch: RunningLaunch, membership: AgentMembership, stop: threading.Event, hurry: threading.Event) -> int:
    """Prints a launch's output on this process's own streams, until it has ended. Once `stop` is set its processes
    leave in order, and once `hurry` is set too they are killed."""
    wanted = 0
    several = launch.order.workers > 1
    shown = ShownOutput()
    give_up: float | None = None
    while give_up is None or time.monotonic() < give_up:
        if stop.is_set() and give_up is None:
            launch.stop(membership.drain_ms, agent_leaves=True)
            give_up = time.monotonic() + membership.drain_ms / 1000 + LATE_S
        if hurry.is_set():
            launch.stop(0, agent_leaves=True)
        for event in launch.events.after(wanted, wait_ms=SLICE_MS):
            wanted = event.number + 1
            if event.HasField("output"):
                output = event.output
                shown.note(output.local_index, output.standard_error, output.line)
                stream = sys.stderr if output.standard_error else sys.stdout
                stream.write((f"[{output.local_index}] " if several else "") + output.line + "\n")
                stream.flush()
            elif event.HasField("ended"):
                ended = event.ended
                if ended.exit_code and not ended.stopped:
                    error = shown.tell(ended.first_error_index, ended.first_error, several=several)
                    log.error("process %d failed first:\n%s", ended.first_error_index, error)
                return ended.exit_code
        membership.keep()
    return -signal.SIGTERM
