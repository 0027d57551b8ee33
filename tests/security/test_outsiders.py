"""A yard of real processes, as `shardyard up` starts it, and those who do not belong to it: promise S1."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shardyard.config import configuration
from shardyard.domain import errors
from shardyard.security.authority import Authority, certificate_of, key_to_pem, make_credentials, new_key
from shardyard.security.credentials import Credentials, write_credentials
from shardyard.security.identity import Role
from shardyard.transport.enrolment import invite, join
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.wire import methods
from shardyard.wire.v1 import agent_pb2 as agent_wire
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_launcher.yard.local_cluster import LocalCluster

CALL_MS = 10_000
ROLES = ("coordinator", "server", "agent")


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    given = {"yard.servers": 1, "yard.workers": 1, "yard.coordinator_port": 0}
    folder = tmp_path_factory.mktemp("yard") / "state"
    cluster = LocalCluster(configuration.load(None, {}, given).settings, folder, tied=True)
    try:
        cluster.start(stop=threading.Event())
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def folder(yard: LocalCluster) -> Path:
    """The identities of the yard's machine."""
    return yard._folder / "identity"


@pytest.fixture(autouse=True)
def members(yard: LocalCluster, folder: Path) -> Iterator[None]:
    """Whatever is tried, the members stay and nothing is started or stopped."""
    before = incarnations(yard, folder)
    yield
    assert incarnations(yard, folder) == before


def incarnations(yard: LocalCluster, folder: Path) -> list[int]:
    said = ask(GrpcNetwork(Credentials(folder / "operator")), yard.coordinator)
    return sorted(member.incarnation for member in said.members)


def ask(network: GrpcNetwork, address: str) -> wire.StatusReply:
    peer = network.connect(address, name="coordinator", unavailable=errors.CoordinatorUnavailable)
    try:
        return peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=CALL_MS)
    finally:
        peer.close()


def address_of(yard: LocalCluster, role: str) -> str:
    return yard.state.address_of(role)


def refused(address: str, role: str, shown: grpc.ChannelCredentials | None) -> str:
    """Asks for health, which everybody of the yard may. Returns what gRPC says when the connection is refused."""
    options = [("grpc.ssl_target_name_override", f"{role}.shardyard")]
    open_ = grpc.insecure_channel(address) if shown is None else grpc.secure_channel(address, shown, options)
    with open_ as channel, pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return str(caught.value.details())


def own(folder: Path, **others: bytes) -> grpc.ChannelCredentials:
    pem = Credentials(folder / "worker").pem
    key, certificate = others.get("key", pem.key), others.get("certificate", pem.certificate)
    return grpc.ssl_channel_credentials(pem.authorities, key, certificate)


def self_signed() -> tuple[bytes, bytes]:
    key = new_key()
    made = certificate_of("worker", "worker", key.public_key(), 3_600, is_authority=False).sign(key, hashes.SHA256())
    return key_to_pem(key), made.public_bytes(serialization.Encoding.PEM)


def expired(folder: Path) -> tuple[bytes, bytes]:
    pem = make_credentials(Authority(folder / "authority"), Role.WORKER, "worker", -60)
    end = x509.load_pem_x509_certificate(pem.certificate).not_valid_after_utc
    assert end < datetime.datetime.now(datetime.UTC)
    return pem.key, pem.certificate


@pytest.mark.parametrize("role", ROLES)
def test_every_port_refuses_who_has_no_certificate_of_the_yard(
    yard: LocalCluster, folder: Path, tmp_path: Path, role: str
) -> None:
    address, authorities = address_of(yard, role), Credentials(folder / "worker").pem.authorities
    refused(address, role, None)
    refused(address, role, grpc.ssl_channel_credentials(authorities))
    for key, certificate in (self_signed(), expired(folder)):
        refused(address, role, own(folder, key=key, certificate=certificate))
    foreign = make_credentials(Authority(tmp_path / "other"), Role.OPERATOR, "operator", 3_600)
    refused(address, role, own(folder, key=foreign.key, certificate=foreign.certificate))
    # the key must be that of the certificate
    stolen = Credentials(folder / "operator").pem.certificate
    refused(address, role, own(folder, certificate=stolen))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("version", ["-tls1", "-tls1_1", "-tls1_2"])
