"""The yard's authority: a key that signs the certificates of its members.

Owns: the files ca.key and ca.crt, and the list of certificates. Invariants: the key stays in the coordinator's folder,
readable by its user only; a certificate says whom it is for as a URI (shardyard.security.identity), which the authority
decides and not the process that asks for it. Must not know: who may ask.

ECDSA with P-256 and SHA-256; certificates of X.509 (RFC 5280), requests of PKCS #10 (RFC 2986).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shardyard.domain.errors import ConfigurationError, MalformedPayload
from shardyard.security.credentials import Pem, make_private, replace_file
from shardyard.security.identity import Identity, Role
from shardyard.security.signatures import YardKeys, sign

KEY: Final = "ca.key"
CERTIFICATE: Final = "ca.crt"
ISSUED: Final = "issued.jsonl"
"""The list of certificates: a line for each."""
ISSUED_BYTES_MAX: Final = 4 << 20
LIFETIME_S: Final = 10 * 365 * 86_400
CLOCKS_APART_S: Final = 300
"""Certificates are valid from so long ago, since the clocks of two machines differ."""
REQUEST_BYTES_MAX: Final = 16_384


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """`holder`: role, owner and name, parted by slashes. Times in seconds since 1970."""

    holder: str
    serial: str
    issued_s: int
    until_s: int


class Authority:
    """The authority in `folder`, which is made if there is none. Raises ConfigurationError if its files cannot be
    used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            if not (folder / CERTIFICATE).exists():
                _make(folder)
            key = serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
            self._certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"the yard's authority in {folder} cannot be used: {error}",
                why="it signs the certificates of the yard's members",
                todo=f"restore {KEY} and {CERTIFICATE}; or remove the folder: then all members must join again",
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != self._certificate.public_key():
            raise ConfigurationError(f"{KEY} and {CERTIFICATE} in {folder} do not belong together", todo="restore them")
        self._key = key

    @cached_property
    def yard(self) -> str:
        """The id of the yard."""
        return common_name(self._certificate.subject)

    @cached_property
    def certificate(self) -> bytes:
        """Of the authority itself, as PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def public_key(self) -> ec.EllipticCurvePublicKey:
        return self._key.public_key()

    @property
    def keys(self) -> YardKeys:
        """Whose signatures count as the yard's."""
        return YardKeys(self.yard, (self.public_key,))

    def sign(self, text: bytes) -> bytes:
        """A signature of the yard (shardyard.security.signatures)."""
        return sign(self._key, text)

    def issue(
        self, role: Role, name: str, public_key: ec.EllipticCurvePublicKey, lifetime_s: float, owner: str = ""
    ) -> bytes:
        """A certificate, as PEM. Raises OSError if it cannot be listed."""
        identity = Identity(self.yard, role, name, owner)
        builder = certificate_of(name, self.yard, public_key, lifetime_s, is_authority=False)
        names = [x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.host)]
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signed = (
            builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self._record(identity, signed)
        return signed.public_bytes(serialization.Encoding.PEM)

    def issued(self) -> list[IssuedCertificate]:
        """Those that have not ended, in the order in which they were made."""
        try:
            lines = (self.folder / ISSUED).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        now_s, found = time.time(), []
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):  # a line that was cut off
                each = IssuedCertificate(**json.loads(line))
                if each.until_s > now_s:
                    found.append(each)
        return found

    def _record(self, identity: Identity, signed: x509.Certificate) -> None:
        """Adds a line to the list of certificates. Raises OSError: what is not listed is not given out."""
        begun_s = signed.not_valid_before_utc.timestamp() + CLOCKS_APART_S
        made = IssuedCertificate(
            identity.holder, f"{signed.serial_number:x}", int(begun_s), int(signed.not_valid_after_utc.timestamp())
        )
        path = self.folder / ISSUED
        if path.exists() and path.stat().st_size > ISSUED_BYTES_MAX:
            kept = "".join(json.dumps(asdict(each)) + "\n" for each in self.issued())
            replace_file(path, kept.encode())
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "w") as stream:
            stream.write(json.dumps(asdict(made)) + "\n")

    def has_issued(self, certificate: x509.Certificate) -> bool:
        try:
            certificate.verify_directly_issued_by(self._certificate)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True


def make_credentials(authority: Authority, role: Role, name: str, lifetime_s: float, owner: str = "") -> Pem:
    """A new key with its certificate."""
    key = new_key()
    certificate = authority.issue(role, name, key.public_key(), lifetime_s, owner)
    return Pem(key_to_pem(key), certificate, authority.certificate)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def key_from_pem(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Raises ValueError."""
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not a key of an elliptic curve")
    return key


def make_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A request for a certificate, as DER. The authority decides whom it is for."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def requested_key(request: bytes) -> ec.EllipticCurvePublicKey:
    """The public key of a request, whose sender has the private key. Raises MalformedPayload."""
    try:
        if len(request) > REQUEST_BYTES_MAX:
            raise ValueError(f"it has {len(request)} bytes; at most {REQUEST_BYTES_MAX} are taken")
        parsed = x509.load_der_x509_csr(request)
        key = parsed.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ValueError("its key is not of the curve P-256")
        if not parsed.is_signature_valid:
            raise ValueError("its signature is wrong")
    except ValueError as error:
        raise MalformedPayload(f"not a request for a certificate: {error}") from error
    return key


def common_name(name: x509.Name) -> str:
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def certificate_of(
    subject: str, issuer: str, public_key: ec.EllipticCurvePublicKey, lifetime_s: float, *, is_authority: bool
) -> x509.CertificateBuilder:
    """What all certificates have in common; it is to be signed."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(seconds=CLOCKS_APART_S))
        .not_valid_after(now + datetime.timedelta(seconds=lifetime_s))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _make(folder: Path) -> None:
    yard, key = f"yard-{secrets.token_hex(8)}", new_key()
    builder = certificate_of(yard, yard, key.public_key(), LIFETIME_S, is_authority=True)
    usage = x509.KeyUsage(
        key_cert_sign=True,
        **dict.fromkeys(
            (
                *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
                *("key_agreement", "crl_sign", "encipher_only", "decipher_only"),
            ),
            False,
        ),
    )
    signed = builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())
    make_private(folder)
    replace_file(folder / KEY, key_to_pem(key))
    replace_file(folder / CERTIFICATE, signed.public_bytes(serialization.Encoding.PEM))
