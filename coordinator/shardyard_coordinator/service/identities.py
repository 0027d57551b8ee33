"""The coordinator's part in certificates: its authority, the open invitations, the certificates of its machine.

Owns: whom a certificate is for that reaches the coordinator; when a phase of a rotation ends (see
shardyard.security.authority). Invariants: only what the authority itself has signed is a member of the yard; what an
invitation's key has signed is `invited`, whatever it says; a phase ends when the coordinator and all living members
have what it is for, or when an operator says so.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from cryptography import x509

from shardyard.config.settings import AUTO, SecuritySettings
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Incarnation
from shardyard.security.authority import Authority, Phase, new_key
from shardyard.security.credentials import Credentials, replace_file
from shardyard.security.door import Door
from shardyard.security.identity import SCHEME, Identity, Role
from shardyard.security.invitations import LIFETIME_MAX_S, USES_MAX, X962, Invitations, JoinLine, Point
from shardyard.security.issuing import issue_local
from shardyard.security.local import AUTHORITY, FOLDER
from shardyard.security.revocations import Revocations
from shardyard.transport.tls import ServerSecurity
from shardyard_coordinator.members.membership import Member

log = logging.getLogger("shardyard.coordinator")

RENEW_EVERY_S: Final = 600
INVITE_EVERY_S: Final = LIFETIME_MAX_S // 3
DIGEST_BYTES: Final = 32
INVITATION: Final = "invitation"
"""The file in a role's folder of security.invitations."""
INVITED_BY_FILE: Final = (Role.SERVER, Role.AGENT, Role.WORKER, Role.READER, Role.VIEWER)


