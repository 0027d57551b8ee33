"""Files below a URL: a folder of this machine, or a store that fsspec knows (`s3://bucket/path`, `gs://`, `memory://`).

Invariants:
- A reader never sees half a file. On this machine, `write` writes to a temporary name, calls fsync, renames, and calls
  fsync for the folder and for each folder that it made. In an object store, a put is whole by itself.
- A file survives a crash once `write` has returned. A write that failed leaves nothing behind.
- Every error is a ShardyardError that names the file.
- Paths are relative, with "/" between their parts, and cannot lead out of the URL.

Must not know: what the bytes are.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from shardyard.domain.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigurationError,
    InvalidRequest,
    StorageUnavailable,
)
from shardyard.runtime.failpoints import failpoint

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes, to be written."""

PIECE_BYTES: Final = 4 * 1024 * 1024
"""How much is read at a time from a file that need not be in memory as a whole."""
TEMPORARY_SUFFIX: Final = ".tmp"

_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LOCAL_SCHEMES: Final = ("file", "local")
SCHEMES: Final = frozenset(
    (*LOCAL_SCHEMES, "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "hdfs", "webhdfs", "sftp")
)
"""The kinds of stores that may be opened. fsspec knows others that run code or reach into other files and hosts
(`reference`, `simplecache`, `zip`, `http`), and chains of them with "::"."""


@dataclass(frozen=True, slots=True)
class Written:
    """Length and digest of a file. `sha256`: 64 hexadecimal digits."""

    nbytes: int
    sha256: str


class Storage(ABC):
    """Files below one URL. Several threads and processes may write different files at a time."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") or url

    def locate(self, path: str) -> str:
        """The full name of a file, for messages."""
        return f"{self.url}/{path}" if path else self.url

    @abstractmethod
    def write(self, path: str, pieces: Iterable[Buffer]) -> Written:
        """Writes a file, whole or not at all, and replaces one of the same name. Raises StorageUnavailable, and what
        `pieces` raises."""

    @abstractmethod
    def read(self, path: str, begin: int, nbytes: int) -> bytes:
        """Returns exactly these bytes. Raises CheckpointNotFound, CheckpointDamaged if the file ends before them,
        StorageUnavailable. The caller has checked that it may ask for so many bytes."""

    @abstractmethod
    def size(self, path: str) -> int:
        """The length of a file in bytes. Raises CheckpointNotFound, StorageUnavailable."""

    @abstractmethod
    def list_folders(self, path: str) -> tuple[str, ...]:
        """Names of the folders in a folder, sorted; none if it does not exist. Raises StorageUnavailable."""

    @abstractmethod
    def list_files(self, path: str) -> dict[str, int]:
        """Names and sizes of the files in a folder, sorted; none if it does not exist. Raises StorageUnavailable."""

    @abstractmethod
    def delete_file(self, path: str) -> None:
        """Deletes a file, if there is one. Raises StorageUnavailable."""

    @abstractmethod
    def delete_folder(self, path: str) -> None:
        """Deletes a folder with all that is in it, if there is one. Raises StorageUnavailable."""

    def exists(self, path: str) -> bool:
        """Whether there is such a file. Raises StorageUnavailable."""
        try:
            self.size(path)
        except CheckpointNotFound:
            return False
        return True

    def read_whole(self, path: str, nbytes_max: int) -> bytes:
        """Reads a whole file. Raises what `read` raises, and CheckpointDamaged for more than `nbytes_max` bytes."""
        nbytes = self.size(path)
        if nbytes > nbytes_max:
            raise CheckpointDamaged(f"{self.locate(path)} has {nbytes} bytes; expected at most {nbytes_max}")
        return self.read(path, 0, nbytes)

    def read_pieces(self, path: str, begin: int, end: int) -> Iterator[bytes]:
        """Bytes [begin, end), at most PIECE_BYTES at a time."""
        for at in range(begin, end, PIECE_BYTES):
            yield self.read(path, at, min(PIECE_BYTES, end - at))

    def _short(self, path: str, begin: int, nbytes: int, got: int) -> CheckpointDamaged:
        return CheckpointDamaged(
            f"{self.locate(path)} ends at byte {begin + got}; expected {nbytes} bytes from byte {begin} on"
        )

    def _missing(self, path: str) -> CheckpointNotFound:
        return CheckpointNotFound(f"{self.locate(path)} is not there")


def check_url(url: str) -> None:
    """Raises ConfigurationError unless it is a path, or a URL of one of SCHEMES."""
    if not url:
        raise ConfigurationError(
            "the URL for checkpoints is empty", todo="give a folder, or a URL such as s3://bucket/path"
        )
    if not unquote(url).isprintable():
        raise ConfigurationError(f"{url[:200]!r} is not a URL for checkpoints: it has characters that cannot be shown")
    scheme, found, _ = url.partition("://")
    if "::" in url or (found and scheme not in SCHEMES):
        raise ConfigurationError(
            f"{url[:200]!r} is not a URL for checkpoints",
            why="some of the kinds of URL that fsspec knows run code, or reach into other files and hosts",
            todo=f"give a folder, or a URL of {', '.join(sorted(SCHEMES))}",
        )


def open_storage(url: str) -> Storage:
    """Opens a path of this machine, file://PATH, or a URL of one of SCHEMES. Nothing is created or read yet.

    Raises ConfigurationError for a URL that cannot be opened here.
    """
    check_url(url)
    if "://" not in url:
        return LocalStorage(Path(url))
    split = urlsplit(url)
    if split.scheme not in LOCAL_SCHEMES:
        return RemoteStorage(url)
    if split.netloc not in ("", "localhost"):
        raise ConfigurationError(
            f"{url!r} names the host {split.netloc!r}",
            why="a file: URL is a path of this machine",
            todo="write file:///PATH",
        )
    return LocalStorage(Path(unquote(split.path)))


def check_path(path: str) -> str:
    """Raises InvalidRequest unless each part is letters, digits, ".", "_" or "-" and begins with a letter or digit."""
    if path and not all(_PART.fullmatch(part) for part in path.split("/")):
        raise InvalidRequest(f"{path[:200]!r} is no path inside a folder of checkpoints")
    return path


class Tally:
    """Counts bytes, and computes their digest, piece by piece."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._nbytes = 0

    def add(self, piece: Buffer) -> None:
        self._digest.update(piece)
        self._nbytes += memoryview(piece).nbytes

    @property
    def written(self) -> Written:
        return Written(self._nbytes, self._digest.hexdigest())


def _unavailable(where: object, doing: str, error: Exception) -> StorageUnavailable:
    said = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return StorageUnavailable(f"cannot {doing} {where}: {said}")


class LocalStorage(Storage):
    """A folder of this machine, also of a mounted file system."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self._root = root

    def write(self, path: str, pieces: Iterable[Buffer]) -> Written:
        return write_file(self._at(path), pieces)

    def read(self, path: str, begin: int, nbytes: int) -> bytes:
        with self._reading(path), open(self._at(path), "rb", buffering=0) as file:
            parts = []
            missing = nbytes
            while missing and (part := os.pread(file.fileno(), missing, begin + nbytes - missing)):
                parts.append(part)
                missing -= len(part)
        if missing:
            raise self._short(path, begin, nbytes, nbytes - missing)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def size(self, path: str) -> int:
        with self._reading(path):
            found = self._at(path).stat()
        if not stat.S_ISREG(found.st_mode):
            raise self._missing(path)
        return found.st_size

    def list_folders(self, path: str) -> tuple[str, ...]:
        return tuple(sorted(entry.name for entry in self._entries(path) if entry.is_dir(follow_symlinks=False)))

    def list_files(self, path: str) -> dict[str, int]:
        found = {}
        for entry in self._entries(path):
            # another process may delete a file meanwhile
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return dict(sorted(found.items()))

    def delete_file(self, path: str) -> None:
        self._delete(path, lambda target: target.unlink(missing_ok=True))

    def delete_folder(self, path: str) -> None:
        assert path, "this would delete all checkpoints of the URL"
        self._delete(path, lambda target: shutil.rmtree(target) if target.exists() else None)

    def _delete(self, path: str, delete: Callable[[Path], object]) -> None:
        target = self._at(path, temporary=True)
        try:
            failpoint("storage.before_delete")
            delete(target)
            failpoint("storage.after_delete")
            if target.parent.exists():
                _sync_folder(target.parent)
        except OSError as error:
            raise _unavailable(self.locate(path), "delete", error) from error

    def _at(self, path: str, *, temporary: bool = False) -> Path:
        if temporary and path.endswith(TEMPORARY_SUFFIX):
            folder, parted, name = path.rpartition("/")
            check_path(folder + parted + name.removeprefix("."))
        else:
            check_path(path)
        return self._root / path

    def _entries(self, path: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._at(path)) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unavailable(self.locate(path), "list", error) from error

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._missing(path) from error
        except OSError as error:
            raise _unavailable(self.locate(path), "read", error) from error


def write_file(target: Path, pieces: Iterable[Buffer]) -> Written:
    """Writes a file of this machine, whole or not at all, and makes its folders. When this returns, the file survives a
    crash. Raises StorageUnavailable, and what `pieces` raises."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        _make_folder(target.parent)
        try:
            written = _write_through(temporary, pieces)
            failpoint("storage.before_rename")
            os.replace(temporary, target)
            failpoint("storage.after_rename")
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(target.parent)
    except OSError as error:
        raise _unavailable(target, "write", error) from error
    return written


def _make_folder(folder: Path) -> None:
    """Makes a folder and its parents, for this user alone, so that they survive a crash."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    _sync_folder(folder.parent)


def _write_through(path: Path, pieces: Iterable[Buffer]) -> Written:
    """Writes a new file. It is on the disk when this returns."""
    tally = Tally()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for piece in pieces:
            failpoint("storage.before_write")
            rest = memoryview(piece).cast("B")
            tally.add(rest)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            failpoint("storage.after_write")
        failpoint("storage.before_fsync")
        os.fsync(descriptor)
        failpoint("storage.after_fsync")
    finally:
        os.close(descriptor)
    return tally.written


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        failpoint("storage.before_fsync_folder")
        os.fsync(descriptor)
        failpoint("storage.after_fsync_folder")
    except OSError as error:
        # some network file systems cannot do this, and make renames durable by themselves
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


class RemoteStorage(Storage):
    """A store that fsspec knows. In an object store a file appears whole or not at all. In a file system where that is
    not so (sftp), a torn file is found by its size and digest, because the manifest that names it is written last."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        # this import takes longer than all others of this package, and local folders do not need it
        import fsspec

        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise ConfigurationError(
                f"cannot open {url!r}: {error}",
                why="each kind of storage needs a Python package",
                todo="install it (for s3: pip install s3fs)",
            ) from error
        except ValueError as error:
            raise ConfigurationError(f"cannot open {url!r}: {error}") from error
        self._root = str(root).rstrip("/")

    def write(self, path: str, pieces: Iterable[Buffer]) -> Written:
        tally = Tally()
        target = self._at(path)
        with self._calling(path, "write"):
            try:
                file = self._files.open(target, "wb")
            except FileNotFoundError:
                # only file systems have folders; object stores need none
                self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
                file = self._files.open(target, "wb")
        try:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                tally.add(view)
                with self._calling(path, "write"):
                    failpoint("storage.before_write")
                    file.write(view)
                    failpoint("storage.after_write")
            with self._calling(path, "write"):
                failpoint("storage.before_commit")
                file.close()
                failpoint("storage.after_commit")
        except BaseException:
            _abandon(file)
            raise
        return tally.written

    def read(self, path: str, begin: int, nbytes: int) -> bytes:
        if nbytes == 0:
            return b""
        at = self._at(path)
        with self._calling(path, "read"):
            got = bytes(self._files.cat_file(at, start=begin, end=begin + nbytes))
        if len(got) != nbytes:
            # beyond the end of a file, some stores raise an error and some return fewer bytes
            raise self._short(path, begin, nbytes, len(got))
        return got

    def size(self, path: str) -> int:
        at = self._at(path)
        with self._calling(path, "read"):
            self._files.invalidate_cache()
            found = self._files.info(at)
        if found["type"] != "file":
            raise self._missing(path)
        return int(found["size"])

    def list_folders(self, path: str) -> tuple[str, ...]:
        return tuple(sorted(name for name, found in self._entries(path) if found["type"] == "directory"))

    def list_files(self, path: str) -> dict[str, int]:
        return {name: int(found["size"]) for name, found in sorted(self._entries(path)) if found["type"] == "file"}

    def delete_file(self, path: str) -> None:
        at = self._at(path)
        with contextlib.suppress(CheckpointNotFound), self._calling(path, "delete"):
            failpoint("storage.before_delete")
            self._files.rm_file(at)
            failpoint("storage.after_delete")

    def delete_folder(self, path: str) -> None:
        assert path, "this would delete all checkpoints of the URL"
        at = self._at(path)
        with contextlib.suppress(CheckpointNotFound), self._calling(path, "delete"):
            failpoint("storage.before_delete")
            self._files.invalidate_cache()
            self._files.rm(at, recursive=True)
            failpoint("storage.after_delete")

    def _at(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}" if path else self._root

    def _entries(self, path: str) -> list[tuple[str, dict[str, Any]]]:
        at = self._at(path)
        try:
            with self._calling(path, "list"):
                self._files.invalidate_cache()
                found = self._files.ls(at, detail=True)
        except CheckpointNotFound:
            return []
        entries = ((str(each["name"]).rstrip("/"), each) for each in found)
        # an object store may list the folder among its own entries
        return [(name.rpartition("/")[2], each) for name, each in entries if name.strip("/") != at.strip("/")]

    @contextlib.contextmanager
    def _calling(self, path: str, doing: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if doing == "write":
                raise _unavailable(self.locate(path), doing, error) from error
            raise self._missing(path) from error
        except Exception as error:
            # each kind of storage raises the errors of its own library
            raise _unavailable(self.locate(path), doing, error) from error


def _abandon(file: Any) -> None:
    """Discards a file. Closing it would publish the bytes written so far."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(AttributeError):
        file.closed = True
