"""Runs a launch: starts its processes, reads their output, notices when they end, sends them signals.

Owns: the processes, pipes and the thread of one launch. It carries out what shardyard_worker.agent.supervision decides.
Invariants: one thread starts, watches and reaps all processes of a launch and outlives them, since the kernel ties a
process's parent-death signal to the thread that started it. Each process leads its own session. What it leaves in its
process group is killed before it is reaped, while no other process can have its id. Must not know: gRPC, the
coordinator, torch.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import logging
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from shardyard.domain import limits
from shardyard.runtime.waits import WaitRegistry
from shardyard_worker.agent.event_log import EventLog
from shardyard_worker.agent.supervision import (
    Effect,
    EmitEvent,
    Ended,
    Event,
    LaunchBegan,
    LinePrinted,
    ProcessPlace,
    RecordedError,
    ReportExit,
    SendSignal,
    Spawn,
    Spawned,
    SpawnFailed,
    StopAsked,
    Supervision,
    TimePassed,
    environment_block,
)

log = logging.getLogger("shardyard.agent")

READ_BYTES: Final = 64 * limits.KIB
ERROR_FILE_BYTES_MAX: Final = limits.MIB
_LINE_END: Final = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True)
class LaunchOrder:
    """The request for a launch, checked."""

    script: Path
    arguments: tuple[str, ...]
    working_directory: Path
    environment: Mapping[str, str]
    """The whole environment, before each process's own variables are added."""
    workers: int
    restarts_max: int
    threads: int
    gpus: tuple[str, ...]
    coordinator: str
    agent: int


class LineSplitter:
    """Splits bytes into lines. A line longer than the limit comes in pieces."""

    def __init__(self, characters_max: int = limits.OUTPUT_LINE_CHARACTERS_MAX) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters_max = characters_max
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        text = self._rest + self._decoder.decode(data)
        # a carriage return at the end may be the first half of a line end
        held = text.endswith("\r")
        *lines, self._rest = _LINE_END.split(text[:-1] if held else text)
        if held:
            self._rest += "\r"
        if len(self._rest) > self._characters_max:
            lines.append(self._rest)
            self._rest = ""
        return self._cut(lines)

    def finish(self) -> list[str]:
        rest = (self._rest + self._decoder.decode(b"", final=True)).rstrip("\r")
        self._rest = ""
        return self._cut([rest]) if rest else []

    def _cut(self, lines: list[str]) -> list[str]:
        width = self._characters_max
        return [line[begin : begin + width] for line in lines for begin in range(0, max(len(line), 1), width)]


class _Pipe:
    """One output stream of a process."""

    def __init__(self, index: int, standard_error: bool, stream: IO[bytes]) -> None:
        self.index = index
        self.standard_error = standard_error
        self.stream = stream
        self._splitter = LineSplitter()
        os.set_blocking(stream.fileno(), False)

    def read(self) -> tuple[list[Event], bool]:
        """Returns what is there now, and True once the stream has ended."""
        try:
            data = os.read(self.stream.fileno(), READ_BYTES)
        except BlockingIOError:
            return [], False
        lines = self._splitter.feed(data) if data else self._splitter.finish()
        return [LinePrinted(self.index, self.standard_error, line) for line in lines], not data

    def drain(self) -> list[Event]:
        """Returns all that is left after the process has ended, even if another process still holds the other end."""
        events: list[Event] = []
        while True:
            found, at_end = self.read()
            events += found
            if at_end:
                return events
            if not found:
                lines = self._splitter.finish()
                return [*events, *(LinePrinted(self.index, self.standard_error, line) for line in lines)]


class _Child:
    def __init__(self, index: int, process: subprocess.Popen[bytes], error_file: Path) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.index = index
        self.process = process
        self.error_file = error_file
        self.pipes = [_Pipe(index, False, process.stdout), _Pipe(index, True, process.stderr)]
        self.ended_fd = os.pidfd_open(process.pid)


