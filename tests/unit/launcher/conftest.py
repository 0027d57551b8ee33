"""What tests of the launcher share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.config.settings import MembershipSettings
from shardyard.runtime.clock import SystemClock
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_server import GrpcServer
from shardyard_coordinator.service.journal import Journal
from shardyard_coordinator.service.service import Coordinator


@pytest.fixture(autouse=True)
def _bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, and no setting from outside. The peers of these tests have no certificates."""
    for name in list(os.environ):
        if name.startswith("SHARDYARD"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SHARDYARD__SECURITY__TLS", "false")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[str]:
    """The address of one that has a journal, and no servers."""
    journal = Journal(tmp_path / "journal")
    network = GrpcNetwork(None)
    serving = Coordinator(network=network, journal=journal, clock=SystemClock(), membership=MembershipSettings())
    listener = GrpcServer("127.0.0.1:0", [serving.service], None, threads=2)
    try:
        serving.start()
        listener.start()
        yield listener.address
    finally:
        listener.stop()
        serving.stop()
        journal.close()
