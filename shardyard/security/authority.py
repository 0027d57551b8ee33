"""The yard's authority: a key that signs the certificates of its members.

Owns: the files ca.key and ca.crt, those of a rotation, and the list of certificates. Invariants: the keys stay in the
coordinator's folder, readable by its user only; a certificate says whom it is for as a URI
(shardyard.security.identity), which the authority decides and not the process that asks for it. Must not know: who may
ask, which members there are.

A key with its own certificate is a root. A rotation replaces the root while jobs train, in two phases:

    phase    members trust   certificates are signed by   the coordinator shows one of
             old             old                          old
    SPREAD   old, next       old                          old
    SIGN     next, old       next                         old
             next            next                         next

Two phases are needed since both sides of a connection verify each other, and members do not change at one moment. In
each row a member meets others that are still in the row before. A member of SIGN shows a certificate of the next root
to a member of SPREAD, which trusts both; so SIGN begins when all members trust both. A member of the last row trusts
the next root alone, and meets a member of SIGN, whose certificate is of that root; so SIGN ends when all members have
such a certificate. With one phase, a member that has changed and one that has not would refuse each other. The
coordinator changes its own certificate last: what joins, or comes back, during the rotation trusts the old root alone,
and asks the coordinator first.

The first root in a member's ca.crt has signed its certificate, so the contents of ca.crt say in which row a member is.

    authority/{ca.key, ca.crt}       the root; the old one during a rotation
    authority/{next.key, next.crt}   the next root
    authority/rotation.json          the phase
    authority/former/SERIAL.crt      certificates of retired roots; their keys are deleted

A phase begins when rotation.json is replaced. Until then, the files of the next root have no meaning; a coordinator
that is killed goes on with the phase that the file says. The other files are synced before it is replaced.

ECDSA with P-256 and SHA-256; certificates of X.509 (RFC 5280), requests of PKCS #10 (RFC 2986).
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import json
import os
import secrets
import threading
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

from shardyard.domain.errors import ConfigurationError, InvalidRequest, MalformedPayload
from shardyard.runtime.durable import sync_folder
from shardyard.security.credentials import Pem, digest_of, make_private, replace_file
from shardyard.security.identity import Identity, Role
from shardyard.security.signatures import YardKeys, sign

KEY: Final = "ca.key"
CERTIFICATE: Final = "ca.crt"
NEXT_KEY: Final = "next.key"
NEXT_CERTIFICATE: Final = "next.crt"
ROTATION: Final = "rotation.json"
FORMER: Final = "former"
ISSUED: Final = "issued.jsonl"
"""The list of certificates: a line for each."""
ISSUED_BYTES_MAX: Final = 4 << 20
LIFETIME_S: Final = 10 * 365 * 86_400
CLOCKS_APART_S: Final = 300
"""Certificates are valid from so long ago, since the clocks of two machines differ."""
REQUEST_BYTES_MAX: Final = 16_384


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """`holder`: role, owner and name, parted by slashes. Times in seconds since 1970. `root`: as Root.id."""

    holder: str
    serial: str
    issued_s: int
    until_s: int
    root: str


class Phase(enum.Enum):
    """Of a rotation, as above. RETIRE is in the file only, while the files of the next root take their places."""

    SPREAD = "spread"
    SIGN = "sign"
    RETIRE = "retire"


@dataclass(frozen=True, slots=True)
class Rotation:
    """`since_s`: when the phase began, in seconds since 1970. `overlap_s`: how long SIGN lasts at least."""

    phase: Phase
    since_s: float
    overlap_s: float


@dataclass(frozen=True, slots=True)
class Root:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def id(self) -> str:
        return f"{self.certificate.serial_number:x}"

    def has_issued(self, certificate: x509.Certificate) -> bool:
        return is_signed_by(certificate, self.certificate)


@dataclass(frozen=True)
class Roots:
    """`former`: certificates of retired roots."""

    current: Root
    next: Root | None
    former: tuple[x509.Certificate, ...]
    rotation: Rotation | None

    @property
    def trusted(self) -> tuple[Root, ...]:
        """The one that signs is the first."""
        if self.next is None or self.rotation is None:
            return (self.current,)
        is_spread = self.rotation.phase is Phase.SPREAD
        return (self.current, self.next) if is_spread else (self.next, self.current)

    @cached_property
    def authorities(self) -> bytes:
        """The contents of ca.crt."""
        return b"".join(map(_pem, (root.certificate for root in self.trusted)))

    @cached_property
    def digest(self) -> bytes:
        return digest_of(self.authorities)

    def signer_of(self, role: Role) -> Root:
        return self.current if role is Role.COORDINATOR else self.trusted[0]


class Authority:
    """The authority in `folder`, which is made if there is none. Raises ConfigurationError if its files cannot be
    used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        try:
            if not (folder / CERTIFICATE).exists():
                _make_root(folder, KEY, CERTIFICATE, f"yard-{secrets.token_hex(8)}")
            self._roots = _load(folder)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(
                f"the yard's authority in {folder} cannot be used: {error}",
                why="it signs the certificates of the yard's members",
                todo="restore its files; or remove the folder: then all members must join again",
            ) from error

    @cached_property
    def yard(self) -> str:
        """The id of the yard."""
        return common_name(self._roots.current.certificate.subject)

    @property
    def authorities(self) -> bytes:
        """What members are to trust, as PEM; the one that signs is the first."""
        return self._roots.authorities

    @property
    def digest(self) -> bytes:
        """Of `authorities`."""
        return self._roots.digest

    @property
    def public_key(self) -> ec.EllipticCurvePublicKey:
        """Of the root whose certificate the coordinator shows."""
        return self._roots.current.key.public_key()

    @property
    def rotation(self) -> Rotation | None:
        return self._roots.rotation

    def begin_rotation(self, overlap_s: float) -> None:
        """Makes the next root. Raises InvalidRequest if there is one, OSError."""
        with self._lock:
            if self._roots.rotation is not None:
                raise InvalidRequest(
                    f"the authority is being rotated already: phase {self._roots.rotation.phase.value}",
                    why="",
                    todo="see `shardyard identities list`; `shardyard identities rotate --next` ends the phase",
                )
            _make_root(self.folder, NEXT_KEY, NEXT_CERTIFICATE, self.yard)
            self._begin(Phase.SPREAD, overlap_s)

    def end_phase(self) -> None:
        """Begins the next phase, or retires the old root. Raises InvalidRequest if there is no rotation, OSError."""
        with self._lock:
            roots = self._roots
            if roots.rotation is None:
                raise InvalidRequest("the authority is not being rotated", why="", todo="`shardyard identities rotate`")
            if roots.rotation.phase is Phase.SPREAD:
                self._begin(Phase.SIGN, roots.rotation.overlap_s)
            else:
                make_private(self.folder / FORMER)
                kept = self.folder / FORMER / f"{roots.current.id}.crt"
                replace_file(kept, _pem(roots.current.certificate), synced=True)
                self._begin(Phase.RETIRE, roots.rotation.overlap_s)

    def _begin(self, phase: Phase, overlap_s: float) -> None:
        said = {"phase": phase.value, "since_s": time.time(), "overlap_s": overlap_s}
        replace_file(self.folder / ROTATION, json.dumps(said).encode(), synced=True)
        self._roots = _load(self.folder)

    @property
    def keys(self) -> YardKeys:
        """Of all roots that the yard has, or has had: whose signatures count as the yard's."""
        roots = self._roots
        certificates = (*(root.certificate for root in roots.trusted), *roots.former)
        keys = [certificate.public_key() for certificate in certificates]
        return YardKeys(self.yard, tuple(key for key in keys if isinstance(key, ec.EllipticCurvePublicKey)))

    def sign(self, text: bytes) -> bytes:
        """A signature of the yard (shardyard.security.signatures)."""
        return sign(self._roots.trusted[0].key, text)

    def issue(
        self, role: Role, name: str, public_key: ec.EllipticCurvePublicKey, lifetime_s: float, owner: str = ""
    ) -> tuple[bytes, bytes]:
        """A certificate, and what its holder is to trust, as PEM. Raises OSError if it cannot be listed."""
        roots = self._roots
        root = roots.signer_of(role)
        identity = Identity(self.yard, role, name, owner)
        builder = certificate_of(name, self.yard, public_key, lifetime_s, is_authority=False)
        names = [x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.host)]
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signed = (
            builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            # both roots have the yard's name, so TLS finds the one that has signed by its key
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root.key.public_key()), critical=False)
            .sign(root.key, hashes.SHA256())
        )
        self._record(identity, signed, root)
        return _pem(signed), roots.authorities

    def issued(self) -> list[IssuedCertificate]:
        """Those of trusted roots that have not ended, in the order in which they were made."""
        try:
            lines = (self.folder / ISSUED).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        now_s, found, trusted = time.time(), list[IssuedCertificate](), {root.id for root in self._roots.trusted}
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):  # a line that was cut off
                each = IssuedCertificate(**json.loads(line))
                if each.until_s > now_s and each.root in trusted:
                    found.append(each)
        return found

    def _record(self, identity: Identity, signed: x509.Certificate, root: Root) -> None:
        """Adds a line to the list of certificates. Raises OSError: what is not listed is not given out."""
        begun_s = signed.not_valid_before_utc.timestamp() + CLOCKS_APART_S
        until_s = int(signed.not_valid_after_utc.timestamp())
        made = IssuedCertificate(identity.holder, f"{signed.serial_number:x}", int(begun_s), until_s, root.id)
        path = self.folder / ISSUED
        if path.exists() and path.stat().st_size > ISSUED_BYTES_MAX:
            kept = "".join(json.dumps(asdict(each)) + "\n" for each in self.issued())
            replace_file(path, kept.encode())
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "w") as stream:
            stream.write(json.dumps(asdict(made)) + "\n")

    def has_issued(self, certificate: x509.Certificate) -> bool:
        """Whether a root of this yard has signed it, a retired one included: a connection that is older than that stays
        open. New ones with such a certificate are refused by TLS."""
        roots = self._roots
        known = (*(root.certificate for root in roots.trusted), *roots.former)
        return any(is_signed_by(certificate, each) for each in known)

    def would_issue(self, role: Role, certificate: x509.Certificate, authorities: bytes) -> bool:
        """Whether a certificate, and what its holder trusts, are as this authority makes them now."""
        roots = self._roots
        return roots.signer_of(role).has_issued(certificate) and roots.authorities == authorities


