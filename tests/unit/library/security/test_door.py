"""The door of a service: who calls, by certificate and pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation, JobId
from shardyard.security.door import Door
from shardyard.security.identity import Identity, Role
from shardyard.security.passes import PassSigner, PassVerifier
from shardyard.wire import methods

WORKER = Identity("yard-1", Role.WORKER, "w-1")


def connection(identity: Identity | None = WORKER, certificate: bytes = b"PEM") -> dict[str, list[bytes]]:
    """gRPC's auth context of a caller with this certificate."""
    names = [b"worker.shardyard"] if identity is None else [b"worker.shardyard", identity.uri.encode()]
    return {"x509_pem_cert": [certificate], "x509_subject_alternative_name": names}


def test_caller_is_whom_its_certificate_is_for() -> None:
    found = Door().admit(methods.PULL, connection())
    assert (found.identity, found.job_pass) == (WORKER, None)


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"x509_pem_cert": [b"PEM"]},
        connection(None),
        connection(certificate=b""),
        {**connection(), "x509_subject_alternative_name": [b"spiffe://yard-1/king/a"]},
        {**connection(), "x509_subject_alternative_name": [b"spiffe://\xff"]},
    ],
    ids=range(6),
)
def test_certificate_that_names_no_member_is_not_trusted(found: dict[str, list[bytes]]) -> None:
    with pytest.raises(errors.NotTrusted, match="does not say which member"):
        Door().admit(methods.STATUS, found)


def test_what_a_door_verifies_itself_counts_and_is_verified_once() -> None:
    asked: list[bytes] = []

    def verify(pem: bytes) -> Identity | None:
        asked.append(pem)
        return Identity("yard-1", Role.INVITED, "i") if pem == b"PEM" else None

    door = Door(verify)
    for _ in range(3):
        with pytest.raises(errors.NotPermitted, match="invited i may not call"):
            door.admit(methods.STATUS, connection(Identity("yard-1", Role.OPERATOR, "evil")))
    assert asked == [b"PEM"]
    door.forget()
    with pytest.raises(errors.NotTrusted):
        door.admit(methods.STATUS, connection(certificate=b"other"))


def test_known_callers_are_bounded() -> None:
    door = Door()
    for number in range(5_000):
        door.admit(methods.PULL, connection(certificate=b"%d" % number))
    assert len(door._known) <= 4_096


def test_server_that_cannot_check_passes_yet_lets_its_callers_wait(tmp_path: Path) -> None:
    """Between its registration and the moment when it knows the key, a worker with a good pass must not be refused for
    good."""
    signer, door = PassSigner(tmp_path), Door(checks_passes=True)
    shown = signer.sign(JobId(1), Incarnation(2), WORKER)
    with pytest.raises(errors.ServerUnavailable, match="has not registered yet"):
        door.admit(methods.PULL, connection(), shown)
    door.passes = PassVerifier(signer.public_key)
    found = door.admit(methods.PULL, connection(), shown).job_pass
    assert found is not None
    assert (found.job, found.incarnation) == (1, 2)
    assert door.admit(methods.PULL, connection()).job_pass is None
    with pytest.raises(errors.NotPermitted):
        door.admit(methods.PULL, connection(), b"x" * 90)


def test_service_without_passes_does_not_look_at_them() -> None:
    assert Door().admit(methods.STATUS, connection(), b"x").job_pass is None
