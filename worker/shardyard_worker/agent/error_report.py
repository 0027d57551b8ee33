"""Reports the first error of a launch to a user who has watched its output.

Owns: which lines were shown, and the choice between the whole error and its last lines with a pointer to the output
above. Invariants: a traceback is printed whole unless it was shown in one piece before; memory is bounded. Must not
know: processes, gRPC, where lines go.
"""

from __future__ import annotations

from collections import deque
from typing import Final

LINES_KEPT_MAX: Final = 400
"""Lines of standard error remembered of each process. A longer traceback is printed again."""
MESSAGE_LINES_MAX: Final = 10


class ShownOutput:
    """For one thread."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[str]] = {}

    def note(self, index: int, standard_error: bool, line: str) -> None:
        if standard_error:
            self._kept.setdefault(index, deque(maxlen=LINES_KEPT_MAX)).append(line)

    def tell(self, index: int, first_error: str, *, several: bool) -> str:
        """The error of process `index`; if its traceback was shown, only its message and where the traceback is.
        `several`: output lines begin with the number of their process."""
        wanted = first_error.splitlines()
        if not wanted or not _contains(list(self._kept.get(index, ())), wanted):
            return first_error
        where = f"above, in the lines that begin with [{index}]" if several else "above"
        return "\n".join([*(f"  {line}" for line in message_of(wanted)), f"  its traceback is {where}"])


def message_of(traceback: list[str]) -> list[str]:
    """The lines of a traceback after its last frame: the exception and its message."""
    frames = [place for place, line in enumerate(traceback) if line.startswith("  File ")]
    after = range(frames[-1] + 1 if frames else len(traceback), len(traceback))
    begin = next((place for place in after if traceback[place][:1].strip()), len(traceback) - 1)
    return traceback[begin : begin + MESSAGE_LINES_MAX]


def _contains(lines: list[str], wanted: list[str]) -> bool:
    """Whether `lines` contain `wanted` in one piece."""
    return any(
        lines[begin] == wanted[0] and lines[begin : begin + len(wanted)] == wanted
        for begin in range(len(lines) - len(wanted) + 1)
    )
