"""A yard inside one process: coordinator, servers and one worker, over the in-process network.

It uses the same servicers, ledgers and optimizers as over gRPC, and gives them the same bytes. So a script runs alone
as it runs in a yard; in synchronous mode down to the last bit. Owns: the order of starting and stopping. Must not know:
how any role works.
"""

from __future__ import annotations

import logging
import time

from shardyard.config.settings import Settings
from shardyard.domain import errors
from shardyard.domain.consistency import Durability
from shardyard.runtime.clock import SystemClock
from shardyard.runtime.waits import ExplainedWait
from shardyard.transport.in_process import InProcessNetwork
from shardyard_coordinator.service.journal import Journal
from shardyard_coordinator.service.service import Coordinator
from shardyard_ps_server.service.process import Server
from shardyard_ps_server.tables.memory.budget import budget_in
from shardyard_ps_server.wal.segments import LogRoot
from shardyard_worker.job import connect as worker
from shardyard_worker.job.job import Job
from shardyard_worker.session.interrupts import INTERRUPTS

log = logging.getLogger("shardyard.local")

LOOK_AGAIN_S = 0.02
COORDINATOR = "in-process:coordinator"


class LocalYard:
    """Coordinator and servers, started; `network` reaches them."""

    def __init__(self, settings: Settings) -> None:
        yard = settings.yard
        # before anything is started, because it may be refused
        budgets = [budget_in(yard.cold_folder, yard.memory_bytes_max) for _ in range(yard.servers)]
        self.network = InProcessNetwork()
        self._journal = Journal(None, secluded=True)
        self._coordinator = Coordinator(
            network=self.network, journal=self._journal, clock=SystemClock(), membership=settings.membership
        )
        self._coordinator.start()
        self.network.listen(COORDINATOR, [self._coordinator.service])
        self._servers: list[Server] = []
        logs = LogRoot(settings.yard.wal_folder) if settings.job.durability is Durability.WAL else None
        for index, budget in enumerate(budgets):
            server = Server(self.network, COORDINATOR, on_lost=_log_loss, logs=logs, budget=budget)
            address = f"in-process:server-{index}"
            self.network.listen(address, [server.service()])
            server.register(address, patience_ms=settings.membership.coordinator_grace_ms)
            self._servers.append(server)

    def close(self) -> None:
        """Stops everything once the last checkpoint is written. No thread is left. Raises StorageUnavailable if it was
        not written."""
        with ExplainedWait(lambda: "the last checkpoint of the job", logger=log) as wait:
            while self._coordinator.is_finishing:
                wait.tick()
                time.sleep(LOOK_AGAIN_S)
        unwritten = self._coordinator.unwritten
        for server in self._servers:
            server.leave()
            server.close()
        self._coordinator.stop()
        self._journal.close()
        if unwritten is not None:
            raise unwritten


def connect(settings: Settings) -> Job:
    """Starts a yard in this process and joins it. Leaving the job ends the yard."""
    for role in ("shardyard.coordinator", "shardyard.server"):
        # in one process, logs about its own parts joining and leaving are not useful
        if logging.getLogger(role).level == logging.NOTSET:
            logging.getLogger(role).setLevel(logging.WARNING)
    job: Job | None = None
    try:
        with INTERRUPTS:
            yard = LocalYard(settings)
            inside = settings.model_copy(update={"coordinator": COORDINATOR})
            job = worker.connect(inside, network=yard.network, on_close=yard.close)
    except KeyboardInterrupt:
        if job is not None:
            job.close("KeyboardInterrupt")
        raise
    return job


def _log_loss(error: errors.ShardyardError) -> None:
    log.error("a server has lost its standing: %s", error)
