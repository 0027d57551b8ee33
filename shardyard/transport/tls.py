"""TLS for gRPC, from a member's credentials.

Both sides show certificates. The caller checks that the peer's certificate is for its role (coordinator.shardyard and
so on), not for its address; the server's door checks the caller's role. Renewed certificates are used for connections
that begin later; open ones stay.
"""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import grpc

from shardyard.domain import errors
from shardyard.security.credentials import Credentials, Pem
from shardyard.security.door import Door
from shardyard.security.identity import Role, host_of

SERVING_ROLES: Final = (Role.COORDINATOR.value, Role.SERVER.value, Role.AGENT.value)
_LOOK_S: Final = 1.0
_PLAIN: Final = "WRONG_VERSION_NUMBER"
"""What gRPC says of an answer without TLS."""


@dataclass(frozen=True)
class ServerSecurity:
    """What a server shows, and whom it admits. `more_authorities`: what callers' certificates may lead to beside the
    authorities of the credentials, as PEM."""

    credentials: Credentials
    door: Door = field(default_factory=Door)
    more_authorities: Callable[[], bytes] = bytes

    def for_grpc(self) -> grpc.ServerCredentials:
        lock = threading.Lock()
        served: list[tuple[Pem, bytes]] = [(self.credentials.pem, self.more_authorities())]

        def configuration() -> grpc.ServerCertificateConfiguration:
            pem, more = served[0]
            return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.authorities + more)

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Called for each connection that begins."""
            with lock:
                now = (self.credentials.refresh(), self.more_authorities())
                if now == served[0]:
                    return None
                served[0] = now
                return configuration()

        return grpc.dynamic_ssl_server_credentials(
            configuration(),
            changed,  # type: ignore[arg-type]  # None, if nothing has changed, is missing in grpc-stubs
            require_client_authentication=True,
        )


def open_channel(
    address: str, name: str, credentials: Credentials | None, options: tuple[tuple[str, int], ...]
) -> grpc.Channel:
    """`name`: begins with the peer's role."""
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    role = name.partition(" ")[0]
    assert role in SERVING_ROLES, name
    pem = credentials.pem
    shown = grpc.ssl_channel_credentials(pem.authorities, pem.key, pem.certificate)
    return grpc.secure_channel(address, shown, options=(*options, ("grpc.ssl_target_name_override", host_of(role))))


def explain_failure(
    said: str, peer: str, *, own: Pem | None, address: str, unavailable: type[errors.Unavailable]
) -> errors.NotTrusted | errors.Unavailable | None:
    """The error if a connection failed because of certificates; None: for another reason. `said`: gRPC's text. `own`:
    what this process shows and trusts; None: it uses no TLS.

    An address of the coordinator comes from a person. If the process there is not of the yard, the address is wrong,
    and trying again does not help. The addresses of other members come from the coordinator. If the process there is
    not of the yard, the member has ended and its port was given to another process. This is `unavailable`: the member
    may come back at another address.
    """
    is_coordinator = peer.startswith(Role.COORDINATOR.value)
    was_closed = "Socket closed" in said or "reset" in said
    # a peer that does not trust the caller's certificate closes the connection without a reason
    found = None if own is None else _wrong_times(said, peer, own, was_closed=was_closed)
    # only the coordinator changes last, so a later certificate of another member says nothing
    is_refused = ("SSL_ERROR_SSL" in said and _PLAIN not in said) or (was_closed and is_coordinator)
    if found is None and own is not None and is_refused and _was_rotated(own, address):
        found = errors.NotTrusted(
            f"{peer}: its certificate is of another authority of this yard than that of this process",
            why="the yard's authority was rotated while this process was away, or something stands in for the peer",
            todo="run `shardyard invite` on a machine of the yard, and on this machine the line that it prints",
        )
    if found is not None:
        return found
    foreign = _foreign(said, peer, own, address, was_closed=was_closed)
    if foreign is None or is_coordinator:
        return foreign
    return unavailable(f"{foreign.what}; another process has its port now")


def _wrong_times(said: str, peer: str, own: Pem, *, was_closed: bool) -> errors.NotTrusted | None:
    if "certificate has expired" in said or "not yet valid" in said:
        return errors.NotTrusted(
            f"{peer}: its certificate is valid at another time than now",
            todo="compare the clocks of both machines; a member renews its certificate while it can reach the "
            "coordinator, and `shardyard up` or `shardyard coordinator` makes those of its machine anew",
        )
    if was_closed and not _is_valid_now(own):
        return errors.NotTrusted(
            f"{peer} closes the connection, and the certificate of this process is valid at another time than now",
            todo="compare the clocks of both machines; if this process was away for long, run `shardyard invite` on a "
            "machine of the yard, and on this machine the line that it prints",
        )
    return None


def _foreign(said: str, peer: str, own: Pem | None, address: str, *, was_closed: bool) -> errors.NotTrusted | None:
    """The error if the process at the address is not the peer."""
    if own is None:
        if was_closed and _shown_at(address):
            return errors.NotTrusted(
                f"{peer} wants a certificate, and security.tls is false here",
                todo="remove security.tls from the settings of this process",
            )
        return None
    if "Hostname Verification" in said:
        return errors.NotTrusted(
            f"{peer}: the certificate there is for another role",
            todo="check the address: another member of the yard listens there",
        )
    if _PLAIN in said:
        return errors.NotTrusted(f"{peer} does not use TLS", todo="set security.tls to the same value everywhere")
    if "SSL_ERROR_SSL" in said:
        return errors.NotTrusted(
            f"{peer}: its certificate is of another yard than the certificate of this process",
            todo="this process takes its certificate from security.identity, or from the yard's state folder: use that "
            "of the yard at this address",
        )
    return None


def _is_valid_now(own: Pem) -> bool:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(own.certificate)
    now = datetime.datetime.now(datetime.UTC)
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc


def _was_rotated(own: Pem, address: str) -> bool:
    """Whether the process at an address shows a certificate of the same yard, and of a later authority than the one
    that has signed this process's own, which is the first that it trusts."""
    from cryptography import x509

    from shardyard.security.authority import is_signed_by

    shown = _shown_at(address)
    if not shown:
        return False
    certificate, trusted = x509.load_der_x509_certificate(shown), x509.load_pem_x509_certificates(own.authorities)
    begun = trusted[0].not_valid_before_utc
    return certificate.issuer == trusted[0].subject and not any(
        is_signed_by(certificate, each) for each in trusted if each.not_valid_before_utc <= begun
    )


def _shown_at(address: str) -> bytes:
    """The certificate (DER) that a process shows, which nothing has verified; empty if it does not use TLS."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_S) as plain:
            with context.wrap_socket(plain) as wrapped:
                return wrapped.getpeercert(binary_form=True) or b""
    except (OSError, ValueError):
        return b""
