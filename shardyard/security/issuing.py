"""Makes the certificates of this machine's processes, in the folder of `shardyard.security.local`.

Owns: which of them are made anew. Invariants: a certificate that has a third of its time left, or less, is replaced,
and one that the authority would not sign like this any more; a key is kept, since processes may use it.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cryptography import x509

from shardyard.security.authority import Authority, key_from_pem, make_credentials
from shardyard.security.credentials import (
    AUTHORITIES,
    CERTIFICATE,
    KEY,
    locked,
    make_private,
    renew_credentials,
    write_credentials,
)
from shardyard.security.identity import Role
from shardyard.security.local import AUTHORITY

MEMBER_LIFETIME_S: Final = 24 * 3_600
PERSON_LIFETIME_S: Final = 30 * 24 * 3_600
RENEW_AT: Final = 2 / 3
"""The share of its lifetime after which a certificate is renewed."""
PEOPLE: Final = (Role.OPERATOR, Role.VIEWER)
OF_A_YARD: Final[Mapping[str, Role]] = {role.value: role for role in Role if role not in (Role.INVITED, Role.VIEWER)}
"""What the machine of a coordinator has: the processes that its user starts there need no invitation."""


def lifetime_of(role: Role) -> int:
    """In seconds."""
    return PERSON_LIFETIME_S if role in PEOPLE else MEMBER_LIFETIME_S


def open_authority(identities: Path) -> Authority:
    """Makes one if there is none. Raises ConfigurationError."""
    return Authority(identities / AUTHORITY)


def issue_local(authority: Authority, identities: Path, wanted: Mapping[str, Role] = OF_A_YARD) -> None:
    """Makes the credentials of these names, unless there are such that last. Raises OSError."""
    for name, role in wanted.items():
        folder = identities / name
        if not lasts(authority, folder, role):
            make_private(folder)
            with contextlib.suppress(BlockingIOError), locked(folder, waits=False):  # else its process renews it
                _issue(authority, folder, role, name)


def _issue(authority: Authority, folder: Path, role: Role, name: str) -> None:
    try:
        key = key_from_pem((folder / KEY).read_bytes()).public_key()
    except (OSError, ValueError):
        write_credentials(folder, make_credentials(authority, role, name, lifetime_of(role)))
    else:
        renew_credentials(folder, *authority.issue(role, name, key, lifetime_of(role)))


def lasts(authority: Authority, folder: Path, role: Role) -> bool:
    """Whether the certificate in a folder is as this authority makes it now, and need not be renewed yet."""
    try:
        certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
        authorities = (folder / AUTHORITIES).read_bytes()
    except (OSError, ValueError):
        return False
    return authority.would_issue(role, certificate, authorities) and not is_due(certificate)


def is_due(certificate: x509.Certificate) -> bool:
    """Whether it is time to renew a certificate."""
    begun, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return datetime.datetime.now(datetime.UTC) >= begun + RENEW_AT * (end - begun)
