"""The output of a launch's processes, in files of bounded size, and its readers.

    0.log          what process 0 has printed last, in lines `TIME KIND TEXT`
    0.log.former   what it printed before that

KIND is `out` or `err` for the stream, and `agt` for what the agent says about the process. Owns: the form of the files,
their rotation, the order of lines of several processes. Invariants: a process has at most two files of
FILE_BYTES_MAX. Output that a disk refuses is lost and counted, and the launch goes on. A reader misses no line of a
file that is rotated while it is read, unless the file is rotated twice. Must not know: processes, gRPC.
"""

from __future__ import annotations

import contextlib
import datetime
import heapq
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from shardyard.domain import limits

FILE_BYTES_MAX: Final = 4 * limits.MIB
FORMER: Final = ".former"
READ_BYTES: Final = 64 * limits.KIB
LINE_BYTES_MAX: Final = 4 * limits.OUTPUT_LINE_CHARACTERS_MAX + 64
BATCH_LINES_MAX: Final = 512
BATCH_CHARACTERS_MAX: Final = limits.MIB
TAIL_CHARACTERS_MAX: Final = 16 * limits.MIB
"""The most that is held of the last lines, all processes together."""

Kind = Literal["out", "err", "agt"]
KINDS: Final[dict[bytes, Kind]] = {b"out": "out", b"err": "err", b"agt": "agt"}


@dataclass(frozen=True, slots=True)
class KeptLine:
    """`time_s`: when the agent read it, in seconds since 1970."""

    index: int
    time_s: float
    kind: Kind
    text: str


class OutputFile:
    """The file of one process, for the thread that writes it."""

    def __init__(self, folder: Path, index: int, *, bytes_max: int = FILE_BYTES_MAX) -> None:
        self._path = _path(folder, index)
        self._bytes_max = bytes_max
        self._pending: list[bytes] = []
        self._descriptor: int | None = None
        self._size = 0
        self._lost = 0
        self._torn = False
        self._stamped = (-1.0, "")

    def add(self, kind: Kind, text: str, time_s: float) -> None:
        """The line is written by the next `flush`."""
        if time_s != self._stamped[0]:
            self._stamped = (time_s, _stamp(time_s))
        self._pending.append(_line(kind, text, self._stamped[1]))

    def flush(self) -> OSError | None:
        """Writes what was added. Returns why that failed; then it is lost."""
        if not self._pending:
            return None
        lines, self._pending = self._pending, []
        before = [b"\n"] if self._torn else []
        if self._lost:
            before.append(
                _line("agt", f"the disk refused {self._lost} lines, which are missing here", _stamp(time.time()))
            )
        try:
            self._write(b"".join([*before, *lines]))
        except OSError as error:
            self._lost += len(lines)
            return error
        self._lost, self._torn = 0, False
        return None

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, data: bytes) -> None:
        if self._descriptor is None or self._size + len(data) > self._bytes_max:
            self._begin_file()
        assert self._descriptor is not None
        rest = memoryview(data)
        while rest:
            written = os.write(self._descriptor, rest)
            rest = rest[written:]
            self._size += written
            self._torn = bool(rest)

    def _begin_file(self) -> None:
        """Opens the file, which an agent before this one may have left; a new one if that is full."""
        if self._descriptor is not None or _size(self._path) + READ_BYTES > self._bytes_max:
            self.close()
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._path, former_of(self._path))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags, 0o600)
        self._size = os.fstat(self._descriptor).st_size


