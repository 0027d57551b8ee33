"""Passes: who may speak for a job and a member, by the coordinator's signature."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation, JobId
from shardyard.security.identity import Identity, Role
from shardyard.security.passes import FILE, LIFETIME_S, JobPass, PassSigner, PassVerifier, Speaker, end_of

WORKER = Identity("yard-1", Role.WORKER, "w-1")
OTHER = Identity("yard-1", Role.WORKER, "w-2")
JOB, MEMBER = JobId((1 << 32) + 1), Incarnation((1 << 32) + 7)


@pytest.fixture
def signer(tmp_path: Path) -> PassSigner:
    return PassSigner(tmp_path)


def test_pass_says_job_member_holder_and_end(signer: PassSigner) -> None:
    shown = signer.sign(JOB, MEMBER, WORKER)
    found = PassVerifier(signer.public_key).verify(shown, WORKER)
    assert (found.job, found.incarnation, found.holder) == (JOB, MEMBER, "worker/w-1")
    assert end_of(shown) == found.until_s
    assert abs(found.until_s - time.time() - LIFETIME_S) < 5
    assert end_of(b"") == 0


def test_key_stays_over_a_restart_and_is_for_its_user_only(tmp_path: Path) -> None:
    assert PassSigner(tmp_path).public_key == PassSigner(tmp_path).public_key
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
    (tmp_path / FILE).write_bytes(b"?")
    with pytest.raises(errors.ConfigurationError, match="cannot be used"):
        PassSigner(tmp_path)


def test_pass_is_worth_nothing_to_another(signer: PassSigner) -> None:
    verifier, shown = PassVerifier(signer.public_key), signer.sign(JOB, MEMBER, WORKER)
    for _ in range(2):  # also once it is known
        with pytest.raises(errors.NotPermitted, match="worker w-2 shows a pass of worker/w-1"):
            verifier.verify(shown, OTHER)
        assert verifier.verify(shown, WORKER)


def test_every_byte_is_signed(signer: PassSigner) -> None:
    verifier, shown = PassVerifier(signer.public_key), signer.sign(JOB, MEMBER, WORKER)
    for place in range(len(shown)):
        changed = bytearray(shown)
        changed[place] ^= 1
        with pytest.raises(errors.NotPermitted, match="has not signed"):
            verifier.verify(bytes(changed), WORKER)


@pytest.mark.parametrize("shown", [b"x", b"\x01" * 88, b"\x01" * 89, b"\x02" + b"a" * 200, b"x" * 10_000])
def test_what_is_no_pass_is_refused(signer: PassSigner, shown: bytes) -> None:
    with pytest.raises(errors.NotPermitted, match="has not signed"):
        PassVerifier(signer.public_key).verify(shown, WORKER)


def test_pass_of_another_yard_is_refused(signer: PassSigner, tmp_path: Path) -> None:
    foreign = PassSigner(tmp_path / "other").sign(JOB, MEMBER, WORKER)
    with pytest.raises(errors.NotPermitted, match="has not signed"):
        PassVerifier(signer.public_key).verify(foreign, WORKER)


def test_pass_ends(signer: PassSigner, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, shown = PassVerifier(signer.public_key), signer.sign(JOB, MEMBER, WORKER)
    verifier.verify(shown, WORKER)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + LIFETIME_S + 1)
    with pytest.raises(errors.NotPermitted, match="is over"):
        verifier.verify(shown, WORKER)


@pytest.mark.parametrize(
    ("job", "member", "allowed"),
    [
        (JOB, MEMBER, True),
        (JOB, Incarnation(0), True),
        (JOB, Incarnation(MEMBER + 1), False),
        (JobId(JOB + 1), MEMBER, False),
        (JobId(JOB + 1), Incarnation(0), False),
        (JobId(0), Incarnation(0), False),
    ],
)
def test_speaker_speaks_for_its_own_job_and_member(job: JobId, member: Incarnation, allowed: bool) -> None:
    speaker = Speaker(WORKER, JobPass(JOB, MEMBER, "worker/w-1", 0))
    if allowed:
        speaker.check(job, member)
    else:
        with pytest.raises(errors.NotPermitted, match="has a pass for job"):
            speaker.check(job, member)
    with pytest.raises(errors.NotPermitted, match="has no pass"):
        Speaker(WORKER, None).check(job, member)
    Speaker(Identity("yard-1", Role.COORDINATOR, "c"), None).check(job, member)
