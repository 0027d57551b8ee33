"""The real clock (shardyard.runtime.ports.Clock)."""

from __future__ import annotations

import time


class SystemClock:
    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000