class OutputReader:
    """Reads what is kept of the output of one process, and goes on while it grows. For one thread."""

    def __init__(self, folder: Path, index: int) -> None:
        self._path = _path(folder, index)
        self._index = index
        self._descriptor: int | None = None
        self._inode = 0
        self._rest = b""

    def read(self) -> list[KeptLine]:
        """Returns lines that were not returned before; an empty list if there are none now. Raises OSError."""
        while True:
            # asked first: a file that has a successor is not written any more
            successor = self._successor()
            data = b"" if self._descriptor is None else os.read(self._descriptor, READ_BYTES)
            if data:
                found = self._split(data)
                if found:
                    return found
            elif successor is None:
                return []
            else:
                self._open(successor)

    def read_all(self) -> Iterator[KeptLine]:
        while found := self.read():
            yield from found

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _successor(self) -> Path | None:
        """The file to read after the present one."""
        former = former_of(self._path)
        inodes = [_inode(former), _inode(self._path)]
        if self._descriptor is None:
            return former if inodes[0] else self._path if inodes[1] else None
        if inodes[0] == self._inode:
            return self._path if inodes[1] else None
        if inodes[1] == self._inode:
            return None
        return former if inodes[0] else None

    def _open(self, path: Path) -> None:
        self.close()
        self._rest = b""
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:  # it was rotated meanwhile
            return
        self._inode = os.fstat(self._descriptor).st_ino

    def _split(self, data: bytes) -> list[KeptLine]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            lines.append(self._rest)
            self._rest = b""
        return [self._parse(line) for line in lines if line]

    def _parse(self, line: bytes) -> KeptLine:
        parts = line.split(b" ", 2)
        kind = KINDS.get(parts[1]) if len(parts) == 3 else None
        stamp = parts[0].decode("ascii", "replace")
        text = (line if kind is None else parts[2]).decode("utf-8", "replace")[: limits.OUTPUT_LINE_CHARACTERS_MAX]
        return KeptLine(self._index, _seconds(stamp), kind or "out", text)


def read_output(
    folder: Path, processes: Sequence[int], *, tail: int | None, running: Callable[[], bool] | None, pause_s: float
) -> Iterator[list[KeptLine]]:
    """The kept lines of some processes, in the order of their times, in batches. `tail`: only so many of the last.

    With `running`, it goes on with what is printed from now on, until that returns False. It then yields an empty batch
    at least every `pause_s`, so that the caller can end it. Raises OSError.
    """
    with contextlib.ExitStack() as closing:
        readers = [OutputReader(folder, index) for index in processes]
        for reader in readers:
            closing.callback(reader.close)
        kept: Iterable[KeptLine] = heapq.merge(*(reader.read_all() for reader in readers), key=_time_of)
        yield from _batches(kept if tail is None else _last(kept, tail))
        while running is not None:
            goes_on = running()
            found = [line for reader in readers for line in reader.read()]
            if not found and not goes_on:
                return
            yield from _batches(sorted(found, key=_time_of))
            if not found:
                yield []
                time.sleep(pause_s)


def _last(lines: Iterable[KeptLine], count: int) -> deque[KeptLine]:
    held: deque[KeptLine] = deque()
    characters = 0
    for line in lines:
        held.append(line)
        characters += len(line.text)
        while held and (len(held) > count or characters > TAIL_CHARACTERS_MAX):
            characters -= len(held.popleft().text)
    return held


def _batches(lines: Iterable[KeptLine]) -> Iterator[list[KeptLine]]:
    batch: list[KeptLine] = []
    characters = 0
    for line in lines:
        batch.append(line)
        characters += len(line.text)
        if len(batch) >= BATCH_LINES_MAX or characters > BATCH_CHARACTERS_MAX:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def former_of(path: Path) -> Path:
    return path.with_name(path.name + FORMER)


def _path(folder: Path, index: int) -> Path:
    return folder / f"{index}.log"


def _size(path: Path) -> int:
    """0 if there is no such file."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _inode(path: Path) -> int:
    """0 if there is no such file."""
    try:
        return path.lstat().st_ino
    except FileNotFoundError:
        return 0


def _time_of(line: KeptLine) -> float:
    return line.time_s


def _line(kind: Kind, text: str, stamp: str) -> bytes:
    return f"{stamp} {kind} {text}\n".encode("utf-8", "replace")


def _stamp(time_s: float) -> str:
    moment = datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat(timespec="microseconds")
    return f"{moment.removesuffix('+00:00')}Z"


def _seconds(stamp: str) -> float:
    try:
        return datetime.datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return 0.0
