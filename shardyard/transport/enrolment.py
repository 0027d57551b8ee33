"""How a process gets its certificate from the coordinator: with an invitation, for a launch, or again before it ends.

Owns: the calls of `Enrol`. Invariants: a private key never leaves the machine on which it was made; a renewal keeps the
key, and one process at a time renews a folder that several share. A process whose authorities are not those that the
coordinator wants it to trust renews its certificate together with them.
"""

from __future__ import annotations

import logging
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from shardyard.config.settings import AUTO, Settings
from shardyard.domain import errors
from shardyard.domain.errors import NotTrusted
from shardyard.runtime.waits import ExplainedWait
from shardyard.security.credentials import Credentials, Pem, locked, renew_credentials, write_credentials
from shardyard.security.identity import Role
from shardyard.security.local import find_credentials, folder_of
from shardyard.transport.interfaces import Peer
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire

log = logging.getLogger("shardyard.enrolment")

ENROL_MS: Final = 10_000
RETRY_S: Final = 0.25
LOOK_S: Final = 1.0
RENEWAL_EVERY_S: Final = 600.0
"""How often a process looks whether its certificate is to be renewed."""
RENEW_AGAIN_S: Final = 10.0
"""The pause after a renewal that failed, while the coordinator wants other authorities to be trusted."""


def own_credentials(
    settings: Settings, *roles: Role, coordinator: str = "", stop: threading.Event | None = None
) -> Credentials | None:
    """The credentials of this process (`find_credentials`). If it has none yet and the settings name an invitation, it
    joins the yard with that. While nobody listens at the coordinator's address, it waits, for
    membership.coordinator_grace_ms or until `stop` is set. Raises NotTrusted, CoordinatorUnavailable,
    ConfigurationError."""
    address = coordinator or settings.coordinator
    give_up = time.monotonic() + settings.membership.coordinator_grace_ms / 1000
    with ExplainedWait(lambda: f"the coordinator at {address}, for a certificate", logger=log) as wait:
        while True:
            try:
                return _found_or_joined(settings, roles, address)
            except errors.CoordinatorUnavailable:
                if time.monotonic() >= give_up or (stop or threading.Event()).wait(RETRY_S):
                    raise
            wait.tick()


def _found_or_joined(settings: Settings, roles: tuple[Role, ...], address: str) -> Credentials | None:
    try:
        return find_credentials(settings, *roles, coordinator=address)
    except NotTrusted as error:
        file = settings.security.invitation
        if not file:
            raise why_missing(error, address) from None
    pem, role, name = join(address, read_invitation(Path(file)))
    given = settings.security.identity
    folder = keep_credentials(folder_of(Path(settings.yard.state), role) if given == AUTO else Path(given), pem)
    log.info("joined the yard as %s %s; the certificate is in %s", role, name, folder)
    return Credentials(folder)


def why_missing(error: NotTrusted, coordinator: str) -> errors.ShardyardError:
    """The error for a process without a certificate. If nobody listens at the coordinator's address, that comes first:
    a yard that is not up has no certificates here yet."""
    host, _, port = coordinator.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK_S):
            return error
    except (OSError, ValueError) as refused:
        return errors.CoordinatorUnavailable(f"coordinator at {coordinator} does not answer ({refused})")


def read_invitation(file: Path) -> str:
    """Raises ConfigurationError."""
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise errors.ConfigurationError(f"the invitation {file} cannot be read: {error}") from error


def keep_credentials(folder: Path, pem: Pem) -> Path:
    """Writes the credentials of this process into its folder, which it returns. Raises ConfigurationError."""
    try:
        write_credentials(folder, pem)
    except OSError as error:
        raise errors.ConfigurationError(
            f"{folder} cannot hold a certificate: {error.strerror}",
            todo="choose another folder, by yard.state or security.identity",
        ) from error
    return folder


def join(address: str, invitation: str) -> tuple[Pem, str, str]:
    """Uses an invitation. Returns the credentials, and the role and name that they are for. Raises ConfigurationError
    for what is no invitation, NotTrusted if it is over, CoordinatorUnavailable."""
    from shardyard.security.authority import key_to_pem, make_request, new_key
    from shardyard.security.invitations import JoinLine
    from shardyard.transport.grpc_client import GrpcNetwork

    line, key = JoinLine.parse(address, invitation), new_key()
    with tempfile.TemporaryDirectory() as folder:
        write_credentials(Path(folder), line.credentials())
        peer = GrpcNetwork(Credentials(Path(folder))).connect(
            address, name="coordinator", unavailable=errors.CoordinatorUnavailable
        )
        try:
            with ExplainedWait(lambda: f"the {peer.name} to sign a certificate"):
                reply = peer.call(methods.ENROL, wire.EnrolRequest(request=make_request(key)), timeout_ms=ENROL_MS)
        except errors.CoordinatorUnavailable as error:
            if "Socket closed" not in error.what:
                raise
            raise errors.NotTrusted(
                f"the coordinator at {address} does not take this invitation",
                why="an invitation lasts for ten minutes and one process, unless it was made for more",
                todo="ask for another: `shardyard invite`",
            ) from error
        finally:
            peer.close()
    if not _is_of(reply.authorities, line):
        raise errors.NotTrusted(f"the coordinator at {address} has another authority than the invitation says")
    return Pem(key_to_pem(key), reply.certificate, reply.authorities), reply.role, reply.name


