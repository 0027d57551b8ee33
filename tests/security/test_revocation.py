"""Certificates that are revoked are refused within one heartbeat, also on streams that are open: promise S3."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardyard.config import configuration
from shardyard.domain import errors
from shardyard.security.authority import Authority, make_credentials
from shardyard.security.credentials import Credentials, write_credentials
from shardyard.security.identity import Role
from shardyard.security.revocations import FILE, REVOKED_MAX, Revocations
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.cli import main
from shardyard_launcher.yard.local_cluster import LocalCluster
from shardyard_worker.job import connect as worker
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    given = {"yard.servers": 1, "yard.workers": 1, "yard.coordinator_port": 0, "membership.lease_ms": 2_000}
    folder = tmp_path_factory.mktemp("yard") / "state"
    cluster = LocalCluster(configuration.load(None, {}, given).settings, folder, tied=True)
    try:
        cluster.start(stop=threading.Event())
        yield cluster
    finally:
        cluster.stop()


def network(yard: LocalCluster, role: Role, name: str) -> GrpcNetwork:
    identities = yard._folder / "identity"
    folder = identities / name
    write_credentials(folder, make_credentials(Authority(identities / "authority"), role, name, 3_600))
    return GrpcNetwork(Credentials(folder))


def joined(yard: LocalCluster, name: str, **settings: str) -> Any:
    """A job of a worker of this name."""
    given = {"coordinator": yard.coordinator, "job.name": name, "log.level": "error", **settings}
    given["membership.coordinator_grace_ms"] = "500"
    loaded = configuration.load(None, {}, given).settings
    job = worker.connect(loaded, network=network(yard, Role.WORKER, name))
    job.register({"w": torch.arange(20.0)}, lr=0.5)
    return job


def command(yard: LocalCluster, *arguments: str) -> int:
    return main([*arguments, "--state", str(yard._folder), "--coordinator", yard.coordinator])


@pytest.mark.parametrize("same_host", ["auto", "never"])
def test_worker_that_is_revoked_reaches_nothing_any_more(yard: LocalCluster, same_host: str) -> None:
    """Over the local socket, and over streams of gRPC: its next exchange fails, and so does its heartbeat."""
    name = f"eve-{same_host}"
    eve, ada = joined(yard, name, **{"worker.same_host": same_host}), joined(yard, f"ada-{same_host}")
    try:
        eve.push({"w": torch.ones(20)})
        assert command(yard, "identities", "revoke", f"worker/{name}") == 0
        refusals: list[str] = []

        def is_refused() -> bool:
            try:
                eve.push({"w": torch.ones(20)})
            except errors.ShardyardError as error:
                refusals.append(str(error))
            return bool(refusals)

        wait_until(is_refused, "the worker to be refused")
        assert "revoked" in refusals[0]
        for _ in range(3):
            ada.push({"w": torch.ones(20)})
        assert torch.equal(ada.pull()["w"], torch.arange(20.0) - 1.5)
    finally:
        eve.close()
        ada.close()
        command(yard, "identities", "allow", f"worker/{name}")


def test_revoked_operator_does_nothing_until_that_is_taken_back(yard: LocalCluster) -> None:
    guest = network(yard, Role.OPERATOR, "guest").connect(yard.coordinator, name="coordinator")
    try:
        guest.call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000)
        assert command(yard, "identities", "revoke", "operator/guest") == 0
        with pytest.raises(errors.NotTrusted, match="the certificate of operator guest was revoked"):
            guest.call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000)
        # nor is it renewed
        with pytest.raises(errors.NotTrusted, match="revoked"):
            guest.call(methods.ENROL, wire.EnrolRequest(), timeout_ms=5_000)
        assert command(yard, "identities", "allow", "operator/guest") == 0
        guest.call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000)
    finally:
        guest.close()


def test_certificates_are_listed(yard: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    network(yard, Role.VIEWER, "listed")
    command(yard, "identities", "revoke", "viewer/listed")
    capsys.readouterr()
    assert command(yard, "identities", "list", "--json") == 0
    found = {each["holder"]: each for each in json.loads(capsys.readouterr().out)["identities"]}
    assert found["viewer/listed"]["revoked"]
    assert not found["coordinator/coordinator"]["revoked"]
    assert {"server/server-0", "worker/worker", "operator/operator"} <= set(found)
    assert command(yard, "identities", "list") == 0
    shown = capsys.readouterr().out
    assert "listed" in shown
    assert "revoked" in shown
    command(yard, "identities", "allow", "viewer/listed")


def test_coordinator_itself_is_not_revoked(yard: LocalCluster) -> None:
    operator = GrpcNetwork(Credentials(yard._folder / "identity" / "operator"))
    peer = operator.connect(yard.coordinator, name="coordinator")
    try:
        request = wire.RevokeIdentityRequest(holder="coordinator/coordinator")
        with pytest.raises(errors.InvalidRequest, match="cannot be revoked"):
            peer.call(methods.REVOKE_IDENTITY, request, timeout_ms=5_000)
        with pytest.raises(errors.InvalidRequest, match="no identity"):
            peer.call(methods.REVOKE_IDENTITY, wire.RevokeIdentityRequest(holder="king/a"), timeout_ms=5_000)
    finally:
        peer.close()


def test_server_learns_of_it_with_a_heartbeat(yard: LocalCluster) -> None:
    eve = network(yard, Role.VIEWER, "late").connect(yard.state.address_of("server"), name="server 1")
    try:
        eve.call(methods.DESCRIBE_SERVER, _describe(), timeout_ms=5_000)
        command(yard, "identities", "revoke", "viewer/late")

        def is_refused() -> bool:
            try:
                eve.call(methods.DESCRIBE_SERVER, _describe(), timeout_ms=5_000)
            except errors.NotTrusted:
                return True
            except errors.ServerUnavailable:  # it was under way when the server learned it
                return False
            return False

        wait_until(is_refused, "the server to learn it", deadline_s=2.0)
    finally:
        eve.close()


def _describe() -> Any:
    from shardyard.wire.v1 import parameter_server_pb2 as server_wire

    return server_wire.DescribeServerRequest()


def test_revocations_stay_over_a_restart_and_their_version_grows(tmp_path: Path) -> None:
    first = Revocations(tmp_path)
    assert (first.version, first.holders) == (0, frozenset())
    first.change("worker/a", revoked=True)
    again = Revocations(tmp_path)
    assert (again.version, again.holders) == (first.version, {"worker/a"})
    again.change("worker/a", revoked=False)
    assert again.version > first.version
    assert Revocations(tmp_path).holders == frozenset()


def test_revocations_are_bounded_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    full = {"version": 1, "holders": [f"worker/{number}" for number in range(REVOKED_MAX)]}
    (tmp_path / FILE).write_text(json.dumps(full))
    with pytest.raises(errors.TooLarge, match="take back"):
        Revocations(tmp_path).change("worker/more", revoked=True)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(errors.ConfigurationError, match="without it revoked certificates are valid"):
        Revocations(tmp_path)


def test_audit_says_who_did_what_and_who_was_refused(yard: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    viewer = network(yard, Role.VIEWER, "curious").connect(yard.coordinator, name="coordinator")
    try:
        with pytest.raises(errors.NotPermitted):
            viewer.call(methods.STOP_JOB, wire.StopJobRequest(job_name="ada"), timeout_ms=5_000)
    finally:
        viewer.close()
    assert command(yard, "invite", "--role", "worker", "--name", "guest-7") == 0
    assert command(yard, "identities", "revoke", "worker/guest-7") == 0
    capsys.readouterr()
    assert main(["audit", "--yard", "--state", str(yard._folder)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each for each in found if each["event"] == "Register" and each["who"] == "server/server-0"]
    (refused,) = [each for each in found if "curious" in each["outcome"]]
    assert (refused["event"], refused["outcome"][:38]) == ("StopJob", "viewer curious may not call /shardyard")
    assert refused["where"].startswith("ipv4:127.0.0.1:")
    invited, revoked = found[-2:]
    assert (invited["event"], invited["who"], invited["name"]) == ("Invite", "operator/operator", "guest-7")
    assert (revoked["event"], revoked["holder"], revoked["outcome"]) == ("RevokeIdentity", "worker/guest-7", "allowed")
    assert main(["audit", "--verify", "--state", str(yard._folder)]) == 0
    assert f"{len(found)} lines, each follows the one before it" in capsys.readouterr().out
