"""Holds Ctrl-C back while a step is half done.

Python raises KeyboardInterrupt between any two instructions of the main thread. During an exchange, or during a
server's arithmetic in a yard inside this process, that would leave half a step behind.

Owns: the handler of SIGINT during such work; while this process is in a job, also between steps, so that a step need
not set it. Invariants: an interrupt is raised at the end of the work, or in a wait that can be given up (`check`); a
second interrupt is raised at once; between steps, each is raised at once; a handler other than Python's own stays. Must
not know: what work is protected.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Final

LOOK_AGAIN_S = 0.1
"""How often the handler is looked at while this process is in a job. Notebooks set Python's own before each cell."""
_MAIN: Final = threading.main_thread().ident


class Interrupts:
    """For `with` blocks, which may nest. Any thread may use it; only the main thread is protected, since no other one
    is interrupted."""

    def __init__(self) -> None:
        self._depth = 0
        self._stays = 0
        self._noted = False
        self._is_set = False
        self._looked_s = 0.0

    def check(self) -> None:
        """Raises KeyboardInterrupt if one was held back and this is the main thread."""
        if self._noted and threading.get_ident() == _MAIN:
            self._noted = False
            raise KeyboardInterrupt

    def stay(self) -> bool:
        """Keeps the handler until `leave`, if this is the main thread. Returns whether `leave` must be called."""
        if threading.get_ident() != _MAIN:
            return False
        self._stays += 1
        self._set()
        return True

    def leave(self) -> None:
        self._stays -= 1
        self._end()

    def __enter__(self) -> None:
        if threading.get_ident() != _MAIN:
            return
        if self._depth == 0 and (not self._is_set or time.monotonic() - self._looked_s > LOOK_AGAIN_S):
            self._set()
        self._depth += 1

    def __exit__(self, *ended: object) -> None:
        if threading.get_ident() != _MAIN:
            return
        self._depth -= 1
        if self._depth == 0:
            if not self._stays:
                self._end()
            if self._noted:
                self.check()

    def _set(self) -> None:
        self._looked_s = time.monotonic()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _note)
            self._is_set = True

    def _end(self) -> None:
        if self._is_set and not self._depth and not self._stays and threading.get_ident() == _MAIN:
            self._is_set = False
            if signal.getsignal(signal.SIGINT) is _note:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def note(self) -> None:
        """An interrupt has come."""
        if self._depth == 0 or self._noted:
            self._noted = False
            raise KeyboardInterrupt
        self._noted = True


INTERRUPTS: Final = Interrupts()
"""Module state, since a process has one handler."""


def _note(number: int, frame: FrameType | None) -> None:
    del number, frame
    INTERRUPTS.note()
