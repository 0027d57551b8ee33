"""Python processes that start without importing anything: each is forked from a process that has imported all modules
and loaded the compiled kernels. This saves several seconds of processor time at each start.

This file, run as a program, is the process that forks. It forks for each request on its socket, and reports how each
child has ended. A child is a process of its own, with the arguments, environment and output of the request, and runs
the script as `python -u` does. It ends as that does too, but its modules are not taken apart: this would copy most of
what it was forked with, for half a second. Tests that start `shardyard` or `make up` do not use this, so they test the
real start and end.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

MESSAGE_BYTES_MAX = 1 << 17
TIE = "--ends-with"


class Preloaded:
    """The client of the process that forks."""

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
        self._used = False
        self._reader = threading.Thread(target=self._read, name="preloaded")
        self._reader.start()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Forked:
        """`arguments`: as for `python -u`: a script, or -P -m and a module, then its own arguments."""
        output, its_output = os.pipe()
        try:
            pid = self._fork(arguments, environment, its_output, session=False)
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(its_output)
        return Forked(self, pid, os.fdopen(output, encoding="utf-8", errors="replace"))

    def start_into(
        self, stream: IO[bytes], arguments: Sequence[str], environment: Mapping[str, str], *, session: bool = False
    ) -> Forked:
        """As `start`, but the output goes into the file."""
        return Forked(self, self._fork(arguments, environment, stream.fileno(), session=session))

    def as_subprocess(self) -> SimpleNamespace:
        """Takes the place of the module `subprocess` in shardyard_launcher.yard.role_process, so that the launcher
        forks its roles from here."""

        def start(command: list[str], *, stdin: int, stdout: IO[bytes], env: Mapping[str, str], **rest: Any) -> Forked:
            assert (rest["stderr"], rest["start_new_session"], stdin) == (subprocess.STDOUT, True, subprocess.DEVNULL)
            assert command[1:5] == ["-u", "-P", "-m", "shardyard_launcher.cli"]
            return self.start_into(stdout, command[2:], env, session=True)

        return SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)

    def _fork(self, arguments: Sequence[str], environment: Mapping[str, str], output: int, *, session: bool) -> int:
        given = list(arguments)
        if TIE in given:  # the process that forks ends with this one
            given[given.index(TIE) + 1] = str(self._process.pid)
        asked = {
            "arguments": given,
            "environment": dict(environment),
            "folder": os.getcwd(),
            "session": session,
        }
        with self._asking:
            self._used = True
            socket.send_fds(self._socket, [json.dumps(asked).encode()], [output])
            with self._changed:
                assert self._changed.wait_for(lambda: self._started, 120), "nothing was forked"
                return self._started.pop()

    def code(self, pid: int, timeout_s: float | None) -> int | None:
        """The exit code, as subprocess reports it. None: the process is alive."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes, timeout_s)
            return self._codes.get(pid)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        if not self._used:  # it may still be loading
            self._process.kill()
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
    """The part of subprocess.Popen that tests use."""

    stdin = None

    def __init__(self, parent: Preloaded, pid: int, stdout: IO[str] | None = None) -> None:
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
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                self.wait(30)  # it has ended, and the news of that is on its way

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# ---- the process that forks


def serve(requests: socket.socket) -> dict[str, Any]:
    """Returns in each child, with the request that it has to run. In the parent it never returns."""
    load()
    # what torch has registered goes with the process
    for each in weakref.finalize._registry:
        each.atexit = False
    # no collection of a child looks at what it was forked with: that would copy those pages, at its end too
    gc.collect()
    gc.freeze()
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


def load() -> None:
    """Imports and warms all that processes of a yard need, except the command line, which runs as a program."""
    for name in (
        "shardyard_coordinator.service.process",
        "shardyard_launcher.commands.roles",
        "shardyard_ps_server.service.process",
        "shardyard_worker.agent.process",
        "shardyard_worker.agent.bootstrap",
        "shardyard_worker.job.connect",
        "torch._dynamo",  # the first optimizer of torch imports it, for two seconds
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
    ):
        importlib.import_module(name)
    from shardyard.codecs.format import finiteness
    from shardyard.codecs.warmup import warm_decoders
    from shardyard.runtime import failpoints
    from shardyard_ps_server.jit import optimizer_warmup
    from shardyard_ps_server.rows import partition_tables

    optimizer_warmup.warm(optimizer_warmup.every_loop())
    warm_decoders()
    finiteness.warm()
    partition_tables.warm()
    assert not failpoints._armed, "each child arms its own"


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
    if asked["session"]:
        os.setsid()
    of_grpc = {name: value for name, value in os.environ.items() if name.startswith("GRPC_")}  # see shardyard.transport
    os.environ.clear()
    os.environ.update(of_grpc | asked["environment"])
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


def end(code: int) -> NoReturn:
    """Does what the interpreter does at its end, in its order, and leaves out that modules are taken apart."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        run(serve(socket.socket(fileno=int(sys.argv[1]))))
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            raise  # the interpreter prints it
        end(ended.code or 0)
    end(0)
