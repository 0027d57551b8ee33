"""Certificates of a yard without TLS: as whom each process calls, and the key with which the coordinator signs passes.

The shipped door, table of roles, bindings, passes and revocations decide. Only what makes certificates is replaced: a
process has its Identity in the place of a folder of files. So nothing is enrolled, renewed or rotated here, and
manifests are not signed.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardyard.config.settings import SecuritySettings
from shardyard.security.door import Door
from shardyard.security.identity import Identity, Role
from shardyard.security.passes import PassSigner
from shardyard.security.revocations import Revocations
from shardyard.transport.tls import ServerSecurity
from shardyard_coordinator.service.identities import YardIdentities

from .state import Yard, current_yard
from .world import current

YARD = "simulated"
ROLES = {"person": Role.OPERATOR}


def identity_of(yard: Yard, place: str) -> Identity | None:
    """As whom the processes at a place call; None if the yard has no certificates."""
    if not yard.plan.thief:
        return None
    kind = place.partition("-")[0]
    return Identity(YARD, ROLES.get(kind) or Role(kind), yard.certificates.get(place, place))


def own_identity(*_: object, **__: object) -> Identity | None:
    """In the place of `own_credentials`."""
    return identity_of(current_yard(), current().process.host)


class Signer(PassSigner):
    """Has the same key in each run."""

    def __init__(self, folder: Path) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(bytes(32))


class Identities(YardIdentities):
    """Has no authority."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        authority: Any = SimpleNamespace(yard=YARD, digest=b"", rotation=None, sign=None, keys=None)
        self.authority = authority
        self.revocations = Revocations(folder)
        self.on_revoked = lambda _: None
        self.door = Door()
        self.door.revoked = self.revocations.holders
        credentials: Any = own_identity()
        self.credentials = credentials
        self.security = ServerSecurity(credentials, self.door)

    def tick(self) -> None:
        """Has nothing to renew."""

    def go_on(self, members: object) -> None:
        """Has no rotation."""


def security_of(settings: SecuritySettings, state: Path) -> tuple[Identities | None, ServerSecurity | None]:
    """In the place of the coordinator's."""
    if not settings.tls:
        return None, None
    identities = Identities(state)
    return identities, identities.security
