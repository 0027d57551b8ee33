"""Processes of a yard under fire: each a place that is taken by one process after the other, and disks that fill up.

Owns: the processes, their logs, one for each start. Invariants: only processes that were started here get a signal, by
the handle that started them; a process gets the same address in each of its lives; `end` leaves none. Must not know:
what goes wrong when.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, ClassVar

from shardyard.runtime.restart_policy import LEFT_IN_ORDER
from tests.support.preloaded import Forked, Preloaded

SCRIPTS = Path(__file__).parent / "scripts"
READY = "ready "
AGAIN_S = 0.3
"""After so long a process that has died by itself is started again."""
STARTS_MAX = 20
END_S = 30.0
ERROR_CODE = 1
"""Of a service that says why it has ended."""
TAIL_LINES = 25
KEPT_ENVIRONMENT = {key: text for key, text in os.environ.items() if not key.startswith("SHARDYARD")}


_LIBC = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD = 438


class Place:
    """`arguments`: a role's, or a script's. `jumping`: its wall clock jumps."""

    preloaded: ClassVar[Preloaded | None] = None
    """What processes whose clock does not jump are forked from; None: each is begun by an interpreter of its own."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        jumping: bool = False,
    ) -> None:
        self.name = name
        self._arguments = arguments
        self._folder = folder
        self._environment = {**KEPT_ENVIRONMENT, "OMP_NUM_THREADS": "1", **environment}
        self._jumping = jumping
        self._process: Forked | subprocess.Popen[bytes] | None = None
        self._due_s: float | None = None
        self._failpoints = ""
        self._back_s: float | None = None
        self.starts = 0
        self.endings: list[str] = []
        """How each process that died by itself ended."""
        self.is_done = False
        """It has ended well, or is not wanted any more."""

    # ---- what is done to it

    def arm(self, failpoints: str) -> None:
        """For the next process that is started."""
        self._failpoints = failpoints

    def start(self) -> None:
        assert self._process is None, self.name
        self.starts += 1
        self._due_s = None
        armed, self._failpoints = self._failpoints, ""
        arguments = [*self._arguments, *(["--failpoints", armed] if armed else [])]
        with self.log.open("wb") as stream:
            self._process = self._begin(arguments, stream)

    def kill(self, down_s: float, failpoints: str = "") -> None:
        """kill -9; the next one is started after `down_s`, with failpoints armed."""
        if self.is_done:
            return
        self._failpoints = failpoints
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = self._back_s = None
        self._due_s = time.monotonic() + down_s

    def pause(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def leave(self, back_s: float) -> None:
        """SIGTERM; when it has left in order, the next one is started after `back_s`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._back_s = back_s

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def cut_connections(self, kept: Collection[int]) -> None:
        """All TCP connections that the process has, but those from or to these ports."""
        if self.pid is None:
            return
        process = os.pidfd_open(self.pid)
        try:
            for number in os.listdir(f"/proc/{self.pid}/fd"):
                with contextlib.suppress(OSError), _copied(process, int(number)) as found:
                    if found.family == socket.AF_INET and not {found.getsockname()[1], found.getpeername()[1]} & {
                        *kept
                    }:
                        found.shutdown(socket.SHUT_RDWR)
        finally:
            os.close(process)

    def tend(self) -> None:
        """Starts what is due, notices what has died. Raises AssertionError for one that dies again and again."""
        if self.is_done:
            return
        if self._process is None:
            if self._due_s is not None and time.monotonic() >= self._due_s:
                self.start()
            return
        code = self._process.poll()
        if code is None:
            return
        self._process = None
        back_s, self._back_s = self._back_s, None
        if code == 0:
            self.is_done = True
            return
        if back_s is not None and code in (LEFT_IN_ORDER, -signal.SIGTERM):
            self._due_s = time.monotonic() + back_s
            return
        self._has_ended(code)
        assert self.starts < STARTS_MAX, "\n".join([*self.endings, self.text])
        self._due_s = time.monotonic() + AGAIN_S

    def give_up(self) -> None:
        """Nobody waits for it any more, if anybody did."""
        self.kill(0)
        self.is_done = True

    def end(self) -> int | None:
        """Ends it, with SIGKILL if it does not when asked; its exit code, None where none was there, or was not ready
        yet: Python has its own way to end then. Where an error was quicker that is one of its endings."""
        was_ready = self.starts > 0 and self.is_ready
        process, self._process, self.is_done = self._process, None, True
        if process is None:
            return None
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        # who had said why, and was on its way out, may be ended by the signal
        if was_ready and code in (ERROR_CODE, -signal.SIGTERM) and last_error(self.text).startswith("error: "):
            self._has_ended(code)
            return None
        return code if was_ready else None

    def _has_ended(self, code: int) -> None:
        """By itself."""
        self.endings.append(f"{self.name}, start {self.starts}: exit code {code}: {last_error(self.text)}")

    # ---- what is known of it

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def log(self) -> Path:
        return self._folder / f"{self.name}.{self.starts}.log"

    @property
    def logs(self) -> list[Path]:
        return [self._folder / f"{self.name}.{number}.log" for number in range(1, self.starts + 1)]

    @property
    def text(self) -> str:
        """What the process that was started last has said."""
        return self.log.read_text("utf-8", "replace") if self.starts else ""

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def is_ready(self) -> bool:
        """It has said so since it was started last."""
        return any(line.startswith(READY) for line in self.text.splitlines())

    def _begin(self, arguments: list[str], stream: IO[bytes]) -> Forked | subprocess.Popen[bytes]:
        program = self._program(arguments)
        if self.preloaded is not None and not self._jumping:
            return self.preloaded.start_into(stream, program, self._environment)
        return subprocess.Popen(
            [sys.executable, "-u", *program],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )

    def _program(self, arguments: list[str]) -> list[str]:
        if self._jumping:
            return [str(SCRIPTS / "jumping.py"), *arguments]
        return arguments if arguments[0].endswith(".py") else ["-P", "-m", "shardyard_launcher.cli", *arguments]


class SmallDisk:
    """A folder with little room: a file system of its own where this process may mount one, else a limit on the size
    of the files that the processes which write there can make."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)],
            capture_output=True,
            check=False,
        )
        self._is_mounted = mounted.returncode == 0
        self._limited: list[int] = []

    def fill(self, writers: Iterable[int]) -> None:
        """No byte more has room. `writers`: the processes that write there."""
        if not self._is_mounted:
            for pid in writers:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
                self._limited.append(pid)
            return
        with contextlib.suppress(OSError), (self.folder / "balloon").open("ab", buffering=0) as balloon:
            while True:
                balloon.write(bytes(4096))

    def free(self) -> None:
        for pid in self._limited:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self._limited.clear()
        (self.folder / "balloon").unlink(missing_ok=True)

    def close(self) -> None:
        if self._is_mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


def _copied(process: int, number: int) -> socket.socket:
    """A socket of another process, by its descriptor there. Raises OSError if that is no socket."""
    descriptor = _LIBC.syscall(_PIDFD_GETFD, process, number, 0)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd failed")
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise


def tail(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-TAIL_LINES:])


def last_error(text: str) -> str:
    """The line that says why a process has ended."""
    every = [line for line in text.splitlines() if line.strip()]
    lines = [line for line in every if not line.startswith((" ", "\t"))]
    if not lines:
        return ""
    if not lines[-1].endswith(":"):
        return lines[-1]
    begin = len(every) - every[::-1].index(lines[-1])
    return " ".join([lines[-1], *[line.strip() for line in every[begin:]]])