def test_every_port_refuses_older_tls(yard: LocalCluster, folder: Path, role: str, version: str) -> None:
    assert "Cipher is (NONE)" in handshake(address_of(yard, role), folder, version)


@pytest.mark.parametrize("role", ROLES)
def test_every_port_speaks_tls_13_with_an_ephemeral_key(yard: LocalCluster, folder: Path, role: str) -> None:
    said = handshake(address_of(yard, role), folder, "-tls1_3")
    assert "New, TLSv1.3, Cipher is TLS_" in said
    assert "Verify return code: 0 (ok)" in said
    assert "Requested Signature Algorithms" in said  # the server asks for a certificate


def handshake(address: str, folder: Path, version: str) -> str:
    files = folder / "worker"
    command = ["openssl", "s_client", "-connect", address, version, "-alpn", "h2", "-CAfile", str(files / "ca.crt")]
    command += ["-cert", str(files / "tls.crt"), "-key", str(files / "tls.key"), "-cipher", "ALL:@SECLEVEL=0"]
    done = subprocess.run(command, input=b"", capture_output=True, timeout=20, check=False)
    return (done.stdout + done.stderr).decode(errors="replace")


def test_certificate_of_another_yard_is_explained(yard: LocalCluster, tmp_path: Path) -> None:
    """Also what a man in the middle runs into: his certificate is not of the yard."""
    write_credentials(tmp_path / "w", make_credentials(Authority(tmp_path / "other"), Role.OPERATOR, "x", 3_600))
    with pytest.raises(errors.NotTrusted, match="of another yard than the certificate of this process"):
        ask(GrpcNetwork(Credentials(tmp_path / "w")), yard.coordinator)


def test_server_cannot_stand_in_for_the_coordinator(yard: LocalCluster, folder: Path) -> None:
    with pytest.raises(errors.NotTrusted, match="the certificate there is for another role"):
        ask(GrpcNetwork(Credentials(folder / "operator")), address_of(yard, "server"))


def test_member_whose_port_another_process_has_is_unavailable(yard: LocalCluster, folder: Path, tmp_path: Path) -> None:
    """The coordinator says where servers are. A server that has ended may come back, and its port may be given to any
    process meanwhile: to one of another yard, to another member, or to one without TLS."""
    write_credentials(tmp_path / "w", make_credentials(Authority(tmp_path / "other"), Role.WORKER, "x", 3_600))
    with socket.create_server(("127.0.0.1", 0)) as plain, answering_in_plain_text(plain):
        for credentials, address, told in (
            (tmp_path / "w", address_of(yard, "server"), "of another yard"),
            (folder / "worker", address_of(yard, "agent"), "for another role"),
            (folder / "worker", f"127.0.0.1:{plain.getsockname()[1]}", "does not use TLS"),
        ):
            server = GrpcNetwork(Credentials(credentials)).connect(address, name="server 1.1")
            try:
                with pytest.raises(errors.ServerUnavailable, match=rf"{told}.*another process has its port now"):
                    server.call(methods.ATTACH, server_wire.AttachRequest(), timeout_ms=CALL_MS)
            finally:
                server.close()


@contextlib.contextmanager
def answering_in_plain_text(listening: socket.socket) -> Iterator[None]:
    """Answers each connection in plain text, until `listening` is closed."""

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert not thread.is_alive()


def test_process_without_tls_is_told_so(yard: LocalCluster) -> None:
    with pytest.raises(errors.NotTrusted, match=r"wants a certificate, and security\.tls is false here"):
        ask(GrpcNetwork(None), yard.coordinator)


