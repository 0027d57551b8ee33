"""A server: its store and servicer, registered with a coordinator; and the process that runs one.

Must not know: how partitions work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from shardyard.config.settings import AUTO, COORDINATOR_GRACE_MS, QuotaSettings, Settings
from shardyard.domain import errors, limits
from shardyard.domain.ids import MemberRole
from shardyard.runtime import log as logs
from shardyard.runtime.machine_memory import memory_bytes
from shardyard.runtime.malloc import tune_malloc
from shardyard.runtime.waits import ExplainedWait
from shardyard.security.door import Door
from shardyard.security.identity import Role
from shardyard.security.passes import PassVerifier
from shardyard.security.request_rates import RequestRates
from shardyard.security.roles import ALLOWED
from shardyard.storage.access import StorageAccess
from shardyard.transport.enrolment import own_credentials
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.interfaces import Network, Service
from shardyard.transport.local_listener import LocalListener
from shardyard.transport.membership_client import Membership, MembershipClient
from shardyard.transport.tls import ServerSecurity
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_ps_server.hosting import orders, pulls
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.service.servicer import Servicer
from shardyard_ps_server.tables.memory.budget import Budget, budget_in
from shardyard_ps_server.wal.segments import ASIDE_KEPT_S, DAY_S, LogRoot

log = logging.getLogger("shardyard.server")

DRAIN_POLL_MS: Final = 50
ORDERS: Final = frozenset(path for path, roles in ALLOWED.items() if roles == {Role.COORDINATOR})
"""What the coordinator orders. It is carried out however many workers there are."""
THREADS: Final = limits.EXCHANGE_STREAMS_MAX + 64
"""One for each stream that may wait within an exchange, for example for the other pushes of a step, and some for calls.
They are started when they are needed."""


class Server:
    """A server without a process of its own: used by `serve` and by the in-process yard.

    `on_lost` is called when the coordinator is gone or has declared this server dead, when a log cannot be written,
    or when a push was applied only in part. `on_drain` is called when the coordinator says that this server is to leave
    in order. `logs`: the folder of logs; None: jobs that need one are refused.
    `budget`: the memory for rows of tables; None: there is no bound. `quotas`: None: the default ones. `on_revoked`: as
    of MembershipClient.
    """

    def __init__(
        self,
        network: Network,
        coordinator: str,
        *,
        on_lost: Callable[[errors.ShardyardError], None],
        on_drain: Callable[[], None] = lambda: None,
        coordinator_grace_ms: int = COORDINATOR_GRACE_MS,
        logs: LogRoot | None = None,
        budget: Budget | None = None,
        access: StorageAccess | None = None,
        quotas: QuotaSettings | None = None,
        on_revoked: Callable[[frozenset[str]], None] | None = None,
    ) -> None:
        self._on_revoked = on_revoked
        self._grace_ms = coordinator_grace_ms
        self._logs = logs
        quotas = quotas or QuotaSettings()
        most, per_s = quotas.receive_bytes_max, quotas.requests_per_s_max
        self.store = Store(
            logs=logs,
            on_failure=on_lost,
            budget=budget,
            receive_bytes_max=memory_bytes() // 2 if most == AUTO else most,
            rates=RequestRates(per_s) if per_s else None,
            access=access or StorageAccess(),
        )
        self.servicer = Servicer(self.store)
        self._peer = network.connect(coordinator, name="coordinator", unavailable=errors.CoordinatorUnavailable)
        self._on_lost, self._on_drain = on_lost, on_drain
        self._empty = False
        self._enrolment: MembershipClient | None = None

    def service(self) -> Service:
        return self.servicer.service()

    def register(self, address: str, *, patience_ms: int, stop: threading.Event | None = None) -> None:
        """Registers the address at which workers reach this server, and begins to send heartbeats.

        Raises CoordinatorUnavailable after `patience_ms`, or when `stop` is set meanwhile, and any error of the folder
        of logs.
        """
        membership = Membership(MemberRole.SERVER, address, logs="" if self._logs is None else self._logs.id)
        enrolment = MembershipClient(
            self._peer,
            membership,
            on_reply=self._hear,
            on_lost=self._on_lost,
            report=self._report,
            grace_ms=self._grace_ms,
            on_revoked=self._on_revoked,
        )
        enrolment.register(patience_ms=patience_ms, stop=stop)
        self.store.become(enrolment.incarnation, enrolment.term)
        enrolment.start()
        self._enrolment = enrolment

    @property
    def pass_key(self) -> bytes:
        """The key with which the coordinator signs passes."""
        return b"" if self._enrolment is None else self._enrolment.pass_key

    def drain(self, hurry: threading.Event) -> None:
        """Leaves in order: returns when the coordinator has given the partitions of unfinished jobs to other servers,
        when the time for that is over, or once `hurry` is set. `leave` follows."""
        enrolment = self._enrolment
        if enrolment is None:
            return
        begun = heard = time.monotonic()
        told = False
        log.info("leaves in order, within %g s; another signal ends it at once", enrolment.drain_ms / 1000)
        with ExplainedWait(lambda: "the partitions of this server to move to others", logger=log) as wait:
            while not self._empty and (time.monotonic() - begun) * 1000 < enrolment.drain_ms:
                try:
                    if told:
                        enrolment.beat()
                    else:
                        self._empty = enrolment.drain().empty
                    told, heard = True, time.monotonic()
                except (errors.Unavailable, errors.NotReady) as error:
                    if (time.monotonic() - heard) * 1000 >= enrolment.lease_ms:
                        log.warning("leaves with its partitions, since nobody can move them: %s", error.what)
                        return
                except errors.ShardyardError as error:
                    log.warning("leaves, since it is not a member any more: %s", error.what)
                    return
                if self._empty or hurry.wait(DRAIN_POLL_MS / 1000):
                    return
                wait.tick()

    def leave(self) -> None:
        if self._enrolment is not None:
            self._enrolment.leave()
        self._peer.close()

    def close(self) -> None:
        """Forgets all jobs. The server must no longer be serving."""
        self.store.close()

    def _report(self, request: wire.HeartbeatRequest) -> None:
        pulls.expire_pins(self.store)  # also while the coordinator cannot be reached
        for hosted in self.store.hosted():
            if hosted.wal is not None:
                request.logs.add(job=hosted.job, length=hosted.wal.segment_bytes)
            if hosted.layout.tables:
                request.tables.add(job=hosted.job, rows=[table.rows for table in hosted.describe_tables()])
        request.waiting_for = self.store.wait_registry.waiting_for

    def _hear(self, reply: wire.HeartbeatReply) -> None:
        orders.fence(self.store, reply.fenced)
        if reply.HasField("drain"):
            self._empty = reply.drain.empty
            self._on_drain()


def _logs(folder: Path, now_s: float) -> LogRoot | None:
    """Returns the folder of logs, if it can be used, and deletes logs that were put aside there long ago."""
    logs = LogRoot(folder.resolve())
    try:
        log.debug("logs are kept in %s, which is %s", logs.path, logs.id)
        for aside in logs.delete_aside(now_s):
            log.warning("deleted %s, which was put aside %d days ago or earlier", aside, ASIDE_KEPT_S // DAY_S)
    except (errors.StorageUnavailable, errors.LogDamaged) as error:
        log.warning("this server takes no jobs that need a log: %s", error.what)
        return None
    return logs


def _local_listener(servicer: Servicer, folder: Path | None, *, tls: bool) -> LocalListener | None:
    keys = servicer.keys if tls else None
    try:
        local = LocalListener(methods.PUSH_PULL, servicer.push_pull, connections_max=THREADS, folder=folder, keys=keys)
    except errors.NotShareable as error:
        log.warning("workers on this machine use streams: %s", error.what)
        return None
    servicer.socket = local.address
    return local


def serve(
    *,
    coordinator: str,
    bind: str,
    advertise: str | None,
    settings: Settings,
    stop: threading.Event,
    hurry: threading.Event,
    ready: Callable[[str], None],
) -> None:
    """Runs a server until `stop` is set, or the coordinator wants it to leave. Then it leaves in order, at once if
    `hurry` is set. Calls `ready` with its address once it can be used.

    Raises AddressInUse and CoordinatorUnavailable; CoordinatorLost or StaleIncarnation when the coordinator is gone or
    has declared this server dead; StorageUnavailable when a log cannot be written, or no file can be made in the folder
    for colder rows.
    """
    tune_malloc()
    lost: list[errors.ShardyardError] = []

    def on_lost(error: errors.ShardyardError) -> None:
        lost.append(error)
        stop.set()

    try:
        credentials = own_credentials(settings, Role.SERVER, coordinator=coordinator, stop=stop)
    except errors.Unavailable:
        if stop.is_set():
            return
        raise

    def on_revoked(holders: frozenset[str]) -> None:
        listener.revoke(holders)
        if local is not None:
            local.revoke(holders)

    server = Server(
        GrpcNetwork(credentials),
        coordinator,
        on_lost=on_lost,
        on_drain=stop.set,
        coordinator_grace_ms=settings.membership.coordinator_grace_ms,
        logs=_logs(settings.yard.wal_folder, time.time()),
        budget=budget_in(settings.yard.cold_folder, settings.yard.memory_bytes_max),
        access=StorageAccess(settings.storage.allowed, key_file=settings.storage.key_file),
        quotas=settings.quotas,
        on_revoked=on_revoked,
    )
    security = (
        None if credentials is None else ServerSecurity(credentials, Door(checks_passes=True, rates=server.store.rates))
    )
    listener = GrpcServer(bind, [server.service()], security, threads=THREADS, vital=ORDERS)
    local = _local_listener(server.servicer, settings.yard.sockets_folder, tls=security is not None)
    listener.start()
    if local is not None:
        local.start()
    try:
        address = advertise or listener.address
        try:
            server.register(address, patience_ms=settings.membership.coordinator_grace_ms, stop=stop)
            if security is not None:
                security.door.passes = PassVerifier(server.pass_key)
        except errors.Unavailable:
            if stop.is_set():
                return
            raise
        logs.bind_process(role="server", id=server.store.incarnation)
        listener.set_ready(ready=True)
        log.info("serving", extra={"address": address, "coordinator": coordinator})
        ready(address)
        stop.wait()
        if not lost:
            server.drain(hurry)
    finally:
        server.leave()
        listener.stop()
        if local is not None:
            local.stop()
        server.close()
    if lost:
        raise lost[0]
