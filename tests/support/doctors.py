"""What `shardyard doctor` meets in tests: coordinators that only tell their status, and short patience."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from shardyard.domain.limits import PROTOCOL
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.interfaces import Context, Service
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.probes import network

OURS = version("shardyard")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy from outside, and short patience."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(network, "CONNECT_S", 0.5)
    monkeypatch.setattr(network, "CALL_MS", 1_000)


@contextlib.contextmanager
def serving(service: Service, *, ready: bool = True) -> Iterator[str]:
    listener = GrpcServer("127.0.0.1:0", [service], None, threads=4)
    try:
        listener.start()
        listener.set_ready(ready=ready)
        yield listener.address
    finally:
        listener.stop()


def coordinator(
    *members: wire.MemberStatus, release: str = OURS, protocol: int = PROTOCOL, ahead_ms: int | None = 0
) -> Service:
    """`ahead_ms`: of its wall clock; None: it does not tell."""

    def status(_: wire.StatusRequest, __: Context) -> wire.StatusReply:
        time_ms = 0 if ahead_ms is None else time.time_ns() // 1_000_000 + ahead_ms
        return wire.StatusReply(
            term=3, uptime_ms=5_000, members=members, time_ms=time_ms, protocol=protocol, release=release
        )

    service = Service("Coordinator")
    service.on(methods.STATUS, status)
    return service


def member(address: str, number: int = 2, release: str = OURS) -> wire.MemberStatus:
    return wire.MemberStatus(
        incarnation=(1 << 32) + number, role=wire.ROLE_SERVER, address=address, host="h", pid=1, release=release
    )


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
