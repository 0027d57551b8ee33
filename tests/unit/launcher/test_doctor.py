"""`shardyard doctor`: each verdict on the way to a yard, from real sockets."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shardyard.domain import errors
from shardyard.security.identity import Role
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.interfaces import Context, Service
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.probes import network
from shardyard_launcher.probes.findings import Finding, Verdict
from tests.support.doctors import OURS, coordinator, free_address, impatient, member, serving
from tests.support.identities import Identities

__all__ = ["impatient"]

PLAIN = GrpcNetwork(None)


def look(address: str) -> dict[str, Finding]:
    return {finding.probe: finding for finding in network.probe(address, PLAIN)}


def last(address: str) -> Finding:
    return list(network.probe(address, PLAIN))[-1]


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does the same with each connection, until the end of the block."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken, _ = listener.accept()
                    with taken, contextlib.suppress(OSError):
                        answer(taken)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


# ---- the way to a yard


def test_name_that_does_not_resolve_is_told_and_nothing_more_is_tried() -> None:
    (found,) = network.probe("nobody.invalid:7070", PLAIN)
    assert (found.probe, found.verdict) == ("name", Verdict.FAILED)
    assert "nobody.invalid does not resolve" in found.said
    assert "/etc/hosts" in found.todo


@pytest.mark.parametrize("address", ["7070", "alpha", "alpha:99999", "." + "a" * 70 + ":1"])
def test_address_that_cannot_be_is_told(address: str) -> None:
    (found,) = network.probe(address, PLAIN)
    assert (found.probe, found.verdict) == ("name", Verdict.FAILED)


def test_refused_connection_is_told_apart() -> None:
    address = free_address()
    found = last(address)
    assert (found.probe, found.verdict) == ("tcp", Verdict.FAILED)
    assert f"{address} refuses connections" in found.said
    assert "shardyard coordinator" in found.todo


def test_connection_that_times_out_is_told_apart() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        where = full.getsockname()
        # a full queue of connections: the kernel drops what comes further, as a firewall would
        with contextlib.ExitStack() as held:
            filling = [held.enter_context(socket.socket()) for _ in range(4)]
            for each in filling:
                each.setblocking(False)
                each.connect_ex(where)
            found = last(f"127.0.0.1:{where[1]}")
    assert (found.probe, found.verdict) == ("tcp", Verdict.FAILED)
    assert "timed out" in found.said
    assert "firewall" in found.todo


def certificate(folder: Path) -> Path:
    """A key and a certificate of it by itself, for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    both = folder / "both.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    both.write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
    return both