def invite(peer: Peer, *, role: str, name: str, lifetime_s: int, uses: int, owner: str = "") -> str:
    """Opens an invitation. Returns what follows the address in the line for the other machine. Raises what the
    coordinator answers."""
    from cryptography.hazmat.primitives.asymmetric import ec

    from shardyard.security.authority import new_key
    from shardyard.security.invitations import X962, JoinLine, Point

    key = new_key()
    point = key.public_key().public_bytes(X962, Point)
    request = wire.InviteRequest(role=role, name=name, key=point, lifetime_s=lifetime_s, uses=uses, owner=owner)
    reply = peer.call(methods.INVITE, request, timeout_ms=ENROL_MS)
    authority = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), reply.authority)
    return JoinLine("", reply.id, key, reply.yard, authority).text


def enrol_launch(peer: Peer, launch: str, owner: str = "") -> Pem | None:
    """For an agent: credentials for the processes of a launch. None: the yard has its certificates from elsewhere.
    Raises what the coordinator answers."""
    from shardyard.security.authority import key_to_pem, make_request, new_key

    key = new_key()
    request = wire.EnrolRequest(request=make_request(key), launch=launch, owner=owner)
    try:
        reply = peer.call(methods.ENROL, request, timeout_ms=ENROL_MS)
    except errors.NotFound:
        return None
    return Pem(key_to_pem(key), reply.certificate, reply.authorities)


class Renewal:
    """Keeps the certificate of a process valid, and what it trusts as the coordinator wants it. `peer`: the
    coordinator."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._look_s = self._again_s = 0.0

    def look(self, wanted: bytes) -> None:
        """Called after each reply with `wanted` (`digest_of`), the authorities that this process is to trust. Logs what
        fails, and tries again later."""
        credentials, now_s = self._peer.credentials, time.monotonic()
        if credentials is None or now_s < (self._again_s if _is_behind(credentials, wanted) else self._look_s):
            return
        self._look_s = now_s + RENEWAL_EVERY_S
        try:
            renew_if_due(self._peer, credentials, wanted)
        except (errors.ShardyardError, OSError) as error:
            self._again_s = now_s + RENEW_AGAIN_S
            log.warning("the certificate in %s cannot be renewed yet: %s", credentials.folder, error)


def renew_if_due(peer: Peer, credentials: Credentials, wanted: bytes = b"") -> bool:
    """Renews a certificate two thirds of whose time are over, or if this process trusts others than `wanted`. Returns
    whether it is new. Raises what the coordinator answers, OSError."""
    if not _is_due(credentials, wanted):
        return False
    with locked(credentials.folder):
        credentials.refresh()
        if _is_due(credentials, wanted):  # else another process of this folder was faster
            _renew(peer, credentials)
    return True


def renew(peer: Peer, credentials: Credentials) -> None:
    """Renews a certificate now. Raises what the coordinator answers, OSError."""
    with locked(credentials.folder):
        credentials.refresh()
        _renew(peer, credentials)


def _renew(peer: Peer, credentials: Credentials) -> None:
    from shardyard.security.authority import key_from_pem, make_request

    request = wire.EnrolRequest(request=make_request(key_from_pem(credentials.pem.key)))
    reply = peer.call(methods.ENROL, request, timeout_ms=ENROL_MS)
    renew_credentials(credentials.folder, reply.certificate, reply.authorities)
    credentials.refresh()
    log.info("the certificate in %s was renewed", credentials.folder)


def _is_due(credentials: Credentials, wanted: bytes) -> bool:
    from cryptography import x509

    from shardyard.security.issuing import is_due

    return _is_behind(credentials, wanted) or is_due(x509.load_pem_x509_certificate(credentials.pem.certificate))


def _is_behind(credentials: Credentials, wanted: bytes) -> bool:
    return bool(wanted) and wanted != credentials.trusts


def _is_of(authorities: bytes, line: object) -> bool:
    from cryptography import x509

    from shardyard.security.invitations import JoinLine

    assert isinstance(line, JoinLine)
    return any(each.public_key() == line.authority for each in x509.load_pem_x509_certificates(authorities))
