"""A training process that leaves its job in order on SIGTERM or a notice of preemption, and ends in time.

A signal's handler runs between any two instructions of the main thread, which may hold a lock. So it only notes the
request and writes a byte; a thread tells the coordinator and watches the time.

Owns: the handler of SIGTERM while the process is in a job, the thread, the deadline. Invariants: a handler that the
script has set stays, and so does one that it sets later; a process that is forked from this one ends by SIGTERM as
before; a worker that has not left by the deadline, or gets SIGTERM again, ends as by kill -9, which is safe. Must not
know: steps, data.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from types import FrameType
from typing import Any, Final

from shardyard.runtime.preemption import PreemptionWatch
from shardyard.runtime.restart_policy import LEFT_IN_ORDER
from shardyard_worker.session.session import Session

log = logging.getLogger("shardyard.worker")

TOGETHER_S: Final = 1.0
"""Signals that come within this time of the first are one request: systemd and Slurm send SIGTERM to an agent and to
its processes at a time, and the agent passes its own on."""


class Departure:
    """From now on SIGTERM, or a notice of preemption, lets the worker leave, until `close`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._drain = session.drain
        self._pid = os.getpid()
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closed = False
        self._signalled_s: float | None = None
        self._handler: Any = self._on_signal  # one object, to be recognised
        self._thread = threading.Thread(target=self._run, name="departure", daemon=True)
        self._thread.start()
        self._drain.on_begin = self._wake
        if self._drain.asked:
            self._wake()
        self._preemption = PreemptionWatch(session.settings.membership.notice_place, self._drain.begin)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handler)

    def close(self) -> None:
        """The worker has left."""
        self._preemption.close()
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._drain.on_begin = lambda: None
        self._closed = True
        self._wake()  # closing the pipe would not be seen while a forked process has its other end too
        self._thread.join()
        os.close(self._write)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._pid:  # forked, as a DataLoader's processes are: it is in no job
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        now_s = time.monotonic()
        if self._signalled_s is None:
            self._signalled_s = now_s
        elif now_s - self._signalled_s > TOGETHER_S:
            os._exit(LEFT_IN_ORDER)  # nothing else is safe in a handler
        self._drain.begin(signal.Signals(number).name)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"w")

    def _run(self) -> None:
        with os.fdopen(self._read, "rb", buffering=0) as stream:
            select.select([stream], [], [])
            stream.read(1)
            if not self._closed:
                log.warning("%s: leaves in order", self._drain.reason)
                left_ms = self._session.report_drain()
                log.info("has %g s to leave in order; SIGTERM again ends it at once", left_ms / 1000)
                select.select([stream], [], [], left_ms / 1000)
        if not self._closed:
            log.error(
                "has not left in order within %g s (membership.drain_s), since its script has not come to the next"
                " step; it ends as by kill -9",
                left_ms / 1000,
            )
            os.kill(os.getpid(), signal.SIGKILL)
