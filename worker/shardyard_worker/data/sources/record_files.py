"""Data sets over lists of files, whose samples are records: lines, records of one size, framed records.

Owns: the index of each file, kept in a folder for the next time, and which record is sample i. Invariants: sample i is
the same record on every worker that has the same files; an index is used only if it is whole and its file's length and
time of change (or ETag) are the same. Memory: 8 bytes for each line or framed record. Must not know: leases, batches,
tensors.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import zlib
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from shardyard.domain import limits
from shardyard.domain.errors import InvalidRequest
from shardyard_worker.data.sources.file_sources import FileSource, Span, Stamp, changed, place_of

log = logging.getLogger("shardyard.worker")

Offsets = npt.NDArray[np.int64] | range
"""Where the records of a file begin, and where the last one ends."""
Decode = Callable[[bytes], Any]

FILES_MAX: Final = 1_000_000
RECORD_BYTES_MAX: Final = 1 << 30
FRAME_HEAD_BYTES: Final = 4
INDEX_FORMAT: Final = "shardyard-index 1"
HEAD_BYTES: Final = 4_096
"""The head of an index file: a line of JSON, padded with spaces. The offsets follow, int64, little-endian."""


class FileRecords(Dataset[Any]):
    """Records of files, numbered through all files in the given order. For `job.batches`, and any DataLoader.

    `files`: paths, or URLs that fsspec knows. `decode`: makes a sample from a record's bytes. `index`: the folder for
    the files' indices; by default `$XDG_CACHE_HOME/shardyard/index`; None: they are not kept. Raises InvalidRequest,
    StorageUnavailable, ConfigurationError.
    """

    def __init__(
        self,
        files: Iterable[str | os.PathLike[str]],
        *,
        decode: Decode | None = None,
        index: str | os.PathLike[str] | None = "auto",
    ) -> None:
        self._places: list[FileSource] = [place_of(file) for file in files]
        if not 0 < len(self._places) <= FILES_MAX:
            raise InvalidRequest(
                f"a data set of {len(self._places)} files; expected 1 to {FILES_MAX}",
                why="",
                todo="check the pattern that the list was made with",
            )
        self._decode = decode
        self._folder = _default_folder() if index == "auto" else None if index is None else Path(index)
        self._stamps = [place.stamp() for place in self._places]
        for place, stamp in zip(self._places, self._stamps, strict=True):
            place.known = stamp
        self._offsets = [self._index(place, stamp) for place, stamp in zip(self._places, self._stamps, strict=True)]
        self._ends = np.cumsum(np.array([len(offsets) - 1 for offsets in self._offsets], dtype=np.int64))
        if len(self) > limits.SAMPLES_MAX:
            raise InvalidRequest(f"a data set of {len(self)} records; at most {limits.SAMPLES_MAX} are taken")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples at the indices, each file read once."""
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} of {len(self)}")
        of = np.searchsorted(self._ends, wanted, side="right")
        found: list[Any] = [None] * len(wanted)
        for file in np.unique(of).tolist():
            begin = int(self._ends[file - 1]) if file else 0
            chosen = np.flatnonzero(of == file).tolist()
            spans = [self._span(self._offsets[file], int(wanted[each]) - begin) for each in chosen]
            for each, record in zip(chosen, self._places[file].read(spans), strict=True):
                found[each] = self._sample(record)
        return found

    def fingerprint(self) -> str:
        """A digest of the kind of record, and the files' names, lengths and numbers of records, in order. Files of this
        machine are named relative to their common folder, which may be elsewhere on another machine."""
        digest = hashlib.sha256(f"{type(self).__name__} {self._kind} {len(self)}".encode())
        names = _names([place.name for place in self._places])
        for name, stamp, end in zip(names, self._stamps, self._ends.tolist(), strict=True):
            digest.update(json.dumps([name, stamp.nbytes, end]).encode())
        return digest.hexdigest()[:32]

    # ---- what a kind of file defines

    @property
    @abstractmethod
    def _kind(self) -> str:
        """The format of records in a file, with all settings that change it."""

    @abstractmethod
    def _scan(self, place: FileSource, nbytes: int) -> Offsets:
        """Finds the records of a file. Raises InvalidRequest."""

    def _span(self, offsets: Offsets, record: int) -> Span:
        return int(offsets[record]), int(offsets[record + 1])

    def _sample(self, record: bytes) -> Any:
        return record if self._decode is None else self._decode(record)

    # ---- indices

    def _index(self, place: FileSource, stamp: Stamp) -> Offsets:
        file = None if self._folder is None or not stamp.version else self._folder / self._index_name(place)
        head = {
            "format": INDEX_FORMAT,
            "kind": self._kind,
            "file": place.name,
            "nbytes": stamp.nbytes,
            "version": stamp.version,
        }
        kept = None if file is None else _load(file, head, stamp.nbytes)
        if kept is not None:
            return kept
        offsets = self._scan(place, stamp.nbytes)
        if file is None:
            return offsets
        if place.stamp() != stamp:
            raise changed(place.name, "it is being written to")
        _save(file, head, offsets)
        return offsets

    def _index_name(self, place: FileSource) -> str:
        name = place.name if "://" in place.name else os.path.abspath(place.name)
        return hashlib.sha256(f"{self._kind}\n{name}".encode()).hexdigest()[:40] + ".index"


