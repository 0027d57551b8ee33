"""Invitations: how a process of another machine gets its first certificate.

An invitation is a key. The operator's command makes it and tells the coordinator its public half; the private half is
in the line that the command prints. Whoever has the line signs a certificate with it, for the role `invited`, and
connects. The coordinator trusts that key while the invitation is open, and only for `Enrol`. So the coordinator never
has the secret, and there is no method that can be called without a certificate.

The line also has the public key of the yard's authority, in place of its certificate, which the process does not have
yet: TLS needs only the name and the key of an authority that it trusts (RFC 5280, 6.1.1 d).

Owns: the file of open invitations, the form of the line. Invariants: an invitation is used up, or over, for good, also
after a restart.
"""

from __future__ import annotations

import base64
import json
import secrets
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shardyard.domain.errors import ConfigurationError, InvalidRequest, NotTrusted, TooLarge
from shardyard.security.authority import certificate_of, common_name, key_to_pem, new_key
from shardyard.security.credentials import Pem, replace_file
from shardyard.security.identity import Identity, Role, checked_name

FILE: Final = "invitations.json"
OPEN_MAX: Final = 256
LIFETIME_MAX_S: Final = 30 * 86_400
USES_MAX: Final = 10_000
_KEY_BYTES: Final = 32
_POINT_BYTES: Final = 33
_PREFIX: Final = "invitation-"
Point = serialization.PublicFormat.CompressedPoint
X962 = serialization.Encoding.X962


@dataclass(frozen=True, slots=True)
class Invitation:
    """`id`: names it. `key`: its public key, a compressed point, in hexadecimal. `until_s`: since 1970. `name`: of the
    member; empty: each that comes gets one of its own. `owner`: as of Identity."""

    id: str
    role: str
    name: str
    owner: str
    key: str
    until_s: float
    uses_left: int

    @property
    def authority(self) -> str:
        """Its name as an authority."""
        return _PREFIX + self.id

    def certificate(self) -> bytes:
        """The certificate, as PEM, by which TLS trusts the key. Its signature has no meaning."""
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), bytes.fromhex(self.key))
        return _trusted(self.authority, key)


