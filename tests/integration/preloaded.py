"""Python processes that need not import torch anew: forked from one that has imported it, and nothing of ours.

Run as a program it is that process: it forks for each request that comes on its socket, and reports how each child has
ended. A child is a process of its own, with the arguments, environment and output that were asked for; only what torch,
numba and numpy are made of is there already, which saves a second and a half of processor time at each start. It runs
the script as `python -u` does.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

MESSAGE_BYTES_MAX = 1 << 17


class Preloaded:
    """The process that forks, as seen by who asks."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-u", str(Path(__file__)), str(theirs.fileno())]
            alone = os.environ | {"OMP_NUM_THREADS": "1"}  # threads would not be there after a fork
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=alone)
        self._socket = ours
        self._asking = threading.Lock()
        self._changed = threading.Condition()
        self._started: list[int] = []
        self._codes: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read, name="preloaded")
        self._reader.start()

    def start(self, arguments: list[str], environment: Mapping[str, str]) -> Forked:
        """`arguments`: those of `python -u`: a script, or -P -m and a module, and theirs."""
        output, its_output = os.pipe()
        try:
            with self._asking:
                request = json.dumps({"arguments": arguments, "environment": dict(environment), "folder": os.getcwd()})
                socket.send_fds(self._socket, [request.encode()], [its_output])
                with self._changed:
                    assert self._changed.wait_for(lambda: self._started, 120), "nothing was forked"
                    pid = self._started.pop()
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(its_output)
        return Forked(self, pid, os.fdopen(output, encoding="utf-8", errors="replace"))

    def code(self, pid: int, timeout_s: float | None) -> int | None:
        """How it ended, as subprocess says it; None: it lives."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes, timeout_s)
            return self._codes.get(pid)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait(30)
        self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        while message := self._socket.recv(MESSAGE_BYTES_MAX):
            said = json.loads(message)
            with self._changed:
                if "started" in said:
                    # numbers come back: this one is not the process that had it before
                    self._codes.pop(said["started"], None)
                    self._started.append(said["started"])
                else:
                    self._codes[said["ended"]] = said["code"]
                self._changed.notify_all()


class Forked:
    """What of subprocess.Popen is used here."""

    def __init__(self, parent: Preloaded, pid: int, stdout: IO[str]) -> None:
        self._parent = parent
        self.pid = pid
        self.stdout = stdout

    def poll(self) -> int | None:
        return self._parent.code(self.pid, 0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._parent.code(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# ---- the process that forks


def serve(requests: socket.socket) -> dict[str, Any]:
    """Returns in each child, with what it is to run; in the parent it ends the process."""
    import google.protobuf.message  # noqa: F401
    import numba  # noqa: F401
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import torch  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            report_ended(requests)
        if requests not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, MESSAGE_BYTES_MAX, 1)
        if not message:
            sys.exit()
        (output,) = descriptors
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (woken, wake, requests.detach()):
                os.close(descriptor)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            asked: dict[str, Any] = json.loads(message)
            return asked
        os.close(output)
        requests.send(json.dumps({"started": pid}).encode())


def report_ended(requests: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        requests.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def run(asked: Mapping[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    arguments = list(asked["arguments"])
    del sys.path[0]
    if arguments[:2] == ["-P", "-m"]:
        sys.argv = arguments[2:]
        runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    run(serve(socket.socket(fileno=int(sys.argv[1]))))
