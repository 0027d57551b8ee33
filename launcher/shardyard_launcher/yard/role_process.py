"""One process of a local yard: its start, identity and end.

Owns: the start of a role as a detached process with a log, its ready line, its identity as (pid, time of creation), the
end of its log for messages, how it ended in words. Invariants: a signal goes only to a process with the recorded pid
and time of creation, so never to a stranger with a recycled pid. A process that is to outlive its starter does nothing
until it was recorded (`release`), and ends by itself if that never happens. The previous process's log is kept under
FORMER. Must not know: what the roles do, how many there are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from shardyard.runtime.waits import ExplainedWait

CREATED_TOLERANCE_S: Final = 1.0
"""psutil derives a process's time of creation from the time of boot, which moves when the clock is set."""
READY: Final = "ready "
"""A role prints this and its address, on a line of its own, once it can be used."""
GO: Final = b"go\n"
"""What a process that was started with --awaits-go reads before it begins."""
POLL_S: Final = 0.02
TAIL_BYTES: Final = 16 * 1024
TAIL_LINES: Final = 20
FORMER: Final = ".former"
"""What a log's name gets when the process is started again."""


@dataclass(frozen=True, slots=True)
class RoleProcess:
    """A process as the state file knows it. `address`: where it listens, or will listen once it is `ready`; empty if
    that is not known yet. A process that replaces a dead one gets its address."""

    name: str
    role: str
    pid: int
    created_s: float
    log: Path
    address: str = ""
    ready: bool = False

    @property
    def port(self) -> int:
        """The port of its address; 0 if it has none."""
        port = self.address.rpartition(":")[2]
        return int(port) if port.isascii() and port.isdigit() else 0

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


class RunningRole:
    """A role's process, whether we started it or found it in a state file."""

    def __init__(self, process: RoleProcess, child: subprocess.Popen[bytes] | None = None) -> None:
        self.process = process
        self._child = child

    @property
    def exit_code(self) -> int | None:
        """The exit code, for a child of this process that has ended."""
        return None if self._child is None else self._child.poll()

    @property
    def alive(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return self._find() is not None

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it, as far as this process can know."""
        code = self.exit_code
        return code is not None and code < 0

    @property
    def ending(self) -> str:
        """How it ended, in words that follow its name."""
        code = self.exit_code
        if code is None:
            return "has ended"
        return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def release(self) -> None:
        """Lets a process that was just started begin."""
        if self._child is not None and self._child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.write(GO)
                self._child.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless the process has ended."""
        if self._child is not None:
            self._child.send_signal(number)
            return
        found = self._find()
        if found is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.send_signal(number)

    def wait(self, timeout_ms: int) -> bool:
        """Waits for the end; False if it did not come in time."""
        give_up = time.monotonic() + timeout_ms / 1000
        with ExplainedWait(lambda: f"{self.process} to end") as wait:
            while self.alive:
                if time.monotonic() >= give_up:
                    return False
                wait.tick()
                time.sleep(POLL_S)
        return True

    def read_ready(self) -> bool:
        """Whether the process has printed that it is ready. Notes the address that it printed."""
        if not self.process.ready:
            for line in _read(self.process.log).splitlines():
                if line.startswith(READY):
                    address = line.removeprefix(READY).strip()
                    self.process = replace(self.process, address=address, ready=True)
                    break
        return self.process.ready

    def _find(self) -> psutil.Process | None:
        try:
            found = psutil.Process(self.process.pid)
            same = abs(found.create_time() - self.process.created_s) <= CREATED_TOLERANCE_S
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


def start_role(
    name: str,
    role: str,
    arguments: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str],
    tied: bool,
    address: str = "",
) -> RunningRole:
    """Starts `shardyard ROLE ARGUMENTS` in its own session, printing into `log`. The kernel ends a `tied` process
    when the calling thread ends; any other waits for `release`. `address`: of the process that it replaces. Raises
    OSError."""
    tie = ["--ends-with", str(os.getpid())] if tied else ["--awaits-go"]
    # -P: a file in the working directory must not shadow a module of ours
    command = [sys.executable, "-u", "-P", "-m", "shardyard_launcher.cli", role, *tie, *arguments]
    with contextlib.suppress(FileNotFoundError):
        os.replace(log, log.with_name(log.name + FORMER))
    with log.open("wb") as stream:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if tied else subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env=dict(environment),
            start_new_session=True,
        )
    try:
        created_s = psutil.Process(child.pid).create_time()
    except psutil.NoSuchProcess:
        created_s = time.time()
    return RunningRole(RoleProcess(name, role, child.pid, created_s, log, address), child)


def signal_name(number: int) -> str:
    """For example SIGKILL for 9. A real-time signal has only its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def tail(log: Path) -> str:
    """The last lines of a log, indented, for a message."""
    try:
        text = _read(log, last_bytes=TAIL_BYTES)
    except OSError as error:
        return f"  ({log} cannot be read: {error.strerror})"
    lines = text.splitlines()[-TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines) or "  (nothing)"


def _read(log: Path, last_bytes: int | None = None) -> str:
    with log.open("rb") as stream:
        if last_bytes is not None:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - last_bytes))
        return stream.read().decode("utf-8", "replace")
