"""A coordinator with an authority of its own, in this process, for tests."""

from __future__ import annotations

from pathlib import Path

from shardyard.config.settings import MembershipSettings, SecuritySettings
from shardyard.domain import errors
from shardyard.runtime.clock import SystemClock
from shardyard.security.authority import make_credentials
from shardyard.security.credentials import Credentials, write_credentials
from shardyard.security.identity import Role
from shardyard.transport.grpc_client import GrpcNetwork, GrpcPeer
from shardyard.transport.grpc_server import GrpcServer
from shardyard_coordinator.service.identities import YardIdentities
from shardyard_coordinator.service.journal import Journal
from shardyard_coordinator.service.service import Coordinator


class SigningYard:
    """Its files are in `folder`. The caller closes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identities = YardIdentities(SecuritySettings(), folder / "identity" / "authority")
        self._journal = Journal(folder / "journal")
        self._coordinator = Coordinator(
            network=GrpcNetwork(self.identities.credentials),
            journal=self._journal,
            clock=SystemClock(),
            membership=MembershipSettings(lease_ms=2_000, heartbeat_ms=50),
            identities=self.identities,
        )
        self._listener = GrpcServer("127.0.0.1:0", [self._coordinator.service], self.identities.security, threads=8)
        self._peers: list[GrpcPeer] = []
        self._coordinator.start()
        self._listener.start()

    @property
    def address(self) -> str:
        return self._listener.address

    def credentials(self, role: Role, name: str, lifetime_s: float = 3_600) -> Credentials:
        folder = self.folder / name
        write_credentials(folder, make_credentials(self.identities.authority, role, name, lifetime_s))
        return Credentials(folder)

    def connect(self, credentials: Credentials) -> GrpcPeer:
        peer = GrpcNetwork(credentials).connect(
            self.address, name="coordinator", unavailable=errors.CoordinatorUnavailable
        )
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._listener.stop()
        self._coordinator.stop()
        self._journal.close()
