"""The output streams of a process, read as lines.

Owns: how bytes become lines. Invariants: a read never blocks; a line is no longer than the limit. Must not know: what
becomes of lines.
"""

from __future__ import annotations

import codecs
import os
import re
from typing import IO, Final

from shardyard.domain import limits

READ_BYTES: Final = 64 * limits.KIB
_LINE_END: Final = re.compile(r"\r\n|\n|\r")


class LineSplitter:
    """Splits bytes into lines. A line longer than the limit comes in pieces."""

    def __init__(self, characters_max: int = limits.OUTPUT_LINE_CHARACTERS_MAX) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters_max = characters_max
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        text = self._rest + self._decoder.decode(data)
        # a carriage return at the end may be the first half of a line end
        held = text.endswith("\r")
        *lines, self._rest = _LINE_END.split(text[:-1] if held else text)
        if held:
            self._rest += "\r"
        if len(self._rest) > self._characters_max:
            lines.append(self._rest)
            self._rest = ""
        return self._cut(lines)

    def finish(self) -> list[str]:
        rest = (self._rest + self._decoder.decode(b"", final=True)).rstrip("\r")
        self._rest = ""
        return self._cut([rest]) if rest else []

    def _cut(self, lines: list[str]) -> list[str]:
        width = self._characters_max
        return [line[begin : begin + width] for line in lines for begin in range(0, max(len(line), 1), width)]


class Pipe:
    """One output stream of a process."""

    def __init__(self, index: int, standard_error: bool, stream: IO[bytes]) -> None:
        self.index = index
        self.standard_error = standard_error
        self.stream = stream
        self._splitter = LineSplitter()
        os.set_blocking(stream.fileno(), False)

    def read(self) -> tuple[list[str], bool]:
        """Returns the lines that are there now, and True once the stream has ended."""
        try:
            data = os.read(self.stream.fileno(), READ_BYTES)
        except BlockingIOError:
            return [], False
        return self._splitter.feed(data) if data else self._splitter.finish(), not data

    def drain(self) -> list[str]:
        """Returns all that is left after the process has ended, even if another process still holds the other end."""
        lines: list[str] = []
        while True:
            found, at_end = self.read()
            lines += found
            if at_end:
                return lines
            if not found:
                return lines + self._splitter.finish()