class TextLines(FileRecords):
    """Lines of text files. A sample is a line without its end, as `str`, or what `decode` makes of its bytes.

    >>> _ = open("words.txt", "w").write("one\\ntwo\\n")
    >>> dataset = sy.TextLines(["words.txt"], index=None)
    >>> len(dataset), dataset[1]
    (2, 'two')
    """

    @property
    def _kind(self) -> str:
        return "lines"

    def _scan(self, place: FileSource, nbytes: int) -> Offsets:
        found = [np.zeros(1, dtype=np.int64)]
        at = 0
        for piece in place.pieces(nbytes):
            found.append(np.flatnonzero(np.frombuffer(piece, dtype=np.uint8) == ord("\n")) + (at + 1))
            at += len(piece)
        offsets = np.concatenate(found)
        # the last line may have no line end
        return offsets if int(offsets[-1]) == nbytes else np.append(offsets, np.int64(nbytes))

    def _sample(self, record: bytes) -> Any:
        line = record.removesuffix(b"\n").removesuffix(b"\r")
        return line.decode() if self._decode is None else self._decode(line)


class FixedRecords(FileRecords):
    """Records of `record_bytes` each, after `header_bytes` at the beginning of each file. Needs no index.

    >>> _ = open("numbers.bin", "wb").write(bytes([1, 2, 3, 4, 5, 6]))
    >>> dataset = sy.FixedRecords(["numbers.bin"], record_bytes=2, decode=list)
    >>> len(dataset), dataset[1]
    (3, [3, 4])
    """

    def __init__(
        self,
        files: Iterable[str | os.PathLike[str]],
        *,
        record_bytes: int,
        header_bytes: int = 0,
        decode: Decode | None = None,
    ) -> None:
        if not 0 < record_bytes <= RECORD_BYTES_MAX or header_bytes < 0:
            raise InvalidRequest(
                f"records of {record_bytes} bytes after {header_bytes}; expected 1 to {RECORD_BYTES_MAX}"
            )
        self._record_bytes = record_bytes
        self._header_bytes = header_bytes
        super().__init__(files, decode=decode, index=None)

    @property
    def _kind(self) -> str:
        return f"fixed {self._record_bytes} {self._header_bytes}"

    def _scan(self, place: FileSource, nbytes: int) -> Offsets:
        if nbytes < self._header_bytes or (nbytes - self._header_bytes) % self._record_bytes:
            raise InvalidRequest(
                f"{place.name} has {nbytes} bytes, which is no whole number of records of {self._record_bytes} bytes"
                f" after {self._header_bytes}",
                why="the file is torn, or is another kind of file",
                todo="check record_bytes and header_bytes",
            )
        return range(self._header_bytes, nbytes + 1, self._record_bytes)


