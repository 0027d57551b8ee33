"""Files that are encrypted where they lie: a storage in front of another one.

    8 bytes    "SHYDENC1"
    8 bytes    the id of the key: the first bytes of the SHA-256 of "shardyard storage key" and the key
    32 bytes   random; with the key, it gives the key of this file (HKDF with SHA-256)
    then       segments of 65,536 bytes, the last one shorter: AES-256-GCM, each with a tag of 16 bytes

The nonce of a segment is its number (11 bytes) and whether it is the last (1 byte), as in the STREAM construction
(Hoang, Reyhanitabar, Rogaway, Vizar 2015); the header is authenticated with each. So segments that are changed,
reordered, dropped or cut off at the end are found. Each range can be read without the rest.

Owns: the form of these files. Invariants: lengths and digests that callers see are those of the plain text; nothing is
returned that was not authenticated; what is not encrypted is not read. Must not know: what the bytes are.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shardyard.domain.errors import CheckpointDamaged, ConfigurationError
from shardyard.storage.storage import PIECE_BYTES, Buffer, Storage, Tally, Written

MAGIC: Final = b"SHYDENC1"
ID_BYTES: Final = 8
SALT_BYTES: Final = 32
HEADER_BYTES: Final = len(MAGIC) + ID_BYTES + SALT_BYTES
SEGMENT_BYTES: Final = 65_536
TAG_BYTES: Final = 16
KEYS_MAX: Final = 16
_LINE: Final = re.compile(r"[0-9a-fA-F]{64}")
_KEY_FILE_BYTES_MAX: Final = 4_096


class StorageKeys:
    """The keys in a file, one in each line, as 64 hexadecimal digits. Files are encrypted with the first; the others
    are for files from before. Raises ConfigurationError."""

    def __init__(self, path: Path) -> None:
        try:
            with open(path, "rb") as file:
                lines = file.read(_KEY_FILE_BYTES_MAX).decode("ascii", "replace").split()
        except OSError as error:
            raise ConfigurationError(
                f"storage.key_file {path} cannot be read: {error.strerror}",
                todo="name a file that this process can read",
            ) from None
        if not 1 <= len(lines) <= KEYS_MAX or not all(_LINE.fullmatch(line) for line in lines):
            raise ConfigurationError(
                f"storage.key_file {path} is no list of keys",
                why=f"it must have 1 to {KEYS_MAX} lines of 64 hexadecimal digits",
                todo=f"make one: openssl rand -hex 32 > {path}",
            )
        self.path = path
        self._keys = {_id_of(key): key for key in map(bytes.fromhex, lines)}
        self.first = next(iter(self._keys))

    def cipher(self, header: bytes, where: str) -> AESGCM:
        """That of the file with this header. Raises CheckpointDamaged, ConfigurationError for a key that is not
        here."""
        if len(header) != HEADER_BYTES or not header.startswith(MAGIC):
            raise CheckpointDamaged(
                f"{where} is not encrypted",
                why="storage.key_file is set, and then only encrypted files are read",
                todo="read it without storage.key_file",
            )
        begin = len(MAGIC) + ID_BYTES
        key = self._keys.get(header[len(MAGIC) : begin])
        if key is None:
            raise _needs_key(header, where, f"{self.path} has {', '.join(each.hex() for each in self._keys)}")
        kdf = HKDF(hashes.SHA256(), length=32, salt=header[begin:], info=MAGIC)
        return AESGCM(kdf.derive(key))


def keys_in(key_file: str) -> StorageKeys | None:
    """`key_file`: the setting; empty: nothing is encrypted. Raises ConfigurationError."""
    return StorageKeys(Path(key_file)) if key_file else None


def encrypted(storage: Storage, keys: StorageKeys | None) -> Storage:
    return storage if keys is None else EncryptedStorage(storage, keys)


def check_plain(text: bytes, where: str) -> None:
    """Raises ConfigurationError for the bytes of an encrypted file."""
    if text.startswith(MAGIC):
        raise _needs_key(text, where, "storage.key_file is not set")


def plain_size(nbytes: int) -> int:
    """The length of what a file of so many bytes encrypts; 0 for one that is too short."""
    body = nbytes - HEADER_BYTES
    return max(0, body - TAG_BYTES * -(-body // (SEGMENT_BYTES + TAG_BYTES)))


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    header: bytes
    cipher: AESGCM
    nbytes: int
    """Of the plain text."""

    @property
    def last(self) -> int:
        return max(0, self.nbytes - 1) // SEGMENT_BYTES


class EncryptedStorage(Storage):
    """The files of another storage, encrypted. Names and folders are as they are there."""

    def __init__(self, inner: Storage, keys: StorageKeys) -> None:
        super().__init__(inner.url)
        self._inner = inner
        self._keys = keys

    def write(self, path: str, pieces: Iterable[Buffer]) -> Written:
        tally = Tally()
        self._inner.write(path, self._encrypt(path, pieces, tally))
        return tally.written

    def read(self, path: str, begin: int, nbytes: int) -> bytes:
        return self._read(self._open(path), begin, nbytes)

    def read_pieces(self, path: str, begin: int, end: int) -> Iterator[bytes]:
        file = self._open(path)
        for at in range(begin, end, PIECE_BYTES):
            yield self._read(file, at, min(PIECE_BYTES, end - at))

    def size(self, path: str) -> int:
        return plain_size(self._inner.size(path))

    def list_folders(self, path: str) -> tuple[str, ...]:
        return self._inner.list_folders(path)

    def list_files(self, path: str) -> dict[str, int]:
        return {name: plain_size(nbytes) for name, nbytes in self._inner.list_files(path).items()}

    def delete_file(self, path: str) -> None:
        self._inner.delete_file(path)

    def delete_folder(self, path: str) -> None:
        self._inner.delete_folder(path)

    def _encrypt(self, path: str, pieces: Iterable[Buffer], tally: Tally) -> Iterator[Buffer]:
        header = MAGIC + self._keys.first + secrets.token_bytes(SALT_BYTES)
        cipher = self._keys.cipher(header, self.locate(path))
        yield header
        pending, number = bytearray(), 0
        for piece in pieces:
            view = memoryview(piece).cast("B")
            tally.add(view)
            pending += view
            while len(pending) > SEGMENT_BYTES:
                yield cipher.encrypt(_nonce(number, last=False), bytes(pending[:SEGMENT_BYTES]), header)
                del pending[:SEGMENT_BYTES]
                number += 1
        yield cipher.encrypt(_nonce(number, last=True), bytes(pending), header)

    def _open(self, path: str) -> _File:
        nbytes = self._inner.size(path)
        if nbytes < HEADER_BYTES + TAG_BYTES:
            raise CheckpointDamaged(f"{self.locate(path)} has {nbytes} bytes, fewer than any encrypted file")
        header = self._inner.read(path, 0, HEADER_BYTES)
        return _File(path, header, self._keys.cipher(header, self.locate(path)), plain_size(nbytes))

    def _read(self, file: _File, begin: int, nbytes: int) -> bytes:
        if begin + nbytes > file.nbytes:
            raise self._short(file.path, begin, nbytes, max(0, file.nbytes - begin))
        if not nbytes and file.nbytes:
            return b""
        first, last = begin // SEGMENT_BYTES, min(file.last, (begin + nbytes) // SEGMENT_BYTES)
        length = SEGMENT_BYTES + TAG_BYTES
        end = file.nbytes + (file.last + 1) * TAG_BYTES if last == file.last else (last + 1) * length
        body = memoryview(self._inner.read(file.path, HEADER_BYTES + first * length, end - first * length))
        plain = []
        for number in range(first, last + 1):
            at = (number - first) * length
            try:
                nonce = _nonce(number, last=number == file.last)
                plain.append(file.cipher.decrypt(nonce, body[at : at + length], file.header))
            except InvalidTag:
                raise CheckpointDamaged(
                    f"{self.locate(file.path)} has changed in segment {number}, or was cut off"
                ) from None
        skipped = begin - first * SEGMENT_BYTES
        return b"".join(plain)[skipped : skipped + nbytes]


def _nonce(number: int, *, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _id_of(key: bytes) -> bytes:
    return hashlib.sha256(b"shardyard storage key" + key).digest()[:ID_BYTES]


def _needs_key(header: bytes, where: str, got: str) -> ConfigurationError:
    wanted = header[len(MAGIC) : len(MAGIC) + ID_BYTES].hex()
    return ConfigurationError(
        f"{where} is encrypted with the key of id {wanted}; {got}",
        todo="name the file with this key in storage.key_file, or add the key as a line to the file",
    )