def make_credentials(authority: Authority, role: Role, name: str, lifetime_s: float, owner: str = "") -> Pem:
    """A new key with its certificate."""
    key = new_key()
    return Pem(key_to_pem(key), *authority.issue(role, name, key.public_key(), lifetime_s, owner))


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


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def is_signed_by(certificate: x509.Certificate, root: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _make_root(folder: Path, key_name: str, certificate_name: str, yard: str) -> None:
    key = new_key()
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
    named = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    signed = builder.add_extension(usage, critical=True).add_extension(named, critical=False).sign(key, hashes.SHA256())
    make_private(folder)
    replace_file(folder / key_name, key_to_pem(key), synced=True)
    replace_file(folder / certificate_name, _pem(signed), synced=True)


def _load(folder: Path) -> Roots:
    """Raises OSError, ValueError, TypeError, KeyError."""
    rotation = _read_rotation(folder)
    if rotation is not None and rotation.phase is Phase.RETIRE:
        for made, place in ((NEXT_KEY, KEY), (NEXT_CERTIFICATE, CERTIFICATE)):
            with contextlib.suppress(FileNotFoundError):  # it was moved before
                os.replace(folder / made, folder / place)
        sync_folder(folder)
        (folder / ROTATION).unlink(missing_ok=True)
        rotation = None
    following = None if rotation is None else _read_root(folder, NEXT_KEY, NEXT_CERTIFICATE)
    former = (x509.load_pem_x509_certificate(path.read_bytes()) for path in sorted((folder / FORMER).glob("*.crt")))
    return Roots(_read_root(folder, KEY, CERTIFICATE), following, tuple(former), rotation)


def _read_rotation(folder: Path) -> Rotation | None:
    try:
        said = json.loads((folder / ROTATION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Rotation(Phase(said["phase"]), float(said["since_s"]), float(said["overlap_s"]))


def _read_root(folder: Path, key_name: str, certificate_name: str) -> Root:
    key = key_from_pem((folder / key_name).read_bytes())
    certificate = x509.load_pem_x509_certificate((folder / certificate_name).read_bytes())
    if key.public_key() != certificate.public_key():
        raise ValueError(f"{key_name} and {certificate_name} do not belong together")
    return Root(key, certificate)