class FramedRecords(FileRecords):
    """Records of any length, each after its length in bytes (4 bytes, unsigned, little-endian). `write` makes such a
    file.

    >>> sy.FramedRecords.write("samples.rec", [b"first", b"second one"])
    2
    >>> dataset = sy.FramedRecords(["samples.rec"], index=None)
    >>> dataset[1]
    b'second one'
    """

    @staticmethod
    def write(path: str | os.PathLike[str], records: Iterable[bytes]) -> int:
        """Writes records to such a file. Returns their number. Raises InvalidRequest."""
        count = 0
        with open(path, "wb") as file:
            for record in records:
                if len(record) > RECORD_BYTES_MAX:
                    raise InvalidRequest(f"a record of {len(record)} bytes; at most {RECORD_BYTES_MAX} are taken")
                file.write(len(record).to_bytes(FRAME_HEAD_BYTES, "little"))
                file.write(record)
                count += 1
        return count

    @property
    def _kind(self) -> str:
        return "framed"

    def _scan(self, place: FileSource, nbytes: int) -> Offsets:
        found = array("q", [0])
        at, buffer = 0, b""
        for piece in place.pieces(nbytes):
            buffer += piece
            while found[-1] + FRAME_HEAD_BYTES <= at + len(buffer):
                begin = found[-1] - at
                length = int.from_bytes(buffer[begin : begin + FRAME_HEAD_BYTES], "little")
                end = found[-1] + FRAME_HEAD_BYTES + length
                if end > nbytes or length > RECORD_BYTES_MAX:
                    raise _torn(place, nbytes, found[-1], f"a record of {length} bytes")
                found.append(end)
            kept = min(len(buffer), found[-1] - at)
            buffer, at = buffer[kept:], at + kept
        if found[-1] != nbytes:
            raise _torn(place, nbytes, found[-1], f"{nbytes - found[-1]} bytes, fewer than a length takes")
        return np.frombuffer(found, dtype=np.int64)

    def _span(self, offsets: Offsets, record: int) -> Span:
        begin, end = super()._span(offsets, record)
        return begin + FRAME_HEAD_BYTES, end


def _torn(place: FileSource, nbytes: int, at: int, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"{place.name} has {what} at byte {at}, and {nbytes} bytes in all",
        why="the file is torn, or is another kind of file",
        todo="write it anew (FramedRecords.write)",
        facts={"file": place.name, "offset": str(at)},
    )


def _names(files: Sequence[str]) -> list[str]:
    """Names of files: relative to the common folder on this machine; URLs as they are."""
    local = [os.path.abspath(file) for file in files if "://" not in file]
    common = os.path.commonpath([os.path.dirname(file) for file in local]) if local else ""
    return [file if "://" in file else os.path.relpath(file, common) for file in files]


def _default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "shardyard" / "index"


def _load(file: Path, head: dict[str, Any], nbytes: int) -> npt.NDArray[np.int64] | None:
    """The saved offsets. None if there are none for this file in its current state, or they are not whole."""
    try:
        with open(file, "rb") as opened:
            found = json.loads(opened.read(HEAD_BYTES))
            length = os.fstat(opened.fileno()).st_size - HEAD_BYTES
            # a record has at least one byte: a line end or a length
            if not isinstance(found, dict) or length < 8 or length % 8 or length > 8 * (nbytes + 1):
                return None
            offsets = np.frombuffer(opened.read(), dtype="<i8").astype(np.int64, copy=False)
    except (OSError, ValueError):
        return None
    if found != {**head, "crc32": zlib.crc32(offsets.data)} or offsets[0] != 0 or offsets[-1] != nbytes:
        return None
    return offsets


def _save(file: Path, head: dict[str, Any], offsets: Offsets) -> None:
    """Saves an index. If that fails, it is made again the next time."""
    data = np.ascontiguousarray(offsets, dtype="<i8")
    written = json.dumps({**head, "crc32": zlib.crc32(data.data)}).encode()
    if len(written) > HEAD_BYTES:
        return
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as opened:
            opened.write(written.ljust(HEAD_BYTES))
            opened.write(data.data.cast("B"))
        os.replace(temporary, file)
    except OSError as error:
        log.warning("the index of %s is not kept in %s: %s", head["file"], file.parent, str(error))
        with suppress(OSError):
            temporary.unlink()
