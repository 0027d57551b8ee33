"""Identities, the authority, credentials in folders: who a certificate is for, and what is refused."""

from __future__ import annotations

import datetime
import os
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from shardyard.domain import errors
from shardyard.security.authority import Authority, make_credentials, make_request, new_key, requested_key
from shardyard.security.credentials import AUTHORITIES, CERTIFICATE, KEY, Credentials, write_credentials
from shardyard.security.identity import Identity, Role
from shardyard.security.issuing import MEMBER_LIFETIME_S, PERSON_LIFETIME_S, is_due, issue_local, lasts, lifetime_of


def certificate_in(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("role", list(Role))
def test_identity_is_read_from_its_uri(role: Role) -> None:
    identity = Identity("yard-1", role, "alpha.7")
    assert Identity.parse(identity.uri) == identity
    assert identity.uri == f"spiffe://yard-1/{role.value}/alpha.7"
    owned = Identity("yard-1", role, "alpha.7", "ada")
    assert Identity.parse(owned.uri) == owned
    assert (owned.holder, str(owned)) == (f"{role.value}/ada/alpha.7", f"{role.value} ada/alpha.7")
    assert [owned.may_touch(owner) for owner in ("ada", "eve", "")] == [True, False, False]
    assert [identity.may_touch(owner) for owner in ("ada", "eve", "")] == [True, True, True]


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "spiffe://",
        "spiffe://yard-1",
        "spiffe://yard-1/worker",
        "spiffe://yard-1/worker/",
        "spiffe://yard-1/king/a",
        "spiffe://Yard/worker/a",
        "spiffe://yard-1/worker/a/b/c",
        "spiffe://yard-1/worker//b",
        "spiffe://yard-1/worker/a/",
        "spiffe://yard-1/worker/a\n",
        "spiffe://yard-1/worker/" + "a" * 129,
        "https://yard-1/worker/a",
    ],
)
def test_what_is_no_identity_is_refused(uri: str) -> None:
    with pytest.raises(ValueError):
        Identity.parse(uri)


def test_certificate_says_role_and_name_and_is_signed_by_the_authority(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    write_credentials(tmp_path / "w", make_credentials(authority, Role.WORKER, "w-1", 3_600))
    certificate = certificate_in(tmp_path / "w")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"spiffe://{authority.yard}/worker/w-1"]
    assert names.get_values_for_type(x509.DNSName) == ["worker.shardyard"]
    assert authority.has_issued(certificate)
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert 3_500 < left.total_seconds() <= 3_600


def test_authority_is_the_same_when_it_is_opened_again(tmp_path: Path) -> None:
    first, again = Authority(tmp_path), Authority(tmp_path)
    assert (first.yard, first.authorities) == (again.yard, again.authorities)
    assert first.yard != Authority(tmp_path / "other").yard


def test_keys_are_readable_by_their_user_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        authority = Authority(tmp_path / "authority")
        issue_local(authority, tmp_path)
    finally:
        os.umask(old)
    for folder in tmp_path.iterdir():
        assert mode(folder) == 0o700, folder
        for file in folder.iterdir():
            assert mode(file) == 0o600, file


@pytest.mark.parametrize("damage", ["empty", "other", "gone"])
def test_authority_whose_files_do_not_fit_is_refused(tmp_path: Path, damage: str) -> None:
    Authority(tmp_path / "a")
    Authority(tmp_path / "b")
    key = tmp_path / "a" / "ca.key"
    if damage == "empty":
        key.write_bytes(b"")
    elif damage == "other":
        key.write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    else:
        key.unlink()
    with pytest.raises(errors.ConfigurationError, match=r"authority|belong together"):
        Authority(tmp_path / "a")


def test_request_gives_its_key(tmp_path: Path) -> None:
    key = new_key()
    assert requested_key(make_request(key)) == key.public_key()


def rsa_request() -> bytes:
    key = rsa.generate_private_key(65537, 2048)
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def other_curve() -> bytes:
    key = ec.generate_private_key(ec.SECP384R1())
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def forged() -> bytes:
    request = bytearray(make_request(new_key()))
    request[-1] ^= 1
    return bytes(request)


@pytest.mark.parametrize(
    "request_", [b"", b"\x30\x82", b"x" * 20_000, rsa_request(), other_curve(), forged()], ids=range(6)
)
def test_what_is_no_request_of_its_sender_is_refused(request_: bytes) -> None:
    with pytest.raises(errors.MalformedPayload, match="not a request for a certificate"):
        requested_key(request_)


def test_credentials_are_read_again_when_they_were_renewed(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    write_credentials(tmp_path / "w", make_credentials(authority, Role.WORKER, "w", 3_600))
    credentials = Credentials(tmp_path / "w")
    first = credentials.pem
    assert credentials.refresh() is first
    write_credentials(tmp_path / "w", make_credentials(authority, Role.WORKER, "w", 7_200))
    assert credentials.refresh() is not first
    assert credentials.pem.certificate == (tmp_path / "w" / CERTIFICATE).read_bytes()


def test_credentials_that_are_gone_meanwhile_stay_as_they_were(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    write_credentials(tmp_path / "w", make_credentials(authority, Role.WORKER, "w", 3_600))
    credentials = Credentials(tmp_path / "w")
    first = credentials.pem
    (tmp_path / "w" / CERTIFICATE).unlink()
    assert credentials.refresh() is first


@pytest.mark.parametrize("missing", [KEY, CERTIFICATE, AUTHORITIES])
def test_folder_without_a_file_is_no_credentials(tmp_path: Path, missing: str) -> None:
    authority = Authority(tmp_path / "authority")
    write_credentials(tmp_path / "w", make_credentials(authority, Role.WORKER, "w", 3_600))
    (tmp_path / "w" / missing).unlink()
    with pytest.raises(errors.NotTrusted, match=missing):
        Credentials(tmp_path / "w")


def test_members_last_a_day_and_people_a_month() -> None:
    assert lifetime_of(Role.WORKER) == lifetime_of(Role.SERVER) == MEMBER_LIFETIME_S == 86_400
    assert lifetime_of(Role.OPERATOR) == lifetime_of(Role.VIEWER) == PERSON_LIFETIME_S


@pytest.mark.parametrize(("lifetime_s", "due"), [(3_600, False), (-10, True), (60, True)])
def test_certificate_is_due_when_two_thirds_are_over(tmp_path: Path, lifetime_s: float, due: bool) -> None:
    """It is valid from 300 s before it was made, so one of 60 s has less than a third left."""
    authority = Authority(tmp_path / "authority")
    write_credentials(tmp_path / "w", make_credentials(authority, Role.WORKER, "w", lifetime_s))
    assert is_due(certificate_in(tmp_path / "w")) is due
    assert lasts(authority, tmp_path / "w", Role.WORKER) is not due


def test_local_certificates_are_kept_while_they_last(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    issue_local(authority, tmp_path)
    before = {each.name: certificate_in(each) for each in tmp_path.iterdir() if each.name != "authority"}
    write_credentials(tmp_path / "worker", make_credentials(authority, Role.WORKER, "worker", 60))
    write_credentials(tmp_path / "reader", make_credentials(Authority(tmp_path / "b"), Role.READER, "reader", 3_600))
    issue_local(authority, tmp_path)
    after = {name: certificate_in(tmp_path / name) for name in before}
    assert {name for name in before if before[name] != after[name]} == {"worker", "reader"}
    assert all(authority.has_issued(each) for each in after.values())