class YardIdentities:
    """`authority`: the folder of the yard's authority. The certificates of this machine's processes are beside it.
    Makes both if there are none. Raises ConfigurationError, NotTrusted."""

    def __init__(self, settings: SecuritySettings, authority: Path) -> None:
        self.folder = folder = authority.parent
        self.authority = Authority(authority)
        self.invitations = Invitations(authority)
        own = folder / Role.COORDINATOR.value if settings.identity == AUTO else Path(settings.identity)
        self._folder_of_invitations = Path(settings.invitations) if settings.invitations else None
        self._renewed_s = self._left_s = -math.inf
        self._rotating = threading.RLock()
        self._trusted: dict[Incarnation, bytes] = {}
        """What members trust, as a digest, by their last heartbeats."""
        self.tick()
        self.revocations = Revocations(authority)
        self.on_revoked: Callable[[frozenset[str]], None] = lambda _: None
        """Gets whose certificates are refused, as role/name, whenever that has changed."""
        self.door = Door(self._identify)
        self.door.revoked = self.revocations.holders
        self.credentials = Credentials(own)
        self.security = ServerSecurity(self.credentials, self.door, self.invitations.certificates)

    @property
    def point(self) -> bytes:
        """The authority's public key."""
        return self.authority.public_key.public_bytes(X962, Point)

    def revoke(self, held: Identity, *, revoked: bool) -> None:
        """Refuses the certificates of a member from now on, or takes that back. Raises InvalidRequest, TooLarge,
        OSError."""
        if held.role in (Role.COORDINATOR, Role.INVITED):
            raise InvalidRequest(f"the certificate of {held} cannot be revoked")
        self.revocations.change(held.holder, revoked=revoked)
        self.door.revoked = self.revocations.holders
        self.on_revoked(self.revocations.holders)

    def note_trusted(self, member: Incarnation, trusted: bytes) -> None:
        """Remembers what a member trusts, by its heartbeat, while that matters."""
        if self.authority.rotation is not None:
            self._trusted[member] = trusted[:DIGEST_BYTES]

    def waits_for(self, members: Iterable[Member]) -> list[str]:
        """What does not have yet what the present phase of the rotation is for."""
        wanted = self.authority.digest
        self.credentials.refresh()
        behind = [member.title for member in members if self._trusted.get(member.incarnation) != wanted]
        return ["the coordinator"] * (self.credentials.trusts != wanted) + behind

    def rotate(self, overlap_s: float) -> None:
        """Begins a rotation. Raises InvalidRequest, OSError."""
        self._change(lambda: self.authority.begin_rotation(overlap_s))

    def end_phase(self) -> None:
        """Ends a phase of the rotation. Members that do not have what it is for must join again. Raises InvalidRequest,
        OSError."""
        self._change(self._end_phase)

    def _end_phase(self) -> None:
        rotation = self.authority.rotation
        if rotation is not None and rotation.phase is Phase.SIGN:
            self.invitations.end_all()  # their lines name the root that is retired
            self._left_s = -math.inf
        self.authority.end_phase()

    def go_on(self, members: Callable[[], Iterable[Member]]) -> None:
        """Ends the present phase of a rotation if that is due. Called often."""
        with self._rotating:
            rotation, now_s = self.authority.rotation, time.time()
            if rotation is None or (rotation.phase is Phase.SIGN and now_s < rotation.since_s + rotation.overlap_s):
                return
            if not self.waits_for(members()):
                try:
                    self.end_phase()
                except OSError as error:
                    log.warning("the rotation of the authority cannot go on yet: %s", error)

    def _change(self, change: Callable[[], None]) -> None:
        with self._rotating:
            change()
            self._trusted.clear()
            self._renewed_s = -math.inf
            self.tick()
            self.credentials.refresh()
            rotation = self.authority.rotation
        phase = "the former root is retired" if rotation is None else f"phase {rotation.phase.value}"
        log.warning("rotation of the yard's authority: %s", phase)

    def tick(self) -> None:
        """Renews the certificates of this machine, and the invitations, when it is time. Called often."""
        now_s = time.monotonic()
        if now_s - self._renewed_s < RENEW_EVERY_S:
            return
        self._renewed_s = now_s
        try:
            issue_local(self.authority, self.folder)
            if now_s - self._left_s > INVITE_EVERY_S:
                self._leave_invitations()
                self._left_s = now_s
        except OSError as error:
            log.warning("certificates and invitations cannot be renewed yet: %s", error)

    def _leave_invitations(self) -> None:
        """Writes a new invitation into each folder of a role (security.invitations). Raises OSError."""
        if self._folder_of_invitations is None:
            return
        for role in INVITED_BY_FILE:
            folder = self._folder_of_invitations / role.value
            if folder.is_dir():
                key, own = new_key(), f"file-{role.value}"
                point = key.public_key().public_bytes(X962, Point)
                made = self.invitations.add(role, "", point, LIFETIME_MAX_S, USES_MAX, replaces=own)
                line = JoinLine("", made.id, key, self.authority.yard, self.authority.public_key)
                replace_file(folder / INVITATION, line.text.encode())

    def _identify(self, pem: bytes) -> Identity | None:
        try:
            certificate = x509.load_pem_x509_certificate(pem)
        except ValueError:
            return None
        if self.authority.has_issued(certificate):
            return _named(certificate)
        invitation = self.invitations.find(certificate)
        return None if invitation is None else Identity(self.authority.yard, Role.INVITED, invitation.id)


def security_of(settings: SecuritySettings, state: Path) -> tuple[YardIdentities | None, ServerSecurity | None]:
    """The yard's own authority, if it has one, and what the coordinator's port shows. A coordinator with a certificate
    from elsewhere (security.identity) and no authority signs nothing. `state`: the state folder. Raises
    ConfigurationError, NotTrusted."""
    if not settings.tls:
        return None, None
    if settings.identity != AUTO and settings.authority == AUTO:
        return None, ServerSecurity(Credentials(Path(settings.identity)))
    authority = state / FOLDER / AUTHORITY if settings.authority == AUTO else Path(settings.authority)
    identities = YardIdentities(settings, authority.absolute())
    return identities, identities.security


def _named(certificate: x509.Certificate) -> Identity | None:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        return next((Identity.parse(uri) for uri in uris if uri.startswith(SCHEME)), None)
    except (x509.ExtensionNotFound, ValueError):
        return None
