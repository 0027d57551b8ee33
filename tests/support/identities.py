"""A yard's authority, with certificates for each role, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from shardyard.config.settings import Settings
from shardyard.domain import errors
from shardyard.security.authority import Authority, make_credentials
from shardyard.security.credentials import Credentials, write_credentials
from shardyard.security.door import Door
from shardyard.security.identity import Role
from shardyard.security.local import find_credentials
from shardyard.security.passes import Speaker
from shardyard.transport.grpc_client import GrpcNetwork, GrpcPeer
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.interfaces import Service
from shardyard.transport.tls import ServerSecurity
from shardyard.wire import methods
from shardyard.wire.method import Method

DAY_S = 86_400


def network_to(coordinator: str, role: Role = Role.OPERATOR) -> GrpcNetwork:
    """How a process of this machine reaches the yard of a coordinator, which runs in a process of its own."""
    return GrpcNetwork(find_credentials(Settings(), role, coordinator=coordinator))


def coordinator_at(address: str) -> GrpcPeer:
    """The coordinator of a yard, for an operator. The caller closes it."""
    return network_to(address).connect(address, name="coordinator", unavailable=errors.CoordinatorUnavailable)


class OpenDoor(Door):
    """Knows who calls, and admits each of them to every method: for tests of the network alone."""

    def admit(self, method: Method[Any, Any], connection: Mapping[str, Iterable[bytes]], shown: bytes = b"") -> Speaker:
        return super().admit(methods.ENROL, connection, shown)


class Identities:
    """The authority of a yard, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder / "authority")

    def of(self, role: Role, name: str = "", *, lifetime_s: float = DAY_S) -> Credentials:
        name = name or role.value
        folder = self.folder / name
        write_credentials(folder, make_credentials(self.authority, role, name, lifetime_s))
        return Credentials(folder)

    def network(self, role: Role) -> GrpcNetwork:
        return GrpcNetwork(self.of(role))

    @contextlib.contextmanager
    def serving(self, service: Service, role: Role, door: Door | None = None) -> Iterator[str]:
        """A process of this role that serves. Yields its address."""
        security = ServerSecurity(self.of(role, f"serving-{role.value}"), door or Door())
        listener = GrpcServer("127.0.0.1:0", [service], security, threads=8)
        listener.start()
        listener.set_ready(ready=True)
        try:
            yield listener.address
        finally:
            listener.stop()


def raw_channel(address: str, role: str, credentials: Credentials | None, **files: bytes) -> grpc.Channel:
    """A channel of gRPC itself, to a process that shows a certificate of `role`."""
    if credentials is None:
        return grpc.insecure_channel(address)
    pem = credentials.pem
    shown = grpc.ssl_channel_credentials(
        files.get("authorities", pem.authorities), files.get("key", pem.key), files.get("certificate", pem.certificate)
    )
    return grpc.secure_channel(address, shown, options=[("grpc.ssl_target_name_override", f"{role}.shardyard")])
