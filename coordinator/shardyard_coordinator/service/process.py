"""The coordinator as a process: journal, listener, service, from start to stop.

Owns: the order of starting and stopping. Invariant: `ready` is called once, when requests are served; when `serve`
returns, none of its threads runs, and another process can open the journal. Must not know: signals, the command line.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from shardyard.config.settings import CHECKPOINTS, Settings
from shardyard.domain import limits
from shardyard.domain.errors import StorageUnavailable
from shardyard.runtime.clock import SystemClock
from shardyard.runtime.log import bind_process
from shardyard.runtime.malloc import tune_malloc
from shardyard.runtime.waits import ExplainedWait
from shardyard.security.audit_log import AuditLog
from shardyard.security.local import FOLDER, forget_yard, is_loopback, remember_yard
from shardyard.security.passes import PassSigner
from shardyard.security.request_rates import RequestRates
from shardyard.storage.access import StorageAccess
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.tls import ServerSecurity
from shardyard.wire import methods
from shardyard_coordinator.service.identities import security_of
from shardyard_coordinator.service.journal import Journal
from shardyard_coordinator.service.rpcs.table import make_waiting_service
from shardyard_coordinator.service.service import Coordinator

log = logging.getLogger("shardyard.coordinator")

VITAL: Final = frozenset((methods.HEARTBEAT.path, methods.LEAVE.path))
"""What members live by. It is served however many other calls there are."""
OPEN_AGAIN_S: Final = 0.5
"""The pause between two tries to open a journal whose disk is full."""


def serve(
    *,
    bind: str,
    advertise: str | None,
    settings: Settings,
    state: Path | None,
    stop: threading.Event,
    ready: Callable[[str], None],
) -> None:
    """Serves the coordinator at `bind` until `stop` is set.

    `advertise`: the HOST:PORT that `ready` gets if others use another address than `bind`; port 0 in it means the
    port of `bind`. `state`: the journal's folder; None keeps the journal in memory. Raises AddressInUse and
    ConfigurationError.
    """
    tune_malloc()
    own = Path(settings.yard.state) if state is None else state
    identities, security = security_of(settings.security, own)
    folder = (own / FOLDER).absolute()
    audit_log = None if security is None else _open_audit(folder, security)
    if security is not None and settings.quotas.requests_per_s_max:
        security.door.rates = RequestRates(settings.quotas.requests_per_s_max)
    with ExitStack() as ending:
        journal = _open_journal(state, bind, stop, security)
        if journal is None:
            return
        ending.callback(journal.close)
        coordinator = Coordinator(
            network=GrpcNetwork(None if security is None else security.credentials),
            journal=journal,
            clock=SystemClock(),
            membership=settings.membership,
            quotas=settings.quotas,
            checkpoints=None if state is None else str((state / CHECKPOINTS).resolve()),
            access=StorageAccess(
                settings.storage.allowed, None if state is None else state / CHECKPOINTS, settings.storage.key_file
            ),
            identities=identities,
            signer=None if security is None else PassSigner(folder),
            audit_log=audit_log,
            open_to="" if security is not None or is_loopback(bind.rpartition(":")[0]) else bind,
        )
        ending.callback(coordinator.stop)
        listener = GrpcServer(bind, [coordinator.service], security, vital=VITAL)
        ending.callback(listener.stop)
        if identities is not None:
            identities.on_revoked = listener.revoke
        coordinator.start()
        listener.start()
        listener.set_ready(ready=True)
        address = listener.address if advertise is None else _with_port(advertise, listener.port)
        bind_process(role="coordinator", id=f"{journal.term}")
        log.info("the coordinator serves at %s (term %d)", address, journal.term)
        if identities is not None:
            for each in {address, listener.address}:
                remember_yard(each, identities.folder)
                ending.callback(forget_yard, each, identities.folder)
        ready(address)
        stop.wait()


def _open_journal(
    state: Path | None, bind: str, stop: threading.Event, security: ServerSecurity | None
) -> Journal | None:
    """Waits while the disk is full, since members of a former run continue for as long as they are answered. None if
    `stop` is set first. Raises ConfigurationError."""
    try:
        return Journal(state)
    except StorageUnavailable as error:
        log.critical("%s", error)
        last = error.what
    with (
        ExitStack() as ending,
        ExplainedWait(lambda: f"the journal to be opened: {last}", after_ms=limits.SHOW_WAIT_MS, logger=log) as wait,
    ):
        if not bind.endswith(":0"):
            # whoever asks learns that it is there
            answering = GrpcServer(bind, [make_waiting_service(lambda: last)], security)
            ending.callback(answering.stop)
            answering.start()
        while not stop.wait(OPEN_AGAIN_S):
            wait.tick()
            try:
                return Journal(state)
            except StorageUnavailable as error:
                last = error.what
    return None


def _open_audit(folder: Path, security: ServerSecurity) -> AuditLog:
    """The yard's audit, to which the door writes whom it refuses. Raises StorageUnavailable."""
    audit_log = AuditLog(folder)

    def note(path: str, where: str, why: str) -> None:
        with contextlib.suppress(OSError):  # the caller is refused in any case
            audit_log.add(path.rpartition("/")[2], who="", where=where, outcome=why)

    security.door.on_refused = note
    return audit_log


def _with_port(advertise: str, port: int) -> str:
    host, _, given = advertise.rpartition(":")
    return f"{host}:{port}" if given == "0" else advertise
