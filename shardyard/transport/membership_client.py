"""Membership in a yard: registers a process, sends heartbeats from a thread, and leaves.

Owns: the incarnation, the heartbeat thread, and the decision that the coordinator is lost. Invariants: `on_reply` is
called from one thread at a time (the heartbeat thread, or the caller of `beat`), and never after `leave`; `on_lost` is
called at most once. A coordinator that restarts from its journal has a higher term and still knows its members. Must
not know: what a role does with the replies.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from shardyard.config.settings import COORDINATOR_GRACE_MS
from shardyard.domain import errors, limits
from shardyard.domain.ids import Caller, Incarnation, JobId, MemberRole, Term
from shardyard.domain.limits import PROTOCOL
from shardyard.runtime.waits import ExplainedWait
from shardyard.transport.enrolment import Renewal
from shardyard.transport.interfaces import Peer
from shardyard.wire import common_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire

log = logging.getLogger("shardyard.enrolment")

DEADLINE_MS = 3_000
"""Of a heartbeat, at most."""
RETRY_MS = 250
LEAVE_MS = 1_000


@dataclass(frozen=True)
class Membership:
    """What a process says about itself when it registers. `logs`: the name of a server's log folder, "" if it has
    none."""

    role: MemberRole
    address: str = ""
    agent: Incarnation | None = None
    local_index: int = 0
    logs: str = ""


class MembershipClient:
    """A process as a member of a yard.

    `report` fills a heartbeat with what the role measured. `on_reply` gets the coordinator's answer. `on_revoked` gets
    whose certificates are refused, as role/name, whenever that has changed. `on_lost` is called when the member was
    fenced (StaleIncarnation), or when the coordinator has not answered for `grace_ms` (CoordinatorLost). NotReady is an
    answer too: the process is there. Until then the member continues, and the log says at once, and again later, what
    it waits for. It also says what a coordinator waits for that answers and decides nothing.
    """

    def __init__(
        self,
        peer: Peer,
        membership: Membership,
        *,
        on_reply: Callable[[wire.HeartbeatReply], None],
        on_lost: Callable[[errors.ShardyardError], None],
        report: Callable[[wire.HeartbeatRequest], None] | None = None,
        grace_ms: int = COORDINATOR_GRACE_MS,
        on_revoked: Callable[[frozenset[str]], None] | None = None,
    ) -> None:
        self._on_revoked = on_revoked
        self._peer = peer
        self._renewal = Renewal(peer)
        self._authorities = b""
        self._membership = membership
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._report = report
        self._deadline_ms = DEADLINE_MS
        self._grace_ms = grace_ms
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._beat = threading.Lock()
        self.lease_ms = self.drain_ms = 0
        self.pass_key = b""
        self._revoked_version = 0
        """How long the coordinator waits for a heartbeat, and for this member to leave in order."""
        self._undecided = ""
        self.incarnation = Incarnation(0)
        self.term = Term(0)
        self.job = JobId(0)

    @property
    def caller(self) -> Caller:
        return Caller(self.job, self.incarnation, self.term)

    def register(self, *, patience_ms: int, stop: threading.Event | None = None) -> None:
        """Registers. Tries again while the coordinator is not ready, and for `patience_ms` while it does not answer.
        Raises what it answers, or CoordinatorUnavailable. Gives up at once when the event `stop` is set or `self.stop`
        is called."""
        member = self._membership
        request = wire.RegisterRequest(
            role=common_messages.ROLES.to_wire(member.role),
            address=member.address,
            protocol=PROTOCOL,
            release=version("shardyard"),
            host=platform.node(),
            pid=os.getpid(),
            agent=member.agent or 0,
            local_index=member.local_index,
            logs=member.logs,
        )
        give_up = time.monotonic() + patience_ms / 1000
        last = ""
        # early, since the address may be wrong
        with ExplainedWait(
            lambda: f"{self._peer.name} to register this {member.role.value}{last}",
            after_ms=limits.SHOW_WAIT_MS,
            logger=log,
        ) as wait:
            while True:
                try:
                    reply = self._peer.call(methods.REGISTER, request, timeout_ms=self._deadline_ms)
                    break
                except (errors.Unavailable, errors.NotReady) as error:
                    last = f" ({error.what})"
                    if isinstance(error, errors.NotReady):
                        give_up = time.monotonic() + patience_ms / 1000
                    wait.tick()
                    if time.monotonic() >= give_up or (stop or self._stop).wait(RETRY_MS / 1000):
                        raise
                    if self._stop.is_set():
                        raise
        self.incarnation, self.term = Incarnation(reply.incarnation), Term(reply.term)
        self._heartbeat_ms, self.lease_ms, self.drain_ms = reply.heartbeat_ms, reply.lease_ms, reply.drain_ms
        self.pass_key = reply.pass_key
        self._renewal.look(reply.authorities)  # before it meets members that show another authority's certificates
        # if one is lost, the next one still comes before the lease has run out
        self._deadline_ms = min(DEADLINE_MS, reply.lease_ms - 2 * reply.heartbeat_ms)

    def start(self) -> None:
        """Starts to send heartbeats."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Sends one heartbeat now, in the caller's thread. Raises what the coordinator answers."""
        with self._beat:
            self._beat_now(self._deadline_ms)

    def beat_last(self) -> None:
        """Sends a heartbeat before `leave`, unless another one is being sent: `leave` must not come after the end of
        the lease. Raises what the coordinator answers."""
        if self._beat.acquire(blocking=False):
            try:
                self._beat_now(LEAVE_MS)
            finally:
                self._beat.release()

    def _beat_now(self, timeout_ms: int) -> None:
        request = wire.HeartbeatRequest(caller=common_messages.caller_to_wire(self.caller))
        if self._report is not None:
            self._report(request)
        request.revoked_version = self._revoked_version
        if self._peer.credentials is not None:
            self._peer.credentials.refresh()
            request.authorities = self._peer.credentials.trusts
        reply = self._peer.call(methods.HEARTBEAT, request, timeout_ms=timeout_ms)
        if reply.HasField("revoked") and self._on_revoked is not None:
            self._on_revoked(frozenset(reply.revoked.holders))
            self._revoked_version = reply.revoked.version
        self._authorities = reply.authorities
        self.term = Term(max(self.term, reply.term))
        self._note_undecided(reply.undecided)
        if not self._stop.is_set():
            self._on_reply(reply)

    def _note_undecided(self, waiting_for: str) -> None:
        """Logs when the coordinator begins to wait before it decides anything, and when it ends."""
        if waiting_for and not self._undecided:
            log.warning(
                "%s decides nothing before it has waited for %s; %s continues", self._peer.name, waiting_for, self._me
            )
        elif self._undecided and not waiting_for:
            log.info("%s decides again", self._peer.name)
        self._undecided = waiting_for

    def stop(self) -> None:
        """Sends no more heartbeats. Tells the coordinator nothing."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=self._deadline_ms / 1000 + 1)

    def drain(self) -> wire.DrainReply:
        """Tells the coordinator that this member leaves in order; `leave` follows when its work is done or handed
        back. Raises what the coordinator answers, or CoordinatorUnavailable."""
        request = wire.DrainRequest(caller=common_messages.caller_to_wire(self.caller))
        return self._peer.call(methods.DRAIN, request, timeout_ms=self._deadline_ms)

    def leave(
        self,
        error: str = "",
        *,
        patience_ms: int = 0,
        pushed: int = 0,
        residual_lost: float = 0.0,
        drained: bool = False,
    ) -> bool:
        """Stops, and tells the coordinator. If it does not answer within a second, tries again for `patience_ms`: it
        may be restarting, and a member that leaves without being heard looks dead. With patience, waits for as long as
        the coordinator answers that it is not ready. `pushed`: a worker's acknowledged
        pushes without leased data. `residual_lost`: the 2-norm of the residual that it did not send.
        `drained`: it leaves because it drains. Returns whether the coordinator answered that this residual counts as
        lost."""
        # a heartbeat may take longer than the lease lasts, so this does not wait for it
        self._stop.set()
        try:
            said = wire.LeaveRequest(error=error[:1000], pushed=pushed, residual_lost=residual_lost, drained=drained)
            return self._send_leave(said, patience_ms).residual_lost
        finally:
            self.stop()

    def _send_leave(self, request: wire.LeaveRequest, patience_ms: int) -> wire.LeaveReply:
        request.caller.CopyFrom(common_messages.caller_to_wire(self.caller))
        give_up = time.monotonic() + patience_ms / 1000
        last = ""
        with ExplainedWait(lambda: f"{self._peer.name} to let {self._me} go{last}", logger=log) as wait:
            while True:
                try:
                    return self._peer.call(methods.LEAVE, request, timeout_ms=LEAVE_MS)
                except errors.ShardyardError as refused:
                    last = f" ({refused.what})"
                    silent = isinstance(refused, errors.Unavailable | errors.NotReady)
                    if isinstance(refused, errors.NotReady) and patience_ms:
                        give_up = time.monotonic() + patience_ms / 1000
                    if not silent or time.monotonic() >= give_up:
                        log.debug("the coordinator did not take the leave: %s", refused)
                        return wire.LeaveReply()
                wait.tick()
                time.sleep(RETRY_MS / 1000)

    @property
    def _me(self) -> str:
        return f"{self._membership.role.value} {self.incarnation}"

    def _run(self) -> None:
        try:
            while not self._pause():
                begun = time.monotonic()
                try:
                    self.beat()
                    self._renewal.look(self._authorities)
                except (errors.Unavailable, errors.NotReady) as error:
                    self._outlast(begun, error)
        except errors.ShardyardError as error:
            self._lose(error)
        except Exception as error:
            # a defect in `report` or `on_reply` must not look like a dead coordinator
            log.exception("a heartbeat failed")
            self._lose(errors.Internal(f"a heartbeat failed: {type(error).__name__}: {error}"))

    def _pause(self) -> bool:
        """Waits until the next heartbeat is due. Returns True if there will be none."""
        return self._stop.wait(self._heartbeat_ms / 1000)

    def _outlast(self, begun: float, error: errors.ShardyardError) -> None:
        """Sends heartbeats until the coordinator answers again. Raises what it answers, or CoordinatorLost."""
        me, said = self._me, error.what
        log.warning(
            "%s waits for the coordinator (%s), and continues without it for up to %g s",
            me,
            said,
            self._grace_ms / 1000,
        )
        with ExplainedWait(lambda: f"{self._peer.name} to answer {me} ({said})", logger=log) as wait:
            while not self._pause():
                try:
                    self.beat()
                except errors.NotReady as again:
                    said, begun = again.what, time.monotonic()
                except errors.Unavailable as again:
                    said = again.what
                else:
                    log.info("%s answers %s again, in term %d", self._peer.name, me, self.term)
                    return
                silent_ms = (time.monotonic() - begun) * 1000
                if silent_ms >= self._grace_ms:
                    raise errors.CoordinatorLost(
                        f"{self._peer.name} has not answered for {silent_ms / 1000:.1f} s",
                        why=f"{errors.CoordinatorLost.why}; the last try: {said}",
                    )
                wait.tick()

    def _lose(self, error: errors.ShardyardError) -> None:
        if not self._stop.is_set():
            self._on_lost(error)
