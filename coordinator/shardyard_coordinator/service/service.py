"""Builds, starts and stops the parts of the coordinator, and runs its ticker.

A request goes through `rpcs` to the machine, which lives in the `mailbox` behind one lock. The machine's effects are
carried out by `server_calls`, or by the request that waits for them.
Owns: the parts, the ticker thread. Must not know: what is decided, how messages look.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from importlib.metadata import version
from typing import Final

from shardyard.config.settings import MembershipSettings, QuotaSettings
from shardyard.domain.errors import ShardyardError, StorageUnavailable
from shardyard.domain.ids import Incarnation, JobId
from shardyard.runtime.clock import Clock
from shardyard.runtime.waits import WaitRegistry
from shardyard.security.audit_log import AuditLog
from shardyard.security.passes import PassSigner
from shardyard.storage.access import StorageAccess
from shardyard.transport.interfaces import Network
from shardyard_coordinator.core import effects
from shardyard_coordinator.members.membership import Member
from shardyard_coordinator.service.checkpoint_io import CheckpointIO
from shardyard_coordinator.service.group_keys import GroupKeys
from shardyard_coordinator.service.identities import YardIdentities
from shardyard_coordinator.service.journal import Journal
from shardyard_coordinator.service.mailbox import Mailbox
from shardyard_coordinator.service.residual_collection import ResidualCollections
from shardyard_coordinator.service.rpcs.rpc import Backend
from shardyard_coordinator.service.rpcs.table import make_service
from shardyard_coordinator.service.server_calls import ServerCalls
from shardyard_coordinator.service.server_client import ServerClient

log = logging.getLogger("shardyard.coordinator")

TICK_MS: Final = 100
WARN_EVERY_S: Final = 60


class Coordinator:
    """Serves `service` from `start` until `stop`, continuing from the journal's records. The caller closes the journal
    after `stop`. `checkpoints`: the URL of the checkpoints of jobs that name none; `access`: where those of others may
    be; `identities`: None if the yard signs no certificates; `signer`: of passes, None
    without TLS. Raises ConfigurationError if the journal cannot be read."""

    def __init__(
        self,
        *,
        network: Network,
        journal: Journal,
        clock: Clock,
        membership: MembershipSettings,
        quotas: QuotaSettings | None = None,
        checkpoints: str | None = None,
        access: StorageAccess | None = None,
        identities: YardIdentities | None = None,
        signer: PassSigner | None = None,
        audit_log: AuditLog | None = None,
        open_to: str = "",
        tick_ms: int = TICK_MS,
    ) -> None:
        self._tick_ms = tick_ms
        self._identities = identities
        self._open_to, self._warned_s = open_to, -math.inf
        access = access or StorageAccess()
        self._wait_registry = WaitRegistry(logger=log)
        self._mailbox = Mailbox(
            journal,
            clock=clock,
            membership=membership,
            quotas=quotas or QuotaSettings(),
            checkpoints=checkpoints,
            wait_registry=self._wait_registry,
        )
        self._servers = ServerClient(network, journal.term, self._wait_registry)
        self._residuals = ResidualCollections(self._workers_of, self._wait_registry)
        checkpoint_io = CheckpointIO(
            self._servers,
            feedback=self._residuals,
            heartbeat_ms=membership.heartbeat_every_ms,
            access=access,
            authority=None if identities is None else identities.authority,
        )
        self._calls = ServerCalls(self._mailbox, self._servers, checkpoint_io, self._wait_registry)
        self._group_keys = GroupKeys()
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="coordinator-ticker", daemon=True)
        self.service = make_service(
            Backend(
                mailbox=self._mailbox,
                calls=self._calls,
                servers=self._servers,
                checkpoint_io=checkpoint_io,
                access=access,
                residuals=self._residuals,
                group_keys=self._group_keys,
                wait_registry=self._wait_registry,
                membership=membership,
                checkpoints=checkpoints,
                release=version("shardyard"),
                identities=identities,
                signer=signer,
                audit_log=audit_log,
                open_to=open_to,
            )
        )

    def start(self) -> None:
        """Repeats the effects that a former run may not have carried out, and starts the ticker."""
        self._mailbox.resume(self._calls.start)
        self._ticker.start()

    def stop(self) -> None:
        """Waits for its threads. Later requests get NotReady."""
        self._mailbox.close()
        self._stop.set()
        self._residuals.close()
        if self._ticker.is_alive():
            with self._wait_registry.over(lambda: "the ticker to end, before the coordinator does"):
                self._ticker.join()
        self._calls.close()
        self._servers.close()
        self._wait_registry.close()

    @property
    def is_finishing(self) -> bool:
        """Whether a job waits for its last checkpoint, or readers still read its final values."""
        with self._mailbox.machine() as machine:
            return any(
                job.phase is effects.JobPhase.FINISHING or (job.readers.keep_values and len(job.readers))
                for job in machine.jobs
            )

    @property
    def unwritten(self) -> StorageUnavailable | None:
        """The failure of a job that has ended without its last checkpoint."""
        with self._mailbox.machine() as machine:
            failures = [job.failure for job in machine.jobs]
        return next((each for each in failures if isinstance(each, StorageUnavailable)), None)

    def _tick(self) -> None:
        while not self._stop.wait(self._tick_ms / 1000):
            self._mailbox.repair(self._calls.start)
            try:
                if self._identities is not None:
                    self._identities.tick()
                    self._identities.go_on(self._members)
                self._warn_if_open()
                self._calls.tick()
            except ShardyardError as error:
                log.debug("no tick: %s", error)
            except Exception:
                log.exception("a tick failed")

    def _warn_if_open(self) -> None:
        """Says each minute that everybody on the network may use this yard."""
        if self._open_to and time.monotonic() - self._warned_s >= WARN_EVERY_S:
            self._warned_s = time.monotonic()
            log.warning(
                "the yard is open: whoever reaches %s can train, stop jobs, and run programs (security.tls is false)",
                self._open_to,
            )

    def _members(self) -> tuple[Member, ...]:
        with self._mailbox.machine() as machine:
            return machine.members

    def _workers_of(self, job: JobId) -> frozenset[Incarnation]:
        with self._mailbox.machine() as machine:
            return frozenset(worker for each in machine.jobs if each.id == job for worker in each.workers)
