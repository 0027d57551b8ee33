"""Invitations: what is in the line, what is stored, how often and how long one can be used."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cryptography import x509

from shardyard.domain import errors
from shardyard.security.authority import Authority, new_key
from shardyard.security.identity import Role
from shardyard.security.invitations import FILE, X962, Invitation, Invitations, JoinLine, Point


def point_of(key: object) -> bytes:
    return key.public_key().public_bytes(X962, Point)  # type: ignore[attr-defined, no-any-return]


def opened(invitations: Invitations, *, lifetime_s: float = 600, uses: int = 1) -> tuple[Invitation, JoinLine]:
    key, authority = new_key(), Authority(Path(str(invitations._path.parent)))
    made = invitations.add(Role.WORKER, "", point_of(key), lifetime_s, uses)
    return made, JoinLine("alpha:7070", made.id, key, authority.yard, authority.public_key)


def test_line_is_read_back(tmp_path: Path) -> None:
    _, line = opened(Invitations(tmp_path))
    again = JoinLine.parse("alpha:7070", f" {line.text}\n")
    assert (again.address, again.id, again.yard) == (line.address, line.id, line.yard)
    assert again.key.private_numbers() == line.key.private_numbers()
    assert again.authority == line.authority
    assert len(line.text) < 160


@pytest.mark.parametrize("text", ["", "a.b", "a.b.c.d", "yard.1.AAAA.AAAA", "yard.1." + "A" * 43 + "." + "A" * 44])
def test_what_is_no_line_is_refused(text: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="not an invitation"):
        JoinLine.parse("alpha:7070", text)


def test_secret_is_not_stored(tmp_path: Path) -> None:
    _, line = opened(Invitations(tmp_path))
    secret = line.key.private_numbers().private_value
    stored = (tmp_path / FILE).read_text()
    assert line.text.split(".")[2] not in stored
    assert f"{secret:x}" not in stored
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


def leaf_of(line: JoinLine) -> x509.Certificate:
    return x509.load_pem_x509_certificate(line.credentials().certificate)


def test_certificate_of_a_line_is_known_while_the_invitation_is_open(tmp_path: Path) -> None:
    invitations = Invitations(tmp_path)
    made, line = opened(invitations)
    other = JoinLine("", made.id, new_key(), line.yard, line.authority)
    assert invitations.find(leaf_of(line)) == made
    assert invitations.find(leaf_of(other)) is None
    invitations.use(made.id)
    assert invitations.find(leaf_of(line)) is None


def test_invitation_is_used_as_often_as_it_may_be(tmp_path: Path) -> None:
    invitations = Invitations(tmp_path)
    made, _ = opened(invitations, uses=2)
    for _ in range(2):
        assert invitations.use(made.id).role == "worker"
    with pytest.raises(errors.NotTrusted, match="used up"):
        invitations.use(made.id)


def test_use_is_counted_over_a_restart(tmp_path: Path) -> None:
    made, line = opened(Invitations(tmp_path), uses=2)
    Invitations(tmp_path).use(made.id)
    Invitations(tmp_path).use(made.id)
    with pytest.raises(errors.NotTrusted):
        Invitations(tmp_path).use(made.id)
    assert Invitations(tmp_path).find(leaf_of(line)) is None


def test_invitation_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invitations = Invitations(tmp_path)
    made, line = opened(invitations, lifetime_s=600)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 601)
    assert invitations.find(leaf_of(line)) is None
    assert invitations.certificates() == b""
    with pytest.raises(errors.NotTrusted, match="over"):
        invitations.use(made.id)


def test_trusted_certificates_stay_the_same_bytes(tmp_path: Path) -> None:
    """TLS takes a new configuration when they change, at each connection."""
    invitations = Invitations(tmp_path)
    opened(invitations)
    first = invitations.certificates()
    assert invitations.certificates() == first
    opened(invitations)
    assert invitations.certificates() != first


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"role": Role.COORDINATOR}, "nobody is invited as coordinator"),
        ({"role": Role.INVITED}, "nobody is invited as invited"),
        ({"key": b""}, "cannot be"),
        ({"key": b"\x02" + b"\xff" * 32}, "cannot be"),
        ({"name": "a b"}, "no name of a member"),
        ({"lifetime_s": 0}, "0 s"),
        ({"lifetime_s": 31 * 86_400}, "at most"),
        ({"uses": 0}, "0 uses"),
        ({"uses": 10_001}, "at most"),
    ],
)
def test_invitation_that_cannot_be_is_refused(tmp_path: Path, fields: dict[str, object], said: str) -> None:
    given = {"role": Role.WORKER, "name": "", "key": point_of(new_key()), "lifetime_s": 60, "uses": 1} | fields
    with pytest.raises(errors.InvalidRequest, match=said):
        Invitations(tmp_path).add(**given)  # type: ignore[arg-type]
    assert not (tmp_path / FILE).exists()


def test_open_invitations_are_bounded(tmp_path: Path) -> None:
    invitations = Invitations(tmp_path)
    for _ in range(256):
        invitations.add(Role.WORKER, "", point_of(new_key()), 60, 1)
    with pytest.raises(errors.TooLarge, match="256 invitations"):
        invitations.add(Role.WORKER, "", point_of(new_key()), 60, 1)


@pytest.mark.parametrize("text", ["", "[1]", '[{"id": "a"}]', "{"])
def test_file_of_another_origin_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(errors.ConfigurationError, match="cannot be read"):
        Invitations(tmp_path)


def test_file_has_only_what_is_needed(tmp_path: Path) -> None:
    opened(Invitations(tmp_path))
    (entry,) = json.loads((tmp_path / FILE).read_text())
    assert set(entry) == {"id", "role", "name", "owner", "key", "until_s", "uses_left"}
