"""The authority is replaced: who trusts whom in which phase, and what a rotation waits for. The promise S6 itself is
kept by tests/integration/recovery/test_rotation.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from shardyard.config.settings import SecuritySettings
from shardyard.domain import errors
from shardyard.domain.ids import MemberRole
from shardyard.security.authority import Authority, Phase, make_credentials
from shardyard.security.credentials import AUTHORITIES, CERTIFICATE, Credentials, Pem, write_credentials
from shardyard.security.identity import Role
from shardyard.security.invitations import JoinLine
from shardyard.transport.enrolment import Renewal
from shardyard.transport.grpc_client import GrpcNetwork, GrpcPeer
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.membership_client import Membership, MembershipClient
from shardyard.transport.tls import ServerSecurity
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_coordinator.service.identities import YardIdentities
from shardyard_launcher.cli import main
from shardyard_launcher.terminal.coordinator_client import CoordinatorClient
from tests.support.echoes import Echo
from tests.support.identities import OpenDoor
from tests.support.signing_yards import SigningYard
from tests.support.waiting import wait_until

ROWS = 4
"""Of the table in shardyard.security.authority: before, SPREAD, SIGN, after."""


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[SigningYard]:
    begun = SigningYard(tmp_path)
    yield begun
    begun.close()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[Role, list[Pem]]:
    """What a server, a worker and the coordinator have in each row."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    found: dict[Role, list[Pem]] = {Role.SERVER: [], Role.WORKER: [], Role.COORDINATOR: []}
    for step in (lambda: authority.begin_rotation(0), authority.end_phase, authority.end_phase, lambda: None):
        for role, pems in found.items():
            pems.append(make_credentials(authority, role, role.value, 3_600))
        step()
    return found


def connects(folder: Path, server: Pem, caller: Pem, name: str) -> bool:
    write_credentials(folder / "server", server)
    write_credentials(folder / "caller", caller)
    echo = Echo(GrpcNetwork(None))
    shown = ServerSecurity(Credentials(folder / "server"), OpenDoor())
    listener = GrpcServer("127.0.0.1:0", echo.services(), shown, threads=8)
    listener.start()
    peer = GrpcNetwork(Credentials(folder / "caller")).connect(listener.address, name=name)
    try:
        peer.open(methods.PUSH_PULL, timeout_ms=5_000).cancel()
        peer.call(methods.READ_LEDGER, server_wire.ReadLedgerRequest(), timeout_ms=5_000)
    except (errors.NotTrusted, errors.ServerUnavailable):
        return False
    except errors.ShardyardError:
        return True  # it was answered
    finally:
        peer.close()
        listener.stop()
    return True


@pytest.mark.parametrize(("server", "caller"), [(a, b) for a in range(ROWS) for b in range(ROWS)])
def test_members_connect_that_are_one_phase_apart(
    rows: dict[Role, list[Pem]], tmp_path: Path, server: int, caller: int
) -> None:
    """Those that are two apart do not, so one phase would not do."""
    found = connects(tmp_path, rows[Role.SERVER][server], rows[Role.WORKER][caller], "server 1")
    assert found is (abs(server - caller) <= 1)


@pytest.mark.parametrize("row", range(ROWS))
def test_member_that_trusts_the_old_root_alone_reaches_the_coordinator_until_it_is_retired(
    rows: dict[Role, list[Pem]], tmp_path: Path, row: int
) -> None:
    found = connects(tmp_path, rows[Role.COORDINATOR][row], rows[Role.WORKER][0], "coordinator")
    assert found is (row < ROWS - 1)


class Member:
    """Sends heartbeats. `renews`: it follows the rotation."""

    def __init__(self, yard: SigningYard, name: str, *, renews: bool = True) -> None:
        self.credentials = yard.credentials(Role.AGENT, name)
        self._client = MembershipClient(
            yard.connect(self.credentials),
            Membership(MemberRole.AGENT, f"{name}:1"),
            on_reply=lambda _: None,
            on_lost=lambda _: None,
        )
        if not renews:
            self._client._renewal.look = lambda _: None  # type: ignore[method-assign]
        self._client.register(patience_ms=5_000)
        self._client.start()

    @property
    def roots(self) -> list[x509.Certificate]:
        return x509.load_pem_x509_certificates((self.credentials.folder / AUTHORITIES).read_bytes())

    def leave(self) -> None:
        self._client.leave()


