"""A peer of each kind of network, and a gRPC listener."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shardyard.domain import errors
from shardyard.security.identity import Role
from shardyard.transport import grpc_client as channel
from shardyard.transport import grpc_server as listener_module
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.in_process import InProcessNetwork
from shardyard.transport.interfaces import LocalAddress, Network, Stream
from shardyard.transport.local_listener import LocalListener
from shardyard.transport.tls import ServerSecurity
from shardyard.wire import methods
from shardyard.wire.method import Method
from tests.support.echoes import (
    Echo,
    Stage,
)
from tests.support.identities import Identities, OpenDoor
from tests.support.waiting import wait_until


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    return Identities(tmp_path_factory.mktemp("identities"))


@pytest.fixture(params=["grpc", "grpc, public interface", "grpc, TLS", "in process", "local socket"])
def stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, identities: Identities) -> Iterator[Stage]:
    before = set(threading.enumerate())
    if request.param == "grpc, public interface":
        monkeypatch.setattr(channel, "TRIED", False)
        monkeypatch.setattr(listener_module, "TRIED", False)
    local: LocalListener | None = None
    if request.param != "in process":
        has_tls = request.param == "grpc, TLS"
        network: Network = identities.network(Role.WORKER) if has_tls else GrpcNetwork(None)
        echo = Echo(network)
        security = ServerSecurity(identities.of(Role.SERVER), OpenDoor()) if has_tls else None
        listener = GrpcServer("127.0.0.1:0", echo.services(), security, threads=8)
        listener.start()
        echo.address = listener.address

        def leave() -> None:
            listener.stop()
            if local is not None:
                local.stop()
    else:
        network = in_process = InProcessNetwork()
        echo = Echo(network)
        echo.address = "somewhere:1"
        in_process.listen(echo.address, echo.services())

        def leave() -> None:
            in_process.leave(echo.address)

    peer = network.connect(echo.address, name="server echo", unavailable=errors.CoordinatorUnavailable)
    if request.param == "local socket":
        local = LocalListener(methods.PUSH_PULL, echo.push_pull, connections_max=8)
        local.start()
        over_grpc, address = peer.open, local.address

        def open_local(method: Method[Any, Any], *, timeout_ms: int) -> Stream:
            """As workers do."""
            try:
                return over_grpc(method, timeout_ms=timeout_ms, socket=LocalAddress(address))
            except errors.NotShareable:
                return over_grpc(method, timeout_ms=timeout_ms)

        monkeypatch.setattr(peer, "open", open_local)
    yield Stage(echo, peer, leave)
    echo.hang.set()
    peer.close()
    leave()
    wait_until(lambda: not [each for each in threading.enumerate() if each not in before], "all threads to end")


@pytest.fixture
def echo() -> Echo:
    return Echo(GrpcNetwork(None))


@pytest.fixture
def listener(echo: Echo) -> Iterator[GrpcServer]:
    found = GrpcServer("127.0.0.1:0", echo.services(), None, threads=4)
    yield found
    found.stop()
