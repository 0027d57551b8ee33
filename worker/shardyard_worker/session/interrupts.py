"""Holds Ctrl-C back while a step is half done.

Python raises KeyboardInterrupt between any two instructions of the main thread. During an exchange, or during a
server's arithmetic in a yard inside this process, that would leave half a step behind.

Owns: the handler of SIGINT during such work. Invariants: an interrupt is raised at the end of the work, or in a wait
that can be given up (`check`); a second interrupt is raised at once; a handler other than Python's own stays. Must not
know: what work is protected.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """For `with` blocks, which may nest. Only the thread that trains uses it, except `check`."""

    def __init__(self) -> None:
        self._depth = 0
        self._former: Any = None
        self._noted = False

    def check(self) -> None:
        """Raises KeyboardInterrupt if one was held back and this is the main thread. Safe for several threads."""
        if self._noted and threading.current_thread() is threading.main_thread():
            self._noted = False
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        if self._depth == 0 and threading.current_thread() is threading.main_thread():
            former = signal.getsignal(signal.SIGINT)
            if former is signal.default_int_handler:
                self._former = former
                signal.signal(signal.SIGINT, self._note)
        self._depth += 1

    def __exit__(self, *ended: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._former is not None:
            former, self._former = self._former, None
            signal.signal(signal.SIGINT, former)
            self.check()

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._noted:
            self._noted = False
            raise KeyboardInterrupt
        self._noted = True
