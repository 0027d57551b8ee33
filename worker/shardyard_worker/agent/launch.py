"""Runs a launch: starts its processes, reads and keeps their output, notices when they end, sends them signals.

Owns: the thread of one launch, and the log lines about its end. It carries out what
shardyard_worker.agent.supervision decides. Invariants: one thread starts the fork server, and watches and reaps all
processes of a launch, and outlives them, since the kernel ties a process's parent-death signal to the thread that
started it. What a process leaves in its process group is killed before it is reaped, while no other process can have
its id. Must not know: gRPC, the coordinator, torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from shardyard.domain import limits
from shardyard.runtime.restart_policy import LEFT_IN_ORDER
from shardyard.runtime.waits import WaitRegistry
from shardyard.wire.v1 import agent_pb2 as wire
from shardyard_worker.agent.environment import LaunchOrder
from shardyard_worker.agent.event_log import EventLog
from shardyard_worker.agent.kept_output import KeptOutput
from shardyard_worker.agent.launch_folders import Ending, LaunchFolder, LaunchRecord
from shardyard_worker.agent.pipes import Pipe
from shardyard_worker.agent.processes import Child, ForkServer, ForkServerEnded
from shardyard_worker.agent.supervision import Effect, RecordedError, SendSignal, Spawn, Supervision

log = logging.getLogger("shardyard.agent")

ERROR_FILE_BYTES_MAX: Final = limits.MIB


class RunningLaunch:
    """A launch and its thread. Any thread may call it; `report_exit` is called from the launch's own thread.
    `wait_registry` explains long waits. `folder`: its own, which it gives up at its end."""

    def __init__(
        self,
        record: LaunchRecord,
        folder: LaunchFolder,
        order: LaunchOrder,
        *,
        report_exit: Callable[[int, int], object],
        wait_registry: WaitRegistry,
    ) -> None:
        self._wait_registry = wait_registry
        self._folder = folder
        self._output = KeptOutput(record.number, folder.path, order.workers)
        self.record = record
        self._recording = threading.Lock()
        self.order = order
        # the events of a launch that is resumed have higher numbers than those before, which are gone
        self.events = EventLog(first=int(1e6 * max(record.resumed_s, default=0.0)))
        if record.resumed_s:
            what = "has left" if record.left else "was killed"
            self._output.say(f"the agent {what}; the next agent starts the launch again")
            self.record = replace(record, left=False)
        self._report_exit = report_exit
        self._supervision = Supervision(
            workers=order.workers, restarts_max=order.restarts_max, restarts_window_ms=order.restarts_window_ms
        )
        self._fork_server: ForkServer | None = None
        self._children: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._stop_asked: deque[tuple[int, bool]] = deque()
        """Grace times, each with whether the agent leaves."""
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"launch-{record.number}", daemon=True)

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def running(self) -> int:
        return self._supervision.running

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in list(self._children.values())]

    def start(self) -> None:
        self._thread.start()

    def forgo(self) -> None:
        """From now on no other agent launches it again, unless its own has left in order."""
        with self._recording:
            if self.record.request and self.record.ended is None and not self.record.left:
                self.record = replace(self.record, request="")
                with contextlib.suppress(OSError):
                    self._folder.write(self.record)

    def stop(self, grace_ms: int, *, agent_leaves: bool = False) -> None:
        """Sends SIGTERM now, and SIGKILL after the grace time. Does not wait. `agent_leaves`: the script can go on
        elsewhere."""
        self._stop_asked.append((grace_ms, agent_leaves))
        with self._closing:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b"s")

    def hand_over(self, launch_elsewhere: Callable[[], str]) -> None:
        """After the end, if the record says that the agent has left: `launch_elsewhere` launches the script on another
        agent, and returns which launch that is, or nothing. Then the next agent on the same folder launches it."""
        if not self._folder.take():
            return  # an agent on the same folder has launched it
        where = launch_elsewhere()
        if not where:
            self._folder.release()
            log.warning(
                "launch %d goes on when an agent is started with the state folder of this one, since no other agent of"
                " the yard has taken it",
                self.number,
            )
            return
        log.info("launch %d goes on as %s", self.number, where)
        ending = Ending(time.time(), LEFT_IN_ORDER, 0, f"its agent has left; it goes on as {where}", stopped=True)
        with contextlib.suppress(OSError):
            self._folder.end(replace(self.record, ended=ending, request=""))

    @property
    def is_over(self) -> bool:
        """Whether all its processes are gone and its thread has ended."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._carry_out(self._supervision.begin())
            while self._supervision.ended is None:
                self._wait()
                self._output.flush()
        finally:
            for child in list(self._children.values()):
                self._reap(child)
            if self._fork_server is not None:
                self._end_fork_server(self._fork_server)
            self._output.close()
            self._folder.release()
            self._close()

    def _close(self) -> None:
        with self._closing:
            self._closed = True
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Spawn(index, restarts):
                    self._carry_out(self._spawn(index, restarts))
                case SendSignal(index, number):
                    child = self._children.get(index)
                    if child is not None:
                        child.signal(number)
                case wire.LaunchEvent() as event:
                    self._output.add(event)
                    if event.HasField("exited"):
                        self._on_exit(event.exited)
                    elif event.HasField("ended"):
                        self._on_end(event.ended)
                    self.events.append(event)

    def _on_exit(self, exited: wire.ProcessExited) -> None:
        who = f"process {exited.local_index} (pid {exited.pid})"
        if exited.will_restart:
            log.warning("launch %d: %s %s; it is started again", self.number, who, exited.ending)
        elif exited.exit_code == LEFT_IN_ORDER:
            log.info("launch %d: %s %s", self.number, who, exited.ending)
        self._report_exit(exited.pid, exited.exit_code)

    def _on_end(self, ended: wire.LaunchEnded) -> None:
        """Keeps how the launch ended, before those who watch it learn that; or that it has not, if its agent leaves and
        nobody else launches it again."""
        self._output.flush()
        ending = Ending(time.time(), ended.exit_code, ended.first_error_index, ended.first_error, stopped=ended.stopped)
        with self._recording:
            goes_on = ended.agent_leaves and bool(self.record.request)
            changes = {"left": True} if goes_on else {"ended": ending, "request": ""}
            self.record = replace(self.record, **changes)
            try:
                if goes_on:
                    self._folder.write(self.record)
                else:
                    self._folder.end(self.record)
            except OSError as error:
                log.error("launch %d: its end is not kept (%s) in %s", self.number, error.strerror, self._folder.path)
        what = f"launch {self.number} of {self.order.script}"
        after = f"after {ending.time_s - self.record.started_s:.1f} s"
        if not ended.exit_code:
            log.info("%s ended well, %s", what, after)
        elif ended.stopped:
            log.info("%s ended, %s: %s", what, after, ended.first_error)
        else:
            log.error(
                "%s failed, %s; process %d failed first:\n%s\nits output is in %s",
                *(what, after, ended.first_error_index, ended.first_error, self._folder.path),
            )

    def _spawn(self, index: int, restarts: int) -> list[Effect]:
        try:
            if self._fork_server is None:
                self._fork_server = server = ForkServer(self.order)
                self._selector.register(server, selectors.EVENT_READ, server)
                self._selector.register(server.pipe.stream, selectors.EVENT_READ, server.pipe)
            self._fork_server.fork(index, self._folder.path / f"error-{index}-{restarts}.json")
        except OSError as error:
            return self._supervision.spawn_failed(index, str(error), time.time(), _now_ms())
        return []

    def _take_started(self) -> None:
        """Notices which processes the fork server has started, or that it has ended, and its processes with it."""
        server = self._fork_server
        if server is None:
            return
        try:
            started = server.started()
        except ForkServerEnded:
            self._lose_fork_server(server)
            return
        for child in started:
            self._children[child.index] = child
            self._selector.register(child.ended_fd, selectors.EVENT_READ, child)
            for pipe in child.pipes:
                self._selector.register(pipe.stream, selectors.EVENT_READ, pipe)
            log.debug("launch %d: process %d started, pid %d", self.number, child.index, child.pid)
            self._carry_out(self._supervision.spawned(child.index, child.pid))

    def _lose_fork_server(self, server: ForkServer) -> None:
        """Another one is started with the first process that is started again."""
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        waiting = server.withdraw()
        exit_code = self._end_fork_server(server)
        log.warning("launch %d: the fork server (pid %d) ended: exit code %d", self.number, server.pid, exit_code)
        for child in list(self._children.values()):
            self._reap(child)
        for index in waiting:
            self._carry_out(self._supervision.spawned(index, server.pid))
            self._carry_out(self._supervision.exited(index, exit_code, None, time.time(), _now_ms()))

    def _end_fork_server(self, server: ForkServer) -> int:
        """Its processes are reaped, or end with it. Returns its exit code."""
        self._fork_server = None
        self._selector.unregister(server)
        with self._wait_registry.over(lambda: f"the fork server (pid {server.pid}) of launch {self.number} to be gone"):
            exit_code = server.close()
        self._end_pipe(server.pipe)
        return exit_code

    def _wait(self) -> None:
        due_ms = self._supervision.next_due_ms()
        timeout = None if due_ms is None else max(0.0, due_ms / 1000 - time.monotonic())
        ended: list[Child] = []
        answered = False
        for key, _ in self._selector.select(timeout):
            match key.data:
                case Pipe() as pipe:
                    self._read(pipe)
                case Child() as child:
                    ended.append(child)
                case ForkServer():
                    answered = True
                case _:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
        if answered:
            self._take_started()
        for child in ended:
            self._reap(child)
        while self._stop_asked:
            grace_ms, agent_leaves = self._stop_asked.popleft()
            order = self._supervision.leave if agent_leaves else self._supervision.stop
            self._carry_out(order(grace_ms, _now_ms()))
            for index in self._fork_server.withdraw() if self._fork_server is not None else ():
                self._carry_out(self._supervision.withdrawn(index))
        self._carry_out(self._supervision.time_passed(_now_ms()))

    def _read(self, pipe: Pipe) -> None:
        lines, at_end = pipe.read()
        if at_end:
            self._selector.unregister(pipe.stream)
            pipe.stream.close()
        self._show(pipe, lines)

    def _show(self, pipe: Pipe, lines: list[str]) -> None:
        for line in lines:
            self._carry_out(self._supervision.printed(pipe.index, pipe.standard_error, line))

    def _reap(self, child: Child) -> None:
        """Kills what is left of a process and its group, and handles its last lines and its end."""
        if self._children.get(child.index) is not child:
            return  # it was reaped with the fork server
        now_s = time.time()
        child.signal(signal.SIGKILL)
        # a process that is stuck in the kernel is gone only after the kernel call returns
        with self._wait_registry.over(
            lambda: f"process {child.pid} of launch {self.number}, which was killed, to be gone"
        ):
            exit_code = -signal.SIGKILL if self._fork_server is None else self._fork_server.reap(child)
        del self._children[child.index]
        self._selector.unregister(child.ended_fd)
        child.close()
        for pipe in child.pipes:
            self._end_pipe(pipe)
        error = read_error_file(child.error_file)
        child.error_file.unlink(missing_ok=True)
        self._carry_out(self._supervision.exited(child.index, exit_code, error, now_s, _now_ms()))
        self._take_started()

    def _end_pipe(self, pipe: Pipe) -> None:
        """Shows its last lines."""
        if not pipe.stream.closed:
            lines = pipe.drain()
            self._selector.unregister(pipe.stream)
            pipe.stream.close()
            self._show(pipe, lines)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def read_error_file(path: Path) -> RecordedError | None:
    """The error that a process wrote, if the file is there and well-formed. The script may have damaged it."""
    try:
        with path.open("rb") as stream:
            entry = json.loads(stream.read(ERROR_FILE_BYTES_MAX))
        # a lone surrogate, which JSON can contain, cannot be sent
        kind, message, traceback = (
            str(entry[name]).encode("utf-8", "replace").decode() for name in ("type", "message", "traceback")
        )
        helps = entry["new_process_helps"] is True
        return RecordedError(float(entry["time"]), kind, message, traceback, new_process_helps=helps)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("unreadable error file %s: %s", path, error)
        return None
