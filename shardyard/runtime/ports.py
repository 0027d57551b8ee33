"""What the shells give to the cores and to each other as seams: a clock."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Monotonic milliseconds; only differences mean something."""
        ...
