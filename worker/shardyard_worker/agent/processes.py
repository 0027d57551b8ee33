"""The training processes of a launch, as its thread sees them, and the fork server that starts them.

Owns: the fork server of a launch, pipes and descriptors of each process. Invariants: no call blocks on a process that
runs, or on the imports of the fork server; a process keeps its id until it is reaped. Must not know: supervision,
events, what a script does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from shardyard_worker.agent.environment import LaunchOrder, environment_block
from shardyard_worker.agent.fork_server import MESSAGE_BYTES_MAX
from shardyard_worker.agent.pipes import Pipe


class ForkServerEnded(Exception):
    """It was killed, or could not import anything; its processes have ended with it."""


class Child:
    """A process that runs."""

    def __init__(self, index: int, pid: int, pipes: list[Pipe], error_file: Path) -> None:
        self.index = index
        self.pid = pid
        self.pipes = pipes
        self.error_file = error_file
        self.ended_fd = os.pidfd_open(pid)

    def signal(self, number: signal.Signals) -> None:
        """The process is not reaped yet, so the id is still its own. SIGKILL goes to its whole group. Other signals go
        to the process alone, so that a script can end its own children in order."""
        with suppress(ProcessLookupError, PermissionError):
            if number is signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def close(self) -> None:
        os.close(self.ended_fd)


@dataclass
class _Start:
    """A process that is asked for."""

    index: int
    error_file: Path
    pipes: list[Pipe]
    withdrawn: bool = False


class ForkServer:
    """The fork server of a launch and what was asked of it. For the launch's thread."""

    def __init__(self, order: LaunchOrder) -> None:
        """Raises OSError."""
        self._order = order
        self._environment = environment_block(order, 0, "")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                # -P: no file of the working directory may shadow the standard library until the script's path is set
                program = [sys.executable, "-u", "-P", "-m", "shardyard_worker.agent.fork_server"]
                self._process = subprocess.Popen(
                    [*program, str(os.getpid()), str(theirs.fileno()), str(order.script), *order.arguments],
                    cwd=order.working_directory,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                )
        except BaseException:
            ours.close()
            raise
        assert self._process.stdout is not None
        self._socket = ours
        self._asked: deque[_Start] = deque()
        self._started: list[Child] = []
        self.pipe = Pipe(0, True, self._process.stdout)
        """What the imports print."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._socket.fileno()

    def fork(self, index: int, error_file: Path) -> None:
        """Asks for process `index`, which `started` returns later. Raises OSError."""
        block = environment_block(self._order, index, str(error_file))
        own = {name: value for name, value in block.items() if self._environment.get(name) != value}
        with ExitStack() as ends:
            reads, writes = [], []
            for _ in range(2):
                read, write = os.pipe()
                ends.callback(os.close, write)
                reads.append(os.fdopen(read, "rb", buffering=0))
                writes.append(write)
            with suppress(ConnectionError):  # `started` tells that it has ended
                socket.send_fds(self._socket, [json.dumps({"fork": own}).encode()], writes)
        output, error_output = reads
        self._asked.append(_Start(index, error_file, [Pipe(index, False, output), Pipe(index, True, error_output)]))

    def withdraw(self) -> list[int]:
        """Returns the processes that were asked for and have not started. They will not."""
        waiting = [start for start in self._asked if not start.withdrawn]
        for start in waiting:
            start.withdrawn = True
        return [start.index for start in waiting]

    def started(self) -> list[Child]:
        """Returns the processes that have started since the last call; call it when the socket can be read, and after
        `reap`. Raises ForkServerEnded."""
        with suppress(BlockingIOError):
            while True:
                self._receive(socket.MSG_DONTWAIT)
        found, self._started = self._started, []
        return found

    def reap(self, child: Child) -> int:
        """Returns the exit code of a process that has ended or was killed; waits until the kernel has ended it."""
        try:
            self._socket.send(json.dumps({"reap": child.pid}).encode())
            while (exit_code := self._receive()) is None:
                """Processes that were asked for before have started."""
        except (ConnectionError, ForkServerEnded):
            return -signal.SIGKILL  # it has ended with the fork server
        return exit_code

    def _receive(self, flags: int = 0) -> int | None:
        """Takes one answer. Returns an exit code."""
        try:
            message = self._socket.recv(MESSAGE_BYTES_MAX, flags)
        except ConnectionError:
            message = b""
        if not message:
            raise ForkServerEnded
        answer = json.loads(message)
        if "exit_code" in answer:
            return int(answer["exit_code"])
        start = self._asked.popleft()
        child = Child(start.index, answer["pid"], start.pipes, start.error_file)
        if start.withdrawn:
            child.signal(signal.SIGKILL)
            child.close()
            for pipe in child.pipes:
                pipe.stream.close()
        else:
            self._started.append(child)
        return None

    def close(self) -> int:
        """Ends it, and with it all its processes. Returns its exit code."""
        self._process.kill()
        exit_code = self._process.wait()
        self._socket.close()
        for start in self._asked:
            for pipe in start.pipes:
                pipe.stream.close()
        return exit_code
