"""Passes: the coordinator's signed word that a process works for a job, which servers check by themselves.

A certificate says the role of a process. Which job it works for, and under which incarnation, the coordinator decides
when the process joins; it signs that, and the process shows it with each call and stream to a server. The server checks
the signature with a key that it got at its registration, and then that each request speaks for that job and incarnation
only.

Invariants: a pass is of use only to the member whose certificate has the role and name in it, so one that was seen on
the way is worth nothing. It says nothing of whether the member lives: fences do.

Ed25519 (RFC 8032) over a fixed layout:

    1 byte 0x01 | job u64 | incarnation u64 | until (s since 1970) u64 | role/name, UTF-8 | 64 bytes signature

Most processes only carry passes, so cryptography is imported where it is used.
"""

from __future__ import annotations

import contextvars
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardyard.domain.errors import ConfigurationError, NotPermitted
from shardyard.domain.ids import Incarnation, JobId
from shardyard.security.credentials import make_private, replace_file
from shardyard.security.identity import NAME_CHARACTERS_MAX, Identity, Role

FILE: Final = "pass.key"
LIFETIME_S: Final = 24 * 3_600
_HEAD: Final = struct.Struct("<BQQQ")
_FORM: Final = 1
_SIGNATURE_BYTES: Final = 64
_DOMAIN: Final = b"shardyard job pass\0"
PASS_BYTES_MAX: Final = _HEAD.size + 32 + 2 * NAME_CHARACTERS_MAX + _SIGNATURE_BYTES
_KNOWN_MAX: Final = 4_096


@dataclass(frozen=True, slots=True)
class JobPass:
    """`incarnation`: 0 for a reader, which has none. `holder`: role, owner and name. `until_s`: since 1970."""

    job: JobId
    incarnation: Incarnation
    holder: str
    until_s: int

    def encode(self) -> bytes:
        return _HEAD.pack(_FORM, self.job, self.incarnation, self.until_s) + self.holder.encode()

    @classmethod
    def decode(cls, content: bytes) -> JobPass:
        """Raises ValueError."""
        if not _HEAD.size < len(content) <= PASS_BYTES_MAX:
            raise ValueError(f"{len(content)} bytes")
        form, job, incarnation, until_s = _HEAD.unpack_from(content)
        if form != _FORM:
            raise ValueError(f"form {form}")
        return cls(JobId(job), Incarnation(incarnation), content[_HEAD.size :].decode(), until_s)


class PassSigner:
    """The coordinator's key, in `folder`; it is made if there is none. Raises ConfigurationError."""

    def __init__(self, folder: Path) -> None:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        path = folder / FILE
        try:
            if not path.exists():
                make_private(folder)
                made = Ed25519PrivateKey.generate().private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                )
                replace_file(path, made)
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} cannot be used: {error}", todo="remove it; a new one is made") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigurationError(f"{path} has a key of another kind", todo="remove it; a new one is made")
        self._key = key

    @property
    def public_key(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    def sign(self, job: JobId, incarnation: Incarnation, holder: Identity) -> bytes:
        until_s = int(time.time()) + LIFETIME_S
        content = JobPass(job, incarnation, holder_of(holder), until_s).encode()
        return content + self._key.sign(_DOMAIN + content)


class PassVerifier:
    """Checks passes with the coordinator's public key. Remembers those that were good. Safe for several threads. Raises
    ValueError for what is no key."""

    def __init__(self, public_key: bytes) -> None:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        self._refused = (ValueError, InvalidSignature)
        self._key = Ed25519PublicKey.from_public_bytes(public_key)
        self._lock = threading.Lock()
        self._known: dict[bytes, JobPass] = {}

    def verify(self, shown: bytes, caller: Identity) -> JobPass:
        """Raises NotPermitted if the pass is not the caller's, was not signed by the coordinator, or is over."""
        found = self._known.get(shown) or self._verify_anew(shown)
        if found.holder != holder_of(caller):
            raise NotPermitted(f"{caller} shows a pass of {found.holder}")
        if found.until_s <= time.time():
            raise NotPermitted(f"the pass of {caller} for job {found.job} is over")
        return found

    def _verify_anew(self, shown: bytes) -> JobPass:
        content = shown[:-_SIGNATURE_BYTES]
        try:
            found = JobPass.decode(content)
            self._key.verify(shown[-_SIGNATURE_BYTES:], _DOMAIN + content)
        except self._refused as error:
            raise NotPermitted("a pass that this yard's coordinator has not signed") from error
        with self._lock:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[shown] = found
        return found


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who calls a server. `job_pass`: None if the caller has shown none."""

    identity: Identity
    job_pass: JobPass | None

    def check(self, job: JobId, incarnation: Incarnation) -> None:
        """Raises NotPermitted unless the caller may speak for a job, and under this incarnation (0: of none)."""
        if self.identity.role is Role.COORDINATOR:
            return
        held = self.job_pass
        if held is None or held.job != job or incarnation not in (held.incarnation, 0):
            own = "no pass" if held is None else f"a pass for job {held.job} as member {held.incarnation}"
            raise NotPermitted(
                f"{self.identity} asks for job {job} as member {incarnation}, and has {own}",
                why="a process speaks for its own job and its own membership",
                todo="join the job; workers and readers do so by themselves",
            )


speaker: contextvars.ContextVar[Speaker | None] = contextvars.ContextVar("shardyard_speaker", default=None)
"""Who has made the call that is served. None: the network has no certificates."""


def end_of(shown: bytes) -> int:
    """When a pass ends, in seconds since 1970; 0 for none. Raises ValueError."""
    return JobPass.decode(shown[:-_SIGNATURE_BYTES]).until_s if shown else 0


def holder_of(identity: Identity) -> str:
    return identity.holder
