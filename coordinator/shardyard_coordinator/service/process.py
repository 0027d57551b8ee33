"""The coordinator as a process: journal, listener, service, from start to stop.

Owns: the order of starting and stopping. Invariant: `ready` is called once, when requests are served; when `serve`
returns, none of its threads runs, and another process can open the journal. Must not know: signals, the command line.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from shardyard.config.settings import CHECKPOINTS, Settings
from shardyard.runtime.clock import SystemClock
from shardyard.runtime.log import bind_process
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.malloc import tune_malloc
from shardyard_coordinator.service.journal import Journal
from shardyard_coordinator.service.service import Coordinator

log = logging.getLogger("shardyard.coordinator")


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
    with ExitStack() as ending:
        journal = Journal(state)
        ending.callback(journal.close)
        coordinator = Coordinator(
            network=GrpcNetwork(),
            journal=journal,
            clock=SystemClock(),
            membership=settings.membership,
            checkpoints=None if state is None else str((state / CHECKPOINTS).resolve()),
        )
        ending.callback(coordinator.stop)
        listener = GrpcServer(bind, [coordinator.service])
        ending.callback(listener.stop)
        coordinator.start()
        listener.start()
        listener.set_ready(ready=True)
        address = listener.address if advertise is None else _with_port(advertise, listener.port)
        bind_process(role="coordinator", id=f"{journal.term}")
        log.info("the coordinator serves at %s (term %d)", address, journal.term)
        ready(address)
        stop.wait()


def _with_port(advertise: str, port: int) -> str:
    host, _, given = advertise.rpartition(":")
    return f"{host}:{port}" if given == "0" else advertise
