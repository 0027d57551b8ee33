"""A worker that is told to leave before its work is done: it leaves in order, and the script ends.

`begin` says so: on SIGTERM, a preemption notice, the coordinator's heartbeat reply, or the script's wish. `job.batches`
then hands back what is not pushed, and ends the script by `Drained`. A script with a loop of its own sees
`job.should_stop`.

Owns: whether this worker is told to leave, whether its work is handed over. Invariants: it is told once, and for good;
`check` raises only until the worker begins to leave. Must not know: who tells it (departure), what is handed back.
"""

from __future__ import annotations

from collections.abc import Callable

from shardyard.runtime.restart_policy import LEFT_IN_ORDER


class Drained(SystemExit):
    """Ends the script of a worker that leaves in order. Its `with` blocks and `finally` blocks run, code after them
    does not."""

    def __init__(self) -> None:
        super().__init__(LEFT_IN_ORDER)


_latest: Drain | None = None


def end_script() -> None:
    """For the end of a script that has not left its job itself: raises Drained if it ends because it was told to."""
    if _latest is not None:
        _latest.end_script()


class Drain:
    """Of one worker in one job. Any thread may call `begin`, a signal's handler too: it takes no lock."""

    def __init__(self) -> None:
        self.reason = ""
        """Why this worker is told to leave; empty if it is not."""
        self.on_begin: Callable[[], None] = lambda: None
        self.hands_over = False
        """Whether the script ends because of this, so that its work is for others. It may also have ended by itself."""
        self._leaves = False
        self._was_raised = False
        global _latest
        _latest = self

    @property
    def asked(self) -> bool:
        return bool(self.reason)

    def begin(self, reason: str) -> None:
        """Tells the worker to leave. A second call does nothing."""
        if not self.reason:
            self.reason = reason
            self.on_begin()

    def seen(self) -> bool:
        """Whether this worker is to leave, for a script that ends its loop if it is."""
        self.hands_over = self.hands_over or self.asked
        return self.asked

    def check(self) -> None:
        """Raises Drained if this worker is told to leave and has not begun to."""
        if self.reason and not self._leaves:
            self.hands_over = True
            self.end_script()

    def end_script(self) -> None:
        """Raises Drained if the script ends because of this."""
        if self.hands_over:
            self._was_raised = True
            raise Drained

    @property
    def is_silent(self) -> bool:
        """Whether the script ends because of this, and its exit code does not say so."""
        return self.hands_over and not self._was_raised

    def leave(self) -> None:
        """From now on `check` raises nothing, since what is left to do is the leaving itself."""
        self._leaves = True
