"""Who did what to a yard, when, from where, and whether it was allowed: a file to which lines are added.

Each line has the SHA-256 of the line before it, so that a line that was changed, removed or put in between is found.
What was cut off at the end cannot be seen in the file itself: compare `number` with a copy elsewhere.

Owns: the file. Invariants: lines are added only; one that was cut off by a full disk or a crash is removed by the next
start. Refusals are limited in number, so that nobody fills the disk with them; how many were left out is said.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from shardyard.domain.errors import AuditDamaged, StorageUnavailable
from shardyard.security.credentials import make_private

FILE: Final = "audit.jsonl"
REFUSED_A_MINUTE: Final = 60
FIRST: Final = "0" * 64
"""What the first line has in place of the line before it."""


class AuditLog:
    """Safe for several threads. Raises StorageUnavailable if the file cannot be opened."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._lock = threading.Lock()
        self._refused_minute, self._refused, self._left_out = 0, 0, 0
        try:
            make_private(folder)
            self._number, self._last = self._continue()
        except OSError as error:
            raise StorageUnavailable(f"the audit {self.path} cannot be written: {error.strerror}") from error

    def add(self, event: str, *, who: str, where: str, outcome: str, **more: str | int) -> None:
        """Adds a line. `outcome`: "allowed", or why it was refused. Raises OSError."""
        with self._lock:
            if outcome != "allowed" and not self._takes_refusal():
                return
            if self._left_out and outcome == "allowed":
                self._write({"event": "refusals left out", "number_of_them": self._left_out})
                self._left_out = 0
            self._write({"event": event, "who": who, "where": where, "outcome": outcome, **more})

    def _takes_refusal(self) -> bool:
        minute = int(time.monotonic() // 60)
        if minute != self._refused_minute:
            self._refused_minute, self._refused = minute, 0
        self._refused += 1
        taken = self._refused <= REFUSED_A_MINUTE
        self._left_out += not taken
        return taken

    def _write(self, entry: Mapping[str, Any]) -> None:
        number = self._number + 1
        line = json.dumps({"number": number, "time": round(time.time(), 3), **entry, "before": self._last}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(line.encode())
        self._number, self._last = number, _digest(line.encode())

    def _continue(self) -> tuple[int, str]:
        """The number and the digest of the last line. Removes one that was cut off."""
        if not self.path.exists():
            return 0, FIRST
        last = b""
        with self.path.open("r+b") as stream:
            end = 0
            for line in stream:
                if line.endswith(b"\n"):
                    last, end = line, end + len(line)
            stream.truncate(end)
        try:
            return (int(json.loads(last)["number"]), _digest(last)) if last else (0, FIRST)
        except (ValueError, KeyError, TypeError) as error:
            raise OSError(0, f"its last line is damaged ({error})") from error


def verify(path: Path) -> int:
    """The number of lines, if each has the digest of the one before it. Raises AuditDamaged, OSError."""
    return sum(1 for _ in read(path))


def read(path: Path) -> Iterator[Mapping[str, Any]]:
    """The entries, each checked. Raises AuditDamaged, OSError."""
    before, number = FIRST, 0
    with path.open("rb") as stream:
        for line in stream:
            number += 1
            try:
                entry = json.loads(line)
                good = entry["before"] == before and entry["number"] == number and line.endswith(b"\n")
            except (ValueError, KeyError, TypeError):
                good = False
            if not good:
                raise AuditDamaged(f"{path}: line {number} does not follow the line before it")
            yield entry
            before = _digest(line)


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
