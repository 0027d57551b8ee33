"""What a yard's authority signs beside certificates, and by which keys it is checked.

Owns: the form of a signature. Invariant: a text that is signed here begins with what it is, so that it cannot be taken
for a certificate, nor for a text of another kind. Must not know: what the texts mean.

ECDSA with P-256 and SHA-256, as DER (RFC 3279).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shardyard.security.credentials import Pem
from shardyard.security.identity import SCHEME, Identity

_ALGORITHM: Final = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True, slots=True)
class YardKeys:
    """The public keys of a yard's authority. `yard`: the id of the yard."""

    yard: str
    keys: tuple[ec.EllipticCurvePublicKey, ...]

    def have_signed(self, text: bytes, signature: bytes) -> bool:
        return any(_has_signed(key, text, signature) for key in self.keys)


def sign(key: ec.EllipticCurvePrivateKey, text: bytes) -> bytes:
    return key.sign(text, _ALGORITHM)


def keys_of(pem: Pem) -> YardKeys | None:
    """The keys of the yard to which a member's certificate belongs. None if its authority is not the yard's own, but
    one from elsewhere, with which the coordinator cannot sign."""
    try:
        own = x509.load_pem_x509_certificate(pem.certificate)
        authorities = x509.load_pem_x509_certificates(pem.authorities)
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        yard = next(Identity.parse(uri).yard for uri in uris if uri.startswith(SCHEME))
    except (ValueError, StopIteration, x509.ExtensionNotFound):
        return None
    of_yard = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, yard)])
    keys = [each.public_key() for each in authorities if each.subject == of_yard]
    found = tuple(key for key in keys if isinstance(key, ec.EllipticCurvePublicKey))
    return YardKeys(yard, found) if found else None


def _has_signed(key: ec.EllipticCurvePublicKey, text: bytes, signature: bytes) -> bool:
    try:
        key.verify(signature, text, _ALGORITHM)
    except InvalidSignature:
        return False
    return True