class Invitations:
    """The open invitations of a yard, in a file of its authority's folder. Safe for several threads. Raises
    ConfigurationError if the file cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock = threading.Lock()
        self._open: dict[str, Invitation] = {}
        self._certificates: dict[str, bytes] = {}
        """Of open invitations. A certificate would be another each time that it is made."""
        try:
            for each in json.loads(self._path.read_text(encoding="utf-8")):
                found = Invitation(**each)
                self._open[found.id] = found
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"{self._path} cannot be read: {error}", todo="remove it: then open invitations are no longer valid"
            ) from error

    def add(
        self,
        role: Role,
        name: str,
        key: bytes,
        lifetime_s: float,
        uses: int,
        *,
        owner: str = "",
        replaces: str = "",
    ) -> Invitation:
        """Opens an invitation for the private half of `key`. `replaces`: its id, if it takes the place of the one
        before. Raises InvalidRequest, TooLarge, OSError."""
        if role in (Role.COORDINATOR, Role.INVITED):
            raise InvalidRequest(f"nobody is invited as {role.value}")
        try:
            ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), key)
            for each in filter(None, (name, owner)):
                checked_name(each)
        except ValueError as error:
            raise InvalidRequest(f"an invitation that cannot be: {error}") from error
        if not (0 < lifetime_s <= LIFETIME_MAX_S and 1 <= uses <= USES_MAX):
            raise InvalidRequest(
                f"an invitation for {lifetime_s:g} s and {uses} uses; at most {LIFETIME_MAX_S} s and {USES_MAX} uses "
                "are given"
            )
        until_s = time.time() + lifetime_s
        with self._lock:
            self._forget()
            if len(self._open) >= OPEN_MAX and replaces not in self._open:
                raise TooLarge(f"{OPEN_MAX} invitations are open already", todo="wait until some are over")
            made = Invitation(replaces or secrets.token_hex(4), role.value, name, owner, key.hex(), until_s, uses)
            self._write({**self._open, made.id: made})
        return made

    def find(self, certificate: x509.Certificate) -> Invitation | None:
        """The open invitation whose key has signed a certificate."""
        invitation = self._open.get(common_name(certificate.issuer).removeprefix(_PREFIX))
        if invitation is None or invitation.until_s <= time.time():
            return None
        try:
            certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(invitation.certificate()))
        except Exception:  # noqa: BLE001 - whatever is wrong with it
            return None
        return invitation

    def use(self, id_: str) -> Invitation:
        """Counts one use. Raises NotTrusted if the invitation is used up or over, OSError."""
        with self._lock:
            self._forget()
            found = self._open.get(id_)
            if found is None:
                raise NotTrusted(f"invitation {id_} is used up or over", todo="ask for another: `shardyard invite`")
            left = replace(found, uses_left=found.uses_left - 1)
            rest = {key: each for key, each in self._open.items() if key != id_}
            self._write(rest | ({id_: left} if left.uses_left else {}))
        return found

    def end_all(self) -> None:
        """Raises OSError."""
        with self._lock:
            self._write({})

    def certificates(self) -> bytes:
        """The keys that TLS is to trust, as certificates."""
        now_s = time.time()
        with self._lock:
            wanted = [each for each in self._open.values() if each.until_s > now_s]
            known = self._certificates
            self._certificates = {each.key: known.get(each.key) or each.certificate() for each in wanted}
            return b"".join(self._certificates.values())

    def _forget(self) -> None:
        now_s = time.time()
        self._open = {key: each for key, each in self._open.items() if each.until_s > now_s}

    def _write(self, wanted: dict[str, Invitation]) -> None:
        replace_file(self._path, json.dumps([asdict(each) for each in wanted.values()]).encode())
        self._open = wanted


@dataclass(frozen=True, slots=True)
class JoinLine:
    """What an invited process must know. `address`: the coordinator's; `id`: of the invitation; `key`: its private
    key; `yard`: its id; `authority`: the public key of its authority."""

    address: str
    id: str
    key: ec.EllipticCurvePrivateKey
    yard: str
    authority: ec.EllipticCurvePublicKey

    @property
    def text(self) -> str:
        """The line without the address: four parts, which cannot have a dot."""
        secret = self.key.private_numbers().private_value.to_bytes(_KEY_BYTES, "big")
        return ".".join((self.yard, self.id, _text(secret), _text(self.authority.public_bytes(X962, Point))))

    @classmethod
    def parse(cls, address: str, text: str) -> JoinLine:
        """Raises ConfigurationError."""
        try:
            yard, id_, secret, authority = text.strip().split(".")
            key_bytes, point = _bytes(secret, _KEY_BYTES), _bytes(authority, _POINT_BYTES)
            key = ec.derive_private_key(int.from_bytes(key_bytes, "big"), ec.SECP256R1())
            return cls(address, id_, key, yard, ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point))
        except ValueError as error:
            raise ConfigurationError(
                "this is not an invitation",
                why="",
                todo="give the address and the text just as `shardyard invite` has printed them, on one line",
            ) from error

    def credentials(self) -> Pem:
        """The credentials for the calls by which the process gets its own."""
        own, name = new_key(), _PREFIX + self.id
        identity = Identity(self.yard, Role.INVITED, self.id)
        signed = (
            certificate_of(self.id, name, own.public_key(), 3_600, is_authority=False)
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri)]), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return Pem(
            key_to_pem(own), signed.public_bytes(serialization.Encoding.PEM), _trusted(self.yard, self.authority)
        )


def _trusted(name: str, key: ec.EllipticCurvePublicKey) -> bytes:
    """A certificate, as PEM, that makes TLS trust a key. It is signed with another key, which nobody looks at."""
    builder = certificate_of(name, name, key, LIFETIME_MAX_S, is_authority=True)
    return builder.sign(new_key(), hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _bytes(text: str, length: int) -> bytes:
    """Raises ValueError."""
    found = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if len(found) != length:
        raise ValueError("of the wrong length")
    return found
