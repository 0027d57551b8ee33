"""How the first error of a launch is told to one who has watched its output.

Owns: the memory of which lines were shown, the choice between the whole error and its end with a pointer to what stands
above. Invariants: a traceback that was not shown, whole and in one piece, is told whole; memory is bounded.
Must not know: processes, gRPC, where lines go.
"""

from __future__ import annotations

from collections import deque
from typing import Final

LINES_KEPT_MAX: Final = 400
"""Lines on standard error remembered of each process; a longer traceback is told again."""
MESSAGE_LINES_MAX: Final = 10


class ShownOutput:
    """For one thread."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[str]] = {}

    def note(self, index: int, standard_error: bool, line: str) -> None:
        if standard_error:
            self._kept.setdefault(index, deque(maxlen=LINES_KEPT_MAX)).append(line)

    def tell(self, index: int, first_error: str, *, several: bool) -> str:
        """The error of process `index`, or, where its traceback was shown, what it says and where that is. `several`:
        output lines began with the number of their process."""
        wanted = first_error.splitlines()
        if not wanted or not _contains(list(self._kept.get(index, ())), wanted):
            return first_error
        where = f"above, in the lines that begin with [{index}]" if several else "above"
        return "\n".join([*(f"  {line}" for line in message_of(wanted)), f"  its traceback is {where}"])


def message_of(traceback: list[str]) -> list[str]:
    """The lines of a traceback that say what was raised: those after its last frame."""
    frames = [place for place, line in enumerate(traceback) if line.startswith("  File ")]
    after = range(frames[-1] + 1 if frames else len(traceback), len(traceback))
    begin = next((place for place in after if traceback[place][:1].strip()), len(traceback) - 1)
    return traceback[begin : begin + MESSAGE_LINES_MAX]


def _contains(lines: list[str], wanted: list[str]) -> bool:
    """Whether `wanted` stands in `lines`, in one piece."""
    return any(
        lines[begin] == wanted[0] and lines[begin : begin + len(wanted)] == wanted
        for begin in range(len(lines) - len(wanted) + 1)
    )
