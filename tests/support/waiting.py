"""Waiting, in a test, for what another thread does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import psutil

DEADLINE_S: Final = 10.0


def wait_until(condition: Callable[[], bool], what: str = "a condition", *, deadline_s: float = DEADLINE_S) -> None:
    """Raises AssertionError if the condition, which `what` describes, does not hold within the deadline."""
    pause = threading.Event()
    give_up = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up, f"waited {deadline_s} s for {what}"
        pause.wait(0.002)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, even if nobody has waited for it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