def test_stolen_viewer_sees_and_does_nothing(yard: LocalCluster, folder: Path) -> None:
    write_credentials(
        folder / "viewer", make_credentials(Authority(folder / "authority"), Role.VIEWER, "viewer", 3_600)
    )
    network = GrpcNetwork(Credentials(folder / "viewer"))
    assert len(ask(network, yard.coordinator).members) == 2
    coordinator = network.connect(yard.coordinator, name="coordinator")
    agent = network.connect(address_of(yard, "agent"), name="agent")
    server = network.connect(address_of(yard, "server"), name="server")
    try:
        for method, request in (
            (methods.STOP_JOB, wire.StopJobRequest()),
            (methods.DRAIN, wire.DrainRequest(member="server-0")),
            (methods.INVITE, wire.InviteRequest(role="operator")),
            (methods.REGISTER, wire.RegisterRequest(role=wire.ROLE_WORKER)),
            (methods.RESTORE_CHECKPOINT, wire.RestoreCheckpointRequest()),
        ):
            with pytest.raises(errors.NotPermitted, match="viewer viewer may not call"):
                coordinator.call(method, request, timeout_ms=CALL_MS)  # type: ignore[arg-type]
        with pytest.raises(errors.NotPermitted):
            agent.call(methods.LAUNCH, agent_wire.LaunchRequest(script="/bin/true"), timeout_ms=CALL_MS)
        with pytest.raises(errors.NotPermitted):
            list(server.receive(methods.PULL, server_wire.PullRequest(), timeout_ms=CALL_MS))
    finally:
        for peer in (coordinator, agent, server):
            peer.close()


def test_stolen_worker_gives_no_orders(yard: LocalCluster, folder: Path) -> None:
    network = GrpcNetwork(Credentials(folder / "worker"))
    agent = network.connect(address_of(yard, "agent"), name="agent")
    server = network.connect(address_of(yard, "server"), name="server")
    orders = common.Caller(job=1, term=1 << 63)
    try:
        for method, request in (
            (methods.FENCE, server_wire.FenceRequest(caller=orders, incarnations=[1])),
            (methods.DROP_JOB, server_wire.DropJobRequest(caller=orders)),
            (methods.SAVE_CHECKPOINT, server_wire.SaveCheckpointRequest(caller=orders, url="/tmp")),
            (methods.CREATE_PARTITIONS, server_wire.CreatePartitionsRequest(caller=orders)),
        ):
            with pytest.raises(errors.NotPermitted, match="worker worker may not call"):
                server.call(method, request, timeout_ms=CALL_MS)  # type: ignore[arg-type]
        with pytest.raises(errors.NotPermitted):
            agent.call(methods.LAUNCH, agent_wire.LaunchRequest(script="/bin/true"), timeout_ms=CALL_MS)
    finally:
        agent.close()
        server.close()


def test_invitation_lets_one_process_in_once(yard: LocalCluster, folder: Path, tmp_path: Path) -> None:
    peer = GrpcNetwork(Credentials(folder / "operator")).connect(yard.coordinator, name="coordinator")
    try:
        text = invite(peer, role="viewer", name="guest", lifetime_s=60, uses=1)
    finally:
        peer.close()
    pem, role, name = join(yard.coordinator, text)
    assert (role, name) == ("viewer", "guest")
    write_credentials(tmp_path / "guest", pem)
    assert ask(GrpcNetwork(Credentials(tmp_path / "guest")), yard.coordinator).members
    with pytest.raises(errors.NotTrusted, match="does not take this invitation"):
        join(yard.coordinator, text)


def test_invitation_to_another_yard_is_not_taken(yard: LocalCluster, folder: Path, tmp_path: Path) -> None:
    """A man in the middle who answers an invited process cannot have the yard's key, which is in the line."""
    peer = GrpcNetwork(Credentials(folder / "operator")).connect(yard.coordinator, name="coordinator")
    try:
        text = invite(peer, role="viewer", name="", lifetime_s=60, uses=1)
    finally:
        peer.close()
    parts = text.split(".")
    from shardyard.security.invitations import X962, Point, _text

    parts[3] = _text(new_key().public_key().public_bytes(X962, Point))
    with pytest.raises(errors.NotTrusted, match="of another authority of this yard"):
        join(yard.coordinator, ".".join(parts))


def test_files_of_a_yard_are_for_its_user_only(yard: LocalCluster, folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE(os.stat(yard._folder).st_mode) == 0o700
