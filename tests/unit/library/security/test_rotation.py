"""The files of a rotation: which root signs, what members trust, and that a crash leaves an authority that works."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
from cryptography import x509

from shardyard.domain import errors
from shardyard.security.authority import FORMER, KEY, Authority, Phase, make_credentials
from shardyard.security.credentials import CERTIFICATE, digest_of
from shardyard.security.credentials import KEY as OWN_KEY
from shardyard.security.identity import Role
from shardyard.security.issuing import issue_local, lasts
from shardyard.security.signatures import keys_of

OVERLAP_S = 60.0


def roots_of(authority: Authority) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(authority.authorities)


def signer_of(authority: Authority, role: Role) -> x509.Certificate:
    certificate = x509.load_pem_x509_certificate(make_credentials(authority, role, "a", 3_600).certificate)
    named = certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
    (found,) = (
        root
        for root in roots_of(authority)
        if root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest == named
    )
    certificate.verify_directly_issued_by(found)
    return found


def test_roots_that_sign_and_are_trusted_in_each_phase(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    yard, (old,), old_key = authority.yard, roots_of(authority), (tmp_path / KEY).read_bytes()

    authority.begin_rotation(OVERLAP_S)
    assert authority.rotation is not None
    assert (authority.rotation.phase, authority.rotation.overlap_s) == (Phase.SPREAD, OVERLAP_S)
    assert roots_of(authority)[0] == old
    (_, new) = roots_of(authority)
    assert signer_of(authority, Role.WORKER) == signer_of(authority, Role.COORDINATOR) == old

    authority.end_phase()
    assert roots_of(authority) == [new, old]
    assert (signer_of(authority, Role.WORKER), signer_of(authority, Role.COORDINATOR)) == (new, old)
    assert authority.public_key == old.public_key(), "invitations name the root of the coordinator's certificate"

    authority.end_phase()
    assert authority.rotation is None
    assert roots_of(authority) == [new]
    assert signer_of(authority, Role.WORKER) == signer_of(authority, Role.COORDINATOR) == new
    assert (authority.yard, authority.keys.keys) == (yard, (new.public_key(), old.public_key()))
    assert x509.load_pem_x509_certificate(next((tmp_path / FORMER).iterdir()).read_bytes()) == old
    assert old_key not in [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]


def test_what_a_former_root_has_signed_counts_and_new_texts_are_signed_by_the_new_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    by_old = authority.sign(b"text")
    authority.begin_rotation(OVERLAP_S)
    authority.end_phase()
    by_new = authority.sign(b"text")
    pem = make_credentials(authority, Role.SERVER, "s", 60)
    authority.end_phase()
    assert all(Authority(tmp_path).keys.have_signed(b"text", signature) for signature in (by_old, by_new))
    assert not authority.keys.have_signed(b"other", by_old)
    keys = keys_of(make_credentials(authority, Role.SERVER, "s", 60))
    assert keys is not None
    assert (keys.have_signed(b"text", by_old), keys.have_signed(b"text", by_new)) == (False, True)
    during = keys_of(pem)
    assert during is not None
    assert during.have_signed(b"text", by_old)
    (tmp_path / FORMER).rename(tmp_path / "aside")
    assert not Authority(tmp_path).keys.have_signed(b"text", by_old)


def test_what_members_are_to_trust_differs_in_each_phase(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    digests = [authority.digest]
    authority.begin_rotation(OVERLAP_S)
    digests.append(authority.digest)
    for _ in range(2):
        authority.end_phase()
        digests.append(authority.digest)
    assert len(set(digests)) == 4
    assert authority.digest == digest_of(authority.authorities)


def test_certificates_of_former_roots_are_known_and_not_listed(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    before = x509.load_pem_x509_certificate(make_credentials(authority, Role.WORKER, "w", 3_600).certificate)
    authority.begin_rotation(OVERLAP_S)
    assert [each.holder for each in authority.issued()] == ["worker/w"]
    authority.end_phase()
    authority.end_phase()
    assert authority.issued() == []
    assert authority.has_issued(before)
    assert not authority.would_issue(Role.WORKER, before, authority.authorities)


def test_rotation_is_begun_once_and_only_one_that_has_begun_goes_on(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with pytest.raises(errors.InvalidRequest, match="not being rotated"):
        authority.end_phase()
    authority.begin_rotation(OVERLAP_S)
    with pytest.raises(errors.InvalidRequest, match="already: phase spread"):
        authority.begin_rotation(OVERLAP_S)


class Crash(Exception):
    pass


def test_crash_at_any_moment_leaves_an_authority_that_goes_on(tmp_path: Path) -> None:
    """The process ends before the n-th change of a file, for each n until all of them are done."""
    for changes in range(1, 100):
        folder = tmp_path / str(changes)
        authority = Authority(folder)
        (old,) = roots_of(authority)
        left, replace, unlink = changes, os.replace, Path.unlink

        def spend() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                raise Crash

        def crashing_replace(source: Path, target: Path, replace: object = replace) -> None:
            spend()
            os.rename(source, target)

        def crashing_unlink(path: Path, *, missing_ok: bool = False, unlink: object = unlink) -> None:
            if path.suffix != ".part":
                spend()
            unlink(path, missing_ok=missing_ok)  # type: ignore[operator]

        crashed = False
        with mock.patch("os.replace", crashing_replace), mock.patch.object(Path, "unlink", crashing_unlink):
            try:
                authority.begin_rotation(OVERLAP_S)
                authority.end_phase()
                authority.end_phase()
            except Crash:
                crashed = True
        again = Authority(folder)
        assert signer_of(again, Role.WORKER) == roots_of(again)[0]
        assert old.public_key() in again.keys.keys
        if again.rotation is None and roots_of(again) == [old]:
            again.begin_rotation(OVERLAP_S)
        while again.rotation is not None:
            again.end_phase()
        (new,) = roots_of(again)
        assert new != old
        assert again.keys.keys == (new.public_key(), old.public_key())
        if not crashed:
            assert changes > 6
            return
    raise AssertionError("it crashed each time")


def test_damaged_file_of_a_rotation_is_refused(tmp_path: Path) -> None:
    Authority(tmp_path).begin_rotation(OVERLAP_S)
    for damaged in (b"", b"[]", b"{}", b'{"phase": "spread"}', b'{"phase": "king", "since_s": 1, "overlap_s": 1}'):
        (tmp_path / "rotation.json").write_bytes(damaged)
        with pytest.raises(errors.ConfigurationError, match="cannot be used"):
            Authority(tmp_path)


def test_local_certificates_follow_the_phases_and_keep_their_keys(tmp_path: Path) -> None:
    authority, worker = Authority(tmp_path / "authority"), tmp_path / "worker"
    issue_local(authority, tmp_path)
    key, coordinator = (worker / OWN_KEY).read_bytes(), (tmp_path / "coordinator" / CERTIFICATE).read_bytes()
    authority.begin_rotation(OVERLAP_S)
    for _ in range(3):
        assert not lasts(authority, worker, Role.WORKER)
        issue_local(authority, tmp_path)
        assert lasts(authority, worker, Role.WORKER)
        assert lasts(authority, tmp_path / "coordinator", Role.COORDINATOR)
        if authority.rotation is not None:
            authority.end_phase()
    assert (worker / OWN_KEY).read_bytes() == key
    assert (tmp_path / "coordinator" / CERTIFICATE).read_bytes() != coordinator
