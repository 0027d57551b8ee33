"""A member's own certificate, with its key and the authorities that it trusts, in a folder.

Owns: the files tls.key, tls.crt and ca.crt, named as in a Kubernetes Secret, so that a mounted one can be used as it
is. Invariants: the key is readable by its user only; a file is replaced whole; one process at a time renews a folder. A
renewal keeps the key, so that a process which reads the folder meanwhile gets a key and a certificate that belong
together. It replaces tls.crt and then ca.crt, so a folder whose ca.crt is as it should be has the certificate too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardyard.domain.errors import NotTrusted
from shardyard.runtime.durable import sync_folder

KEY: Final = "tls.key"
CERTIFICATE: Final = "tls.crt"
AUTHORITIES: Final = "ca.crt"
_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Pem:
    """The contents of the three files."""

    key: bytes
    certificate: bytes
    authorities: bytes


class Credentials:
    """The credentials in `folder`. Safe for several threads. Raises NotTrusted if they cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._pem = self._read()

    @property
    def pem(self) -> Pem:
        """As last read; the same object until they have changed."""
        return self._pem

    @property
    def trusts(self) -> bytes:
        """The digest of the authorities in `pem`."""
        return digest_of(self._pem.authorities)

    def refresh(self) -> Pem:
        """Reads the files again if they have changed. Keeps what was read last if they cannot be read now."""
        with self._lock:
            with contextlib.suppress(NotTrusted):
                seen = self._stamp()
                if seen != self._seen:
                    self._pem, self._seen = self._read(), seen
            return self._pem

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = [os.stat(self.folder / name) for name in (CERTIFICATE, AUTHORITIES)]
        except OSError as error:
            raise self._unread(error) from None
        return tuple(number for each in found for number in (each.st_mtime_ns, each.st_ino))

    def _read(self) -> Pem:
        try:
            return Pem(*((self.folder / name).read_bytes() for name in (KEY, CERTIFICATE, AUTHORITIES)))
        except OSError as error:
            raise self._unread(error) from None

    def _unread(self, error: OSError) -> NotTrusted:
        return NotTrusted(
            f"there is no certificate in {self.folder} ({error.strerror}: {Path(str(error.filename)).name})",
            todo=f"the folder must have {KEY}, {CERTIFICATE} and {AUTHORITIES}; `shardyard join` makes it",
        )


def write_credentials(folder: Path, pem: Pem) -> None:
    """Writes the three files; the certificate last. Raises OSError."""
    make_private(folder)
    replace_file(folder / AUTHORITIES, pem.authorities)
    replace_file(folder / KEY, pem.key)
    replace_file(folder / CERTIFICATE, pem.certificate)


def renew_credentials(folder: Path, certificate: bytes, authorities: bytes) -> None:
    """Raises OSError."""
    replace_file(folder / CERTIFICATE, certificate)
    replace_file(folder / AUTHORITIES, authorities)


@contextlib.contextmanager
def locked(folder: Path, *, waits: bool = True) -> Iterator[None]:
    """While a process renews a folder. Raises BlockingIOError if another one does, unless this one `waits`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if waits:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def digest_of(authorities: bytes) -> bytes:
    """SHA-256. By it, the coordinator and a member compare what the member is to trust with what it trusts."""
    return hashlib.sha256(authorities).digest()


def make_private(folder: Path) -> None:
    """Makes a folder that its user only can read, with those above it that are missing. Raises OSError."""
    if not folder.parent.is_dir():
        make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def replace_file(path: Path, content: bytes, *, synced: bool = False) -> None:
    """Writes a file whole, for its user only. `synced`: it is on the disk when this returns. Raises OSError."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as stream:
            stream.write(content)
            if synced:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if synced:
        sync_folder(path.parent)
