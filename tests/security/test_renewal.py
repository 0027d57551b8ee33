"""Certificates are renewed while everything goes on: no stream breaks, and no call is lost."""

from __future__ import annotations

import datetime
import json
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from cryptography import x509

from shardyard.config.settings import SecuritySettings, Settings
from shardyard.domain import errors
from shardyard.domain.ids import MemberRole
from shardyard.security.authority import make_credentials
from shardyard.security.credentials import CERTIFICATE, KEY, Credentials, write_credentials
from shardyard.security.identity import Role
from shardyard.transport.enrolment import enrol_launch, invite, own_credentials, renew_if_due
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.interfaces import Stream
from shardyard.transport.membership_client import Membership, MembershipClient
from shardyard.transport.tls import ServerSecurity
from shardyard.wire import methods
from shardyard.wire.frames import Frame
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_coordinator.service.identities import YardIdentities
from tests.support.echoes import Echo
from tests.support.identities import OpenDoor
from tests.support.signing_yards import SigningYard
from tests.support.waiting import wait_until

DUE_S = 60
"""The lifetime of a certificate that is to be renewed at once: it is valid from 300 s ago."""
ENDED_S = -60
DAY_S = 86_400


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[SigningYard]:
    begun = SigningYard(tmp_path)
    yield begun
    begun.close()


def end_of(folder: Path) -> datetime.datetime:
    return x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes()).not_valid_after_utc


def test_member_renews_its_certificate_with_its_heartbeats(yard: SigningYard) -> None:
    credentials = yard.credentials(Role.SERVER, "server-0", DUE_S)
    key, before = (credentials.folder / KEY).read_bytes(), end_of(credentials.folder)
    member = MembershipClient(
        yard.connect(credentials),
        Membership(MemberRole.SERVER, "127.0.0.1:1"),
        on_reply=lambda _: None,
        on_lost=lambda error: pytest.fail(str(error)),
    )
    member.register(patience_ms=5_000)
    member.start()
    try:
        wait_until(lambda: end_of(credentials.folder) > before, "the certificate to be renewed")
    finally:
        member.leave()
    assert (credentials.folder / KEY).read_bytes() == key
    left = end_of(credentials.folder) - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(hours=23) < left <= datetime.timedelta(hours=24)


def test_certificate_that_lasts_is_not_renewed(yard: SigningYard) -> None:
    credentials = yard.credentials(Role.SERVER, "server-0")
    before = (credentials.folder / CERTIFICATE).read_bytes()
    assert not renew_if_due(yard.connect(credentials), credentials)
    assert (credentials.folder / CERTIFICATE).read_bytes() == before


