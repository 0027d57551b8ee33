"""How long steps take that do not wait for all ranks: how much of the present step is left, and how long a rank may
still come in time.

Owns: when the newest step was decided, the lengths of the last steps, and when the present step had as many ranks as it
needs, as far as this life of the coordinator has seen. Nothing is recorded: it is advice. Must not know: which ranks
count in a step, the clock (`now_ms` is an argument).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

LENGTHS_KEPT: Final = 15
JUST_BEGUN: Final = 0.25
"""Of a step's usual length: who joins it so early is better off in it than waiting for the next one."""
OVERDUE: Final = 1.25
"""Times its usual length: a step that is older may be waiting for just the one who asks."""
LEFT_MS_MAX: Final = 3_600_000


class StepTimes:
    """Of one job."""

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
        """As many ranks are there as the step needs: how long its others are waited for yet, milliseconds, where that
        is a share of a step's usual length from now on, or from when this was asked first."""
        if self._enough is None or self._enough[0] != step:
            self._enough = step, now_ms
        waits_ms = share * statistics.median(self._lengths_ms) if self._lengths_ms else 0
        return min(max(0, math.ceil(waits_ms - (now_ms - self._enough[1]))), LEFT_MS_MAX)

    def left_ms(self, step: int, now_ms: int) -> int:
        """For one who comes late: how long the version behind `step` is worth waiting for, milliseconds. 0 where the
        step is not the one under way, has hardly begun, or is overdue, and where no length is known."""
        if self._newest is None or self._newest[0] != step - 1 or not self._lengths_ms:
            return 0
        usual_ms = statistics.median(self._lengths_ms)
        age_ms = now_ms - self._newest[1]
        if age_ms < JUST_BEGUN * usual_ms:
            return 0
        return min(max(0, round(OVERDUE * usual_ms - age_ms)), LEFT_MS_MAX)