@pytest.mark.parametrize("kind", ["alerts", "closes in silence", "wants a certificate", "has no cipher of ours"])
def test_port_that_speaks_tls_is_recognised(tmp_path: Path, kind: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if kind == "has no cipher of ours":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("ADH-AES256-SHA256:@SECLEVEL=0")
    else:
        context.load_cert_chain(certificate(tmp_path))
    if kind == "wants a certificate":
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(tmp_path / "both.pem")

    def answer(stream: socket.socket) -> None:
        if kind == "closes in silence" and stream.recv(3, socket.MSG_PEEK) == b"PRI":
            stream.recv(100)
            return
        with contextlib.suppress(ssl.SSLError), context.wrap_socket(stream, server_side=True) as inner:
            inner.recv(1)

    with listening(answer) as address:
        found = last(address)
    assert (found.probe, found.verdict) == ("tls", Verdict.FAILED)
    assert f"{address} uses TLS, and security.tls is false here" in found.said


def test_web_server_is_recognised() -> None:
    def answer(stream: socket.socket) -> None:
        stream.recv(100)
        stream.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with listening(answer) as address:
        found = last(address)
    assert (found.probe, found.verdict) == ("tls", Verdict.FAILED)
    assert "HTTP/1" in found.said


def test_port_that_says_nothing_is_recognised() -> None:
    def answer(stream: socket.socket) -> None:
        while stream.recv(1_000):
            pass

    with listening(answer) as address:
        found = last(address)
    assert (found.probe, found.verdict) == ("tls", Verdict.FAILED)
    assert "says nothing" in found.said
    assert "SIGSTOP" in found.todo


@pytest.mark.parametrize("said", [b"", b"220 mail at your service\r\n", b"\0\0\0\x07\0\0\0\0\0", b"\0\0"])
def test_port_of_another_protocol_is_recognised(said: bytes) -> None:
    def answer(stream: socket.socket) -> None:
        stream.sendall(said)
        stream.shutdown(socket.SHUT_WR)
        while stream.recv(1_000):
            pass

    with listening(answer) as address:
        found = last(address)
    assert (found.probe, found.verdict) == ("tls", Verdict.FAILED)
    assert "does not speak HTTP/2" in found.said


def test_plain_text_is_said_and_warned_of_beyond_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(coordinator()) as address:
        here = look(address)["tls"]
        assert here.verdict is Verdict.OK
        assert "nothing is encrypted" in here.said
        port = int(address.split(":")[1])
        monkeypatch.setattr(network, "_language", lambda _: "h2")
        (beyond,) = network._tls(f"alpha:{port}", PLAIN, ("192.0.2.1", port))
        assert beyond.verdict is Verdict.WARNING


def test_yard_with_tls_is_looked_at_with_the_certificate_of_an_operator(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    service = coordinator()
    with identities.serving(service, Role.COORDINATOR) as address:
        found = {each.probe: each for each in network.probe(address, identities.network(Role.OPERATOR))}
        assert found["tls"].verdict is Verdict.OK
        assert str(tmp_path / "operator") in found["tls"].said
        assert found["status"].verdict is not Verdict.FAILED
        without = list(network.probe(address, errors.NotTrusted("no certificate here", todo="join")))[-1]
        assert (without.probe, without.verdict, without.said) == ("tls", Verdict.FAILED, "no certificate here")
        plain = last(address)
        assert (plain.probe, plain.verdict) == ("tls", Verdict.FAILED)
    with serving(coordinator()) as address:
        plain = list(network.probe(address, identities.network(Role.OPERATOR)))[-1]
        assert (plain.probe, plain.verdict) == ("tls", Verdict.FAILED)
        assert "does not use TLS, and security.tls is true here" in plain.said


def test_coordinator_in_good_order_has_only_good_findings() -> None:
    with serving(Service("ParameterServer")) as server, serving(coordinator(member(server))) as address:
        found = look(address)
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}, found
    assert list(found) == ["name", "tcp", "tls", "grpc", "status", "release", "clock", "members"]
    assert "term 3, up for 5 s, 1 server, 0 workers, 0 agents" in found["status"].said
    assert f"release {OURS} here, on the coordinator and on all members" in found["release"].said
    assert "within 1 s" in found["clock"].said


def test_coordinator_that_does_not_serve_yet_is_told() -> None:
    with serving(coordinator(), ready=False) as address:
        found = last(address)
    assert (found.probe, found.verdict) == ("grpc", Verdict.FAILED)
    assert "does not serve" in found.said


@pytest.mark.parametrize(
    ("name", "said"), [("ParameterServer", "is a shardyard server"), ("Agent", "is a shardyard agent")]
)
def test_address_of_a_member_in_place_of_the_coordinators_is_told(name: str, said: str) -> None:
    with serving(Service(name)) as address:
        found = last(address)
    assert (found.probe, found.verdict) == ("grpc", Verdict.FAILED)
    assert said in found.said
    assert "the coordinator's address" in found.todo


def test_grpc_of_somebody_else_is_told() -> None:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            found = last(f"127.0.0.1:{port}")
        finally:
            server.stop(0).wait()
    assert (found.probe, found.verdict) == ("grpc", Verdict.FAILED)
    assert "is not a service of shardyard" in found.said


def test_coordinator_that_refuses_to_tell_its_status_is_told() -> None:
    def refuse(_: wire.StatusRequest, __: Context) -> wire.StatusReply:
        raise errors.NotReady("the journal is being read")

    service = Service("Coordinator")
    service.on(methods.STATUS, refuse)
    with serving(service) as address:
        found = last(address)
    assert (found.probe, found.verdict) == ("status", Verdict.FAILED)
    assert "the journal is being read" in found.said


def test_yard_without_a_server_and_one_of_mixed_releases_are_warned_of() -> None:
    with serving(coordinator()) as address:
        assert look(address)["status"].verdict is Verdict.WARNING
    with serving(Service("ParameterServer")) as server:
        others = [member(server, 2, "9.9.9"), member(server, 3, "9.9.9"), member(server, 4, "\x1b[2J")]
        with serving(coordinator(*others)) as address:
            found = look(address)["release"]
    assert found.verdict is Verdict.WARNING
    assert "9.9.9 on 2" in found.said
    assert "\x1b" not in found.line


def test_coordinator_of_another_release_is_warned_of_and_one_of_another_protocol_fails() -> None:
    with serving(coordinator(release="9.9.9")) as address:
        found = look(address)["release"]
    assert (found.verdict, "9.9.9 on the coordinator" in found.said) == (Verdict.WARNING, True)
    with serving(coordinator(protocol=2)) as address:
        found = last(address)
    assert (found.probe, found.verdict) == ("release", Verdict.FAILED)
    assert "speaks protocol 2" in found.said


@pytest.mark.parametrize(
    ("ahead_ms", "said"), [(90_000, "s ahead of this machine's"), (-3_600_000, "s behind this machine's")]
)
def test_clock_that_goes_wrong_is_told_in_one_line(ahead_ms: int, said: str) -> None:
    with serving(coordinator(ahead_ms=ahead_ms)) as address:
        found = look(address)["clock"]
    assert found.verdict is Verdict.WARNING
    (told,) = re.findall(r"is ([0-9.]+) s", found.said)
    assert float(told) == pytest.approx(abs(ahead_ms) / 1000, abs=10)
    assert said in found.said
    assert "NTP" in found.todo


def test_coordinator_that_does_not_tell_the_time_is_in_order() -> None:
    with serving(coordinator(release="", protocol=0, ahead_ms=None)) as address:
        found = look(address)
    assert (found["clock"].verdict, found["release"].verdict) == (Verdict.OK, Verdict.OK)


def test_each_member_that_cannot_be_reached_from_here_is_named() -> None:
    gone, elsewhere = free_address(), "nobody.invalid:1"
    with serving(Service("ParameterServer")) as server:
        members = [member(server, 1), member(gone, 2), member(elsewhere, 3), member("nonsense", 4)]
        with serving(coordinator(*members)) as address:
            found = [each for each in network.probe(address, PLAIN) if each.probe == "members"]
    assert [each.verdict for each in found] == [Verdict.FAILED] * 3
    assert f"server 1.2 {gone} refuses connections" in found[0].said
    assert "server 1.3 nobody.invalid:1 does not resolve from here" in found[1].said
    assert "server 1.4 nonsense 'nonsense' is not an address" in found[2].said


def test_many_unreachable_members_fill_no_screen() -> None:
    members = [member("nonsense", number) for number in range(50)]
    with serving(coordinator(*members)) as address:
        found = [each for each in network.probe(address, PLAIN) if each.probe == "members"]
    assert len(found) == network.MEMBERS_SHOWN_MAX + 1
    assert "30 others" in found[-1].said


def test_proxy_that_calls_would_take_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    address = free_address()
    found = look(address)["proxy"]
    assert found.verdict is Verdict.WARNING
    assert "$http_proxy" in found.said
    monkeypatch.setenv("no_proxy", "localhost, 127.0.0.1")
    assert "proxy" not in look(address)


def test_address_of_a_name_that_answers_is_the_one_that_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo
    with serving(coordinator()) as address:
        port = int(address.split(":")[1])
        both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ("127.0.0.2", "127.0.0.1")]

        def resolve(host: str, *rest: object, **more: object) -> list[object]:
            return both if host == "alpha" else real(host, *rest, **more)

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        name, tcp, tls = islice(network.probe(f"alpha:{port}", PLAIN), 3)
    assert name.said == "alpha is 127.0.0.2, 127.0.0.1"
    assert tcp.said.startswith(f"127.0.0.1 port {port} accepts connections")
    assert (tls.verdict, "plain HTTP/2" in tls.said) == (Verdict.OK, True)
