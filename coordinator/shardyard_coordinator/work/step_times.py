"""How long steps take that do not wait for all ranks: the time left in the present step, and how long a late rank may
still come in time.

Owns: when the newest step was decided, the lengths of the last steps, and when the present step had as many ranks as it
needs, since this coordinator started. Nothing is recorded: the times are only advice. Must not know: which ranks count
in a step, the clock (`now_ms` is an argument).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

LENGTHS_KEPT: Final = 15
JUST_BEGUN: Final = 0.25
"""The part of a step's usual length in which a late worker should compute it, not wait for the next one."""
OVERDUE: Final = 1.25
"""In usual lengths of a step: an older step may be waiting for just this worker."""
LEFT_MS_MAX: Final = 3_600_000


class StepTimes:
    def __init__(self) -> None:
        self._newest: tuple[int, int] | None = None
        self._enough: tuple[int, int] | None = None
        self._lengths_ms: deque[int] = deque(maxlen=LENGTHS_KEPT)

    def decide(self, step: int, now_ms: int) -> None:
        """The step was decided now, and the next one has begun."""
        if self._newest is not None and self._newest[0] == step - 1:
            self._lengths_ms.append(now_ms - self._newest[1])
        self._newest, self._enough = (step, now_ms), None

    def patience_ms(self, step: int, share: float, now_ms: int) -> int:
        """The step has as many ranks as it needs. Returns how many more milliseconds to wait for the others: `share` of
        a step's usual length, counted from the first call for this step."""
        if self._enough is None or self._enough[0] != step:
            self._enough = step, now_ms
        waits_ms = share * statistics.median(self._lengths_ms) if self._lengths_ms else 0
        return min(max(0, math.ceil(waits_ms - (now_ms - self._enough[1]))), LEFT_MS_MAX)

    def left_ms(self, step: int, now_ms: int) -> int:
        """How many milliseconds a late worker should wait for the version that follows `step`. 0 if the step is not the
        one under way, has hardly begun, or is overdue, and if no length is known."""
        if self._newest is None or self._newest[0] != step - 1 or not self._lengths_ms:
            return 0
        usual_ms = statistics.median(self._lengths_ms)
        age_ms = now_ms - self._newest[1]
        if age_ms < JUST_BEGUN * usual_ms:
            return 0
        return min(max(0, round(OVERDUE * usual_ms - age_ms)), LEFT_MS_MAX)