def phase_of(yard: SigningYard) -> Phase | None:
    rotation = yard.identities.authority.rotation
    return None if rotation is None else rotation.phase


def ask(peer: GrpcPeer, overlap_s: int = 0, *, next_: bool = False) -> str:
    request = wire.RotateAuthorityRequest(overlap_s=overlap_s, next=next_)
    return peer.call(methods.ROTATE_AUTHORITY, request, timeout_ms=5_000).phase


def waits_of(peer: GrpcPeer) -> list[str]:
    reply = peer.call(methods.LIST_IDENTITIES, wire.ListIdentitiesRequest(), timeout_ms=5_000)
    return list(reply.rotation.waits_for)


def test_rotation_of_members_that_follow_goes_on_by_itself(yard: SigningYard) -> None:
    members = [Member(yard, "agent-1"), Member(yard, "agent-2")]
    (old,) = members[0].roots
    assert ask(yard.connect(yard.credentials(Role.OPERATOR, "operator"))) == "spread"
    wait_until(lambda: phase_of(yard) is None, "the end of the rotation")
    wait_until(lambda: all(len(each.roots) == 1 for each in members), "one root")
    for member in members:
        assert member.roots != [old]
        certificate = x509.load_pem_x509_certificate((member.credentials.folder / CERTIFICATE).read_bytes())
        certificate.verify_directly_issued_by(member.roots[0])
        member.leave()


def test_phase_lasts_until_the_last_member_has_followed_or_an_operator_ends_it(yard: SigningYard) -> None:
    behind, member = Member(yard, "behind", renews=False), Member(yard, "agent-1")
    operator = yard.connect(yard.credentials(Role.OPERATOR, "operator"))
    ask(operator)
    wait_until(lambda: len(member.roots) == 2, "both roots")
    wait_until(lambda: len(waits_of(operator)) == 1, "the other member")
    assert waits_of(operator)[0].endswith("at behind:1")
    assert phase_of(yard) is Phase.SPREAD
    assert ask(operator, next_=True) == "sign"
    wait_until(lambda: len(waits_of(operator)) == 1, "the other member")
    assert phase_of(yard) is Phase.SIGN
    behind.leave()
    wait_until(lambda: phase_of(yard) is None, "the end of the rotation")
    member.leave()


def test_former_root_is_trusted_for_the_overlap(yard: SigningYard) -> None:
    member, operator = Member(yard, "agent-1"), yard.connect(yard.credentials(Role.OPERATOR, "operator"))
    ask(operator, overlap_s=3_600)
    wait_until(lambda: phase_of(yard) is Phase.SIGN, "the second phase")
    wait_until(lambda: waits_of(operator) == [], "all members")
    assert phase_of(yard) is Phase.SIGN
    assert ask(operator, next_=True) == ""
    member.leave()


def test_member_that_comes_back_gets_both_roots_before_it_goes_on(yard: SigningYard) -> None:
    away, present = yard.credentials(Role.AGENT, "away"), Member(yard, "agent-1")
    ask(yard.connect(yard.credentials(Role.OPERATOR, "operator")), overlap_s=3_600)
    wait_until(lambda: phase_of(yard) is Phase.SIGN, "the second phase")
    client = MembershipClient(
        yard.connect(away), Membership(MemberRole.AGENT, "away:1"), on_reply=lambda _: None, on_lost=lambda _: None
    )
    client.register(patience_ms=5_000)
    assert away.pem.authorities == yard.identities.authority.authorities
    certificate = x509.load_pem_x509_certificate(away.pem.certificate)
    assert yard.identities.authority.would_issue(Role.AGENT, certificate, away.pem.authorities)
    present.leave()