def test_processes_of_one_folder_renew_it_once(yard: SigningYard) -> None:
    credentials = [yard.credentials(Role.WORKER, "worker", DUE_S)]
    credentials += [Credentials(credentials[0].folder) for _ in range(3)]
    peers = [yard.connect(each) for each in credentials]
    threads = [threading.Thread(target=renew_if_due, args=pair) for pair in zip(peers, credentials, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len({each.refresh().certificate for each in credentials}) == 1
    assert end_of(credentials[0].folder) > datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)


def test_renewed_certificate_is_of_the_same_member(yard: SigningYard) -> None:
    """Whatever a member asks for, it gets its own role and name."""
    credentials = yard.credentials(Role.READER, "reader-7", DUE_S)
    assert renew_if_due(yard.connect(credentials), credentials)
    names = x509.load_pem_x509_certificate(credentials.pem.certificate).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    uri = names.value.get_values_for_type(x509.UniformResourceIdentifier)
    assert uri == [f"spiffe://{yard.identities.authority.yard}/reader/reader-7"]


def test_server_shows_its_renewed_certificate_and_open_streams_stay(yard: SigningYard) -> None:
    shown = yard.credentials(Role.SERVER, "server-0")
    echo = Echo(GrpcNetwork(None))
    listener = GrpcServer("127.0.0.1:0", echo.services(), ServerSecurity(shown, OpenDoor()), threads=8)
    listener.start()
    network = GrpcNetwork(yard.credentials(Role.WORKER, "worker"))
    peers = [network.connect(listener.address, name="server 1") for _ in range(3)]
    try:
        stream = peers[0].open(methods.PUSH_PULL, timeout_ms=5_000)

        def answered(opened: Stream, offset: int) -> bool:
            opened.send([Frame(b"", offset, b"abc")])
            return bool(opened.receive(timeout_ms=5_000).offset == offset + 1)

        assert answered(stream, 1)
        # its certificate ends, since it could not be renewed
        write_credentials(shown.folder, make_credentials(yard.identities.authority, Role.SERVER, "server-0", ENDED_S))
        with pytest.raises(errors.NotTrusted, match="valid at another time than now"):
            peers[1].call(methods.READ_LEDGER, server_wire.ReadLedgerRequest(), timeout_ms=5_000)
        assert answered(stream, 2)
        yard.credentials(Role.SERVER, "server-0")  # it is renewed, in the folder
        later = peers[2].open(methods.PUSH_PULL, timeout_ms=5_000)
        assert answered(later, 3)
        assert answered(stream, 4)
        stream.cancel()
        later.cancel()
    finally:
        for peer in peers:
            peer.close()
        listener.stop()


class Shifted(datetime.datetime):
    """The time of a machine whose clock is wrong."""

    off_s = 0

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(time.time() + cls.off_s, tz)


@pytest.mark.parametrize("off_s", [-DAY_S - 1, DAY_S])
@pytest.mark.parametrize("whose", ["server", "caller"])
def test_clocks_that_are_off_by_a_day_are_named(yard: SigningYard, off_s: int, whose: str) -> None:
    """The certificate of either side was made by the other clock. The caller says so in both cases: a server that
    refuses a certificate closes the connection."""
    with mock.patch.object(datetime, "datetime", type("Clock", (Shifted,), {"off_s": off_s})):
        wrong = yard.credentials(Role.SERVER if whose == "server" else Role.WORKER, "wrong", DAY_S)
    shown = wrong if whose == "server" else yard.credentials(Role.SERVER, "server-0")
    own = wrong if whose == "caller" else yard.credentials(Role.WORKER, "worker")
    echo = Echo(GrpcNetwork(None))
    listener = GrpcServer("127.0.0.1:0", echo.services(), ServerSecurity(shown, OpenDoor()), threads=8)
    listener.start()
    peer = GrpcNetwork(own).connect(listener.address, name="server 1")
    said = {"server": "its certificate is", "caller": "the certificate of this process is"}[whose]
    try:
        with pytest.raises(errors.NotTrusted, match=f"{said} valid at another time than now.*compare the clocks"):
            peer.call(methods.READ_LEDGER, server_wire.ReadLedgerRequest(), timeout_ms=5_000)
    finally:
        peer.close()
        listener.stop()


def test_caller_whose_certificate_has_ended_goes_on_once_it_is_renewed(yard: SigningYard) -> None:
    """A connection is lost while the caller's certificate has ended; the caller needs no new start."""
    ended = yard.credentials(Role.OPERATOR, "operator", ENDED_S)
    peer = yard.connect(ended)
    with pytest.raises(errors.NotTrusted, match="the certificate of this process is valid at another time than now"):
        peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000)
    yard.credentials(Role.OPERATOR, "operator")
    assert peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000).term


def test_agent_gets_certificates_for_its_launches_and_nothing_else(yard: SigningYard) -> None:
    agent, worker = yard.connect(yard.credentials(Role.AGENT, "a-1")), yard.connect(yard.credentials(Role.WORKER, "w"))
    pem = enrol_launch(agent, "4711")
    assert pem is not None
    write_credentials(yard.folder / "launch", pem)
    launched = yard.connect(Credentials(yard.folder / "launch"))
    with pytest.raises(errors.NotPermitted, match=r"worker a-1\.4711 may not call .*Invite"):
        launched.call(methods.INVITE, wire.InviteRequest(role="operator"), timeout_ms=5_000)
    with pytest.raises(errors.NotPermitted, match="launches nothing"):
        enrol_launch(worker, "4711")
    with pytest.raises(errors.InvalidRequest, match="no name of a member"):
        enrol_launch(agent, "../operator/x")


def test_invitations_are_left_in_folders_of_their_roles(tmp_path: Path) -> None:
    """As volumes of containers: each has the invitation of its role, which lasts over restarts of the coordinator."""
    for role in ("server", "agent", "coordinator", "operator"):
        (tmp_path / "left" / role).mkdir(parents=True)
    settings = SecuritySettings(invitations=str(tmp_path / "left"))
    for _ in range(2):
        YardIdentities(settings, tmp_path / "identity" / "authority")
    found = {path.parent.name: path for path in (tmp_path / "left").rglob("invitation")}
    assert set(found) == {"server", "agent"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found.values()} == {0o600}
    stored = json.loads((tmp_path / "identity" / "authority" / "invitations.json").read_text())
    assert sorted(each["role"] for each in stored) == ["agent", "server"]


def test_server_without_a_certificate_takes_the_invitation_of_its_settings(yard: SigningYard, tmp_path: Path) -> None:
    operator = yard.connect(yard.credentials(Role.OPERATOR, "operator"))
    file = tmp_path / "invitation"
    file.write_text(invite(operator, role="server", name="", lifetime_s=60, uses=1) + "\n")
    given = SecuritySettings(invitation=str(file), identity=str(tmp_path / "own"))
    settings = Settings(coordinator=yard.address, security=given)
    first = own_credentials(settings, Role.SERVER)
    assert first is not None
    assert first.folder == tmp_path / "own"
    again = own_credentials(settings, Role.SERVER)  # the invitation is used up, and not needed
    assert again is not None
    assert again.pem == first.pem
