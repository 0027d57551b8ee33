"""Files of samples, on this machine or at any URL that fsspec knows.

Owns: how bytes at an offset are read, and how a file is recognised as the one that was indexed. Invariants: a read
returns exactly the bytes that were asked for; a file that has changed since is refused; no file stays open. Must not
know: what a record is.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from shardyard.domain.errors import ConfigurationError, InvalidRequest, StorageUnavailable

PIECE_BYTES: Final = 4 << 20
Span = tuple[int, int]
"""[begin, end) in bytes."""


@dataclass(frozen=True)
class Stamp:
    """Identifies a file's content: its length, and its time of change or ETag."""

    nbytes: int
    version: str


class FileSource(ABC):
    """One file. `name`: for messages. `known`: its stamp when it was indexed."""

    name: str
    known: Stamp | None = None

    @abstractmethod
    def stamp(self) -> Stamp:
        """Raises StorageUnavailable."""

    @abstractmethod
    def read(self, spans: Sequence[Span]) -> list[bytes]:
        """Returns the bytes of each span. Raises StorageUnavailable, InvalidRequest if the file ends before them."""

    def pieces(self, nbytes: int) -> Iterator[bytes]:
        """Yields a file of that length, some MiB at a time. Raises as `read`."""
        for begin in range(0, nbytes, PIECE_BYTES):
            yield self.read([(begin, min(begin + PIECE_BYTES, nbytes))])[0]

    def _check(self, span: Span, found: bytes) -> bytes:
        if len(found) != span[1] - span[0]:
            raise changed(self.name, f"it ends at byte {span[0] + len(found)}, and had bytes up to {span[1]}")
        return found

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns errors of a disk or a store into Shardyard's. Stores have their own exceptions."""
        try:
            yield
        except (InvalidRequest, StorageUnavailable):
            raise
        except Exception as error:
            raise StorageUnavailable(
                f"cannot read {self.name}: {error or type(error).__name__}",
                why="samples are read from there when they are needed",
                todo="check that this machine can reach it, under this name, with these permissions",
            ) from error


class LocalFileSource(FileSource):
    """A file of this machine. Each read opens it, so that a change is noticed."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)

    def stamp(self) -> Stamp:
        with self._explained():
            found = os.stat(self.name)
            if not stat.S_ISREG(found.st_mode):
                raise InvalidRequest(f"{self.name} is not a file", why="", todo="give files, for example by glob.glob")
        return _stamp_of(found)

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        with self._explained(), open(self.name, "rb", buffering=0) as file:
            now = _stamp_of(os.fstat(file.fileno()))
            if self.known is not None and now != self.known:
                raise changed(self.name, f"it has {now.nbytes} bytes, and had {self.known.nbytes}, or was written to")
            return [self._check(span, os.pread(file.fileno(), span[1] - span[0], span[0])) for span in spans]


class RemoteFileSource(FileSource):
    """A file at a URL."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.name = url
        try:
            self._files, self._path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(
                f"nothing here can open {url!r}: {error}",
                why="each kind of URL has a package of its own",
                todo="pip install what the message names, such as s3fs for s3:",
            ) from error

    def stamp(self) -> Stamp:
        with self._explained():
            self._files.invalidate_cache()
            found: dict[str, Any] = self._files.info(self._path)
            nbytes = found.get("size")
            if found.get("type") == "directory" or not isinstance(nbytes, int):
                raise InvalidRequest(f"{self.name} is not a file with a length", why="", todo="give files")
            versions = (found.get(key) for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified"))
            return Stamp(nbytes, next((str(each) for each in versions if each is not None), ""))

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        with self._explained():
            if len(spans) == 1:
                ((begin, end),) = spans
                found = [self._files.cat_file(self._path, begin, end)]
            else:
                begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
                found = self._files.cat_ranges([self._path] * len(spans), begins, ends, on_error="raise")
        return [self._check(span, bytes(each)) for span, each in zip(spans, found, strict=True)]


def place_of(file: str | os.PathLike[str]) -> FileSource:
    """The source for a path, file:///PATH, or a URL that fsspec knows. Raises ConfigurationError."""
    name = os.fspath(file)
    if "://" not in name:
        return LocalFileSource(Path(name))
    split = urlsplit(name)
    if split.scheme in ("file", "local") and split.netloc in ("", "localhost"):
        return LocalFileSource(Path(unquote(split.path)))
    return RemoteFileSource(name)


def _stamp_of(found: os.stat_result) -> Stamp:
    return Stamp(found.st_size, str(found.st_mtime_ns))


def changed(name: str, how: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} has changed since it was indexed: {how}",
        why="samples are known by their offsets, which mean something else now",
        todo="do not write to files that are trained on; start the job anew for other data",
        facts={"file": name},
    )