class RunningLaunch:
    """A launch and its thread. Any thread may call it; `report_exit` is called from the launch's own thread.
    `wait_registry` explains long waits."""

    def __init__(
        self, number: int, order: LaunchOrder, *, report_exit: Callable[[int, int], None], wait_registry: WaitRegistry
    ) -> None:
        self._wait_registry = wait_registry
        self.number = number
        self.order = order
        self.events = EventLog()
        self._report_exit = report_exit
        self._core = Supervision(workers=order.workers, restarts_max=order.restarts_max)
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._stop_asked: deque[int] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"launch-{number}", daemon=True)

    @property
    def running(self) -> int:
        return self._core.running

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_ms: int) -> None:
        """Sends SIGTERM now, and SIGKILL after the grace time. Does not wait."""
        self._stop_asked.append(grace_ms)
        with self._closing:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b"s")

    def join(self, timeout_ms: int) -> bool:
        """Waits for the end. Returns False if it did not come in time."""
        with self._wait_registry.over(lambda: f"the {self.running} processes of launch {self.number} to end"):
            self._thread.join(timeout_ms / 1000)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="shardyard-launch-", ignore_cleanup_errors=True) as folder:
            self._folder = Path(folder)
            try:
                self._handle(LaunchBegan())
                while self._core.ended is None:
                    self._wait()
            finally:
                for child in list(self._children.values()):
                    self._reap(child)
                self._close()

    def _close(self) -> None:
        with self._closing:
            self._closed = True
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _handle(self, event: Event) -> None:
        """Gives the event to the core, and carries out its effects until there are no more."""
        todo: deque[Event] = deque([event])
        while todo:
            for effect in self._core.handle(todo.popleft(), time.monotonic_ns() // 1_000_000):
                todo.extend(self._carry_out(effect))

    def _carry_out(self, effect: Effect) -> list[Event]:
        match effect:
            case Spawn(index, restarts):
                return [self._spawn(index, restarts)]
            case SendSignal(index, number):
                child = self._children.get(index)
                if child is not None:
                    _signal(child.process.pid, number)
            case ReportExit(pid, exit_code):
                self._report_exit(pid, exit_code)
            case EmitEvent(happening):
                self.events.append(happening)
        return []

    def _spawn(self, index: int, restarts: int) -> Event:
        order = self.order
        error_file = self._folder / f"error-{index}-{restarts}.json"
        place = ProcessPlace(order.coordinator, order.agent, index, order.workers, str(error_file))
        gpu = order.gpus[index % len(order.gpus)] if order.gpus else None
        try:
            process = subprocess.Popen(
                _command(order.script, order.arguments),
                cwd=order.working_directory,
                env=environment_block(order.environment, place, threads=order.threads, gpu=gpu),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            return SpawnFailed(index, str(error), time.time())
        child = _Child(index, process, error_file)
        self._children[index] = child
        self._selector.register(child.ended_fd, selectors.EVENT_READ, child)
        for pipe in child.pipes:
            self._selector.register(pipe.stream, selectors.EVENT_READ, pipe)
        log.debug("launch %d: process %d started, pid %d", self.number, index, process.pid)
        return Spawned(index, process.pid)

    def _wait(self) -> None:
        due_ms = self._core.next_due_ms()
        timeout = None if due_ms is None else max(0.0, due_ms / 1000 - time.monotonic())
        ended: list[_Child] = []
        for key, _ in self._selector.select(timeout):
            match key.data:
                case _Pipe() as pipe:
                    self._read(pipe)
                case _Child() as child:
                    ended.append(child)
                case _:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
        for child in ended:
            for event in self._reap(child):
                self._handle(event)
        while self._stop_asked:
            self._handle(StopAsked(self._stop_asked.popleft()))
        self._handle(TimePassed())

    def _read(self, pipe: _Pipe) -> None:
        events, at_end = pipe.read()
        if at_end:
            self._selector.unregister(pipe.stream)
            pipe.stream.close()
        for event in events:
            self._handle(event)

    def _reap(self, child: _Child) -> list[Event]:
        """Kills what is left of a process and its group. Returns its last lines, then its end."""
        now_s = time.time()
        _signal(child.process.pid, signal.SIGKILL)
        pid = child.process.pid
        # a process that is stuck in the kernel is gone only after the kernel call returns
        with self._wait_registry.over(lambda: f"process {pid} of launch {self.number}, which was killed, to be gone"):
            exit_code = child.process.wait()
        del self._children[child.index]
        self._selector.unregister(child.ended_fd)
        os.close(child.ended_fd)
        events: list[Event] = []
        for pipe in child.pipes:
            if not pipe.stream.closed:
                events += pipe.drain()
                self._selector.unregister(pipe.stream)
                pipe.stream.close()
        return [*events, Ended(child.index, exit_code, read_error_file(child.error_file), now_s)]


def _command(script: Path, arguments: Sequence[str]) -> list[str]:
    # -P: no file of the working directory may shadow the standard library before the script's own path is set
    bootstrap = [sys.executable, "-u", "-P", "-m", "shardyard_worker.agent.bootstrap"]
    return [*bootstrap, str(os.getpid()), str(script), *arguments]


def _signal(pid: int, number: signal.Signals) -> None:
    """Signals a child that is not reaped yet, so the id is still its own. SIGKILL goes to its whole group. Other
    signals go to the child alone, so that a script can end its own children in order."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if number is signal.SIGKILL:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def read_error_file(path: Path) -> RecordedError | None:
    """The error that a process wrote, if the file is there and well-formed. The script may have damaged it."""
    try:
        with path.open("rb") as stream:
            entry = json.loads(stream.read(ERROR_FILE_BYTES_MAX))
        return RecordedError(float(entry["time"]), str(entry["type"]), str(entry["message"]), str(entry["traceback"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("unreadable error file %s: %s", path, error)
        return None