def test_operator_of_an_owner_rotates_nothing_and_the_overlap_is_bounded(yard: SigningYard) -> None:
    folder = yard.folder / "ada"
    write_credentials(folder, make_credentials(yard.identities.authority, Role.OPERATOR, "o", 3_600, owner="ada"))
    with pytest.raises(errors.NotPermitted, match="decides nothing about the yard's authority"):
        ask(yard.connect(Credentials(folder)))
    operator = yard.connect(yard.credentials(Role.OPERATOR, "operator"))
    with pytest.raises(errors.InvalidRequest, match="overlap"):
        ask(operator, overlap_s=1 << 60)
    with pytest.raises(errors.InvalidRequest, match="not being rotated"):
        ask(operator, next_=True)
    assert phase_of(yard) is None


def test_open_connection_outlives_the_former_root(yard: SigningYard) -> None:
    viewer = yard.connect(yard.credentials(Role.VIEWER, "viewer"))
    viewer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000)
    ask(yard.connect(yard.credentials(Role.OPERATOR, "operator")))
    wait_until(lambda: phase_of(yard) is None, "the end of the rotation")
    served = yard.identities.credentials  # written anew after the phase has ended
    wait_until(lambda: len(x509.load_pem_x509_certificates(served.refresh().authorities)) == 1, "one root")
    yard.identities.door.forget()
    assert viewer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000).term
    with pytest.raises(errors.NotTrusted, match=r"of another authority of this yard.*shardyard invite"):
        yard.connect(Credentials(yard.folder / "viewer")).call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000)


def test_status_renews_the_certificate_of_a_person(yard: SigningYard) -> None:
    person = yard.credentials(Role.VIEWER, "viewer")
    ask(yard.connect(yard.credentials(Role.OPERATOR, "operator")), overlap_s=3_600)
    wait_until(lambda: phase_of(yard) is Phase.SIGN, "the second phase")
    with CoordinatorClient(yard.address, GrpcNetwork(person)) as client:
        client.status()
    certificate = x509.load_pem_x509_certificate(person.refresh().certificate)
    assert yard.identities.authority.would_issue(Role.VIEWER, certificate, person.pem.authorities)


def test_certificate_is_renewed_by_command(yard: SigningYard, capsys: pytest.CaptureFixture[str]) -> None:
    person = yard.credentials(Role.OPERATOR, "operator-2", 600)
    before = person.pem
    given = ["--coordinator", yard.address, "--set", f"security.identity={person.folder}"]
    assert main(["identities", "renew", *given]) == 0
    assert "was renewed" in capsys.readouterr().out
    after = person.refresh()
    assert (after.key, after.authorities) == (before.key, before.authorities)
    end = x509.load_pem_x509_certificate(after.certificate).not_valid_after_utc
    assert end > x509.load_pem_x509_certificate(before.certificate).not_valid_after_utc


def test_renewal_that_fails_is_tried_again_later(yard: SigningYard) -> None:
    credentials = yard.credentials(Role.AGENT, "agent-1")
    peer = yard.connect(credentials)
    renewal, calls = Renewal(peer), 0

    def fail(*_: object, **__: object) -> None:
        nonlocal calls
        calls += 1
        raise errors.CoordinatorUnavailable("away")

    peer.call = fail  # type: ignore[method-assign, assignment]
    for _ in range(3):
        renewal.look(b"other")
    assert calls == 1
    renewal._again_s = 0.0
    renewal.look(b"other")
    assert calls == 2


def test_invitations_in_folders_name_the_next_root_once_the_former_is_retired(tmp_path: Path) -> None:
    (tmp_path / "left" / "server").mkdir(parents=True)
    settings = SecuritySettings(invitations=str(tmp_path / "left"))
    identities = YardIdentities(settings, tmp_path / "identity" / "authority")

    def key() -> object:
        text = (tmp_path / "left" / "server" / "invitation").read_text()
        return JoinLine.parse("alpha:7070", text).authority

    (old,) = identities.authority.keys.keys
    identities.rotate(0)
    identities.end_phase()
    assert key() == old
    identities.end_phase()
    assert key() == identities.authority.keys.keys[0] != old
