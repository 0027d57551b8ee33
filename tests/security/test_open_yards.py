"""A yard without TLS stays on its machine, unless that is asked for; then it says so again and again."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from shardyard.config.settings import MembershipSettings
from shardyard.runtime.clock import SystemClock
from shardyard.security.local import is_loopback
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_server import GrpcServer
from shardyard_coordinator.service import service as service_module
from shardyard_coordinator.service.journal import Journal
from shardyard_coordinator.service.service import Coordinator
from shardyard_launcher.cli import main
from tests.support.waiting import wait_until

PLAIN = ("--set", "security.tls=false")


@pytest.mark.parametrize("role", ["coordinator", "server", "agent"])
@pytest.mark.parametrize("bind", ["0.0.0.0:7999", "[::]:7999", "192.0.2.7:7999", "myhost:7999"])
def test_role_without_tls_does_not_listen_on_the_network(
    role: str, bind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = () if role == "coordinator" else ("--coordinator", "127.0.0.1:1")
    assert main([role, "--bind", bind, *PLAIN, *more]) == 2
    said = capsys.readouterr().err
    assert f"without TLS this process does not listen on {bind.rpartition(':')[0]}" in said
    assert "--insecure-network" in said


def test_yard_on_the_network_by_its_settings_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", *PLAIN, "--set", "yard.bind=0.0.0.0", __file__]) == 1
    assert "without TLS this process does not listen on 0.0.0.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("[::]", False),
        ("10.0.0.1", False),
        ("[fe80::1%lo]", False),
        ("alpha", False),
        ("", False),
    ],
)
def test_only_loopback_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_yard_that_is_open_says_so_again_and_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(service_module, "WARN_EVERY_S", 0.2)
    journal = Journal(tmp_path / "journal")
    coordinator = Coordinator(
        network=GrpcNetwork(None),
        journal=journal,
        clock=SystemClock(),
        membership=MembershipSettings(),
        open_to="0.0.0.0:7070",
        tick_ms=20,
    )
    listener = GrpcServer("127.0.0.1:0", [coordinator.service], None, threads=2)
    try:
        with caplog.at_level(logging.WARNING):
            coordinator.start()
            listener.start()
            wait_until(lambda: caplog.text.count("whoever reaches 0.0.0.0:7070 can") >= 2, "two warnings")
        assert main(["status", "--coordinator", listener.address, *PLAIN]) == 0
        assert "the yard is open: whoever reaches 0.0.0.0:7070" in capsys.readouterr().out
        assert main(["status", "--json", "--coordinator", listener.address, *PLAIN]) == 0
        assert json.loads(capsys.readouterr().out)["open_to"] == "0.0.0.0:7070"
    finally:
        listener.stop()
        coordinator.stop()
        journal.close()
