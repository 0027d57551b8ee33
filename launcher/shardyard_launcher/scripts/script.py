"""A training script launched through an agent, and watched until it ends.

Owns: the launch; the stream of its events, which is resumed after a break; a new launch if the agent died and came back
(its processes died with it, as if a signal had killed each); the stop. Invariants: `follow` returns or raises within
seconds after `stop` is set or `check` raises, and the script's processes have ended then. Must not know: how the yard
was started, how progress is drawn.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from shardyard.config.assignments import Layer
from shardyard.config.configuration import CONFIG_VARIABLE, PREFIX, PROCESS_VARIABLES, Flag, Loaded, environment_name
from shardyard.domain import errors
from shardyard.runtime.waits import ExplainedWait, WaitRegistry
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.interfaces import Peer
from shardyard.wire import methods
from shardyard.wire.v1 import agent_pb2 as agent_wire
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.terminal.coordinator_client import CoordinatorClient
from shardyard_worker.agent.error_report import ShownOutput

CALL_TIMEOUT_MS: Final = 10_000
WATCH_TIMEOUT_MS: Final = 3_600_000
"""A stream, too, has a deadline; a longer launch is watched by several, one after the other."""
AGENT_PATIENCE_MS: Final = 5_000
"""How long an agent may not answer before the launch is given up."""
STOP_MS_MAX: Final = 12_000
GRACE_MS: Final = 5_000
EVENTS_QUEUED_MAX: Final = 10_000
PROGRESS_MS: Final = 1_000
FIRST_STEP_MS: Final = 200
"""How often status is asked for, and how often before the first step of a job."""
SLICE_S: Final = 0.1
WORKERS_EXPECTED: Final = "job.workers_expected"


class Display(Protocol):
    """Where output and progress go."""

    def output(self, index: int, standard_error: bool, line: str) -> None: ...

    def note(self, text: str) -> None: ...

    def progress(self, status: wire.StatusReply, pids: frozenset[int], *, last: bool = False) -> None:
        """`pids`: the script's processes. `last`: it has ended."""


@dataclass(frozen=True)
class Script:
    """What to launch. `workers` 0: as many as the agent was configured for."""

    path: Path
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    workers: int
    restarts_max: int
    restarts_window_ms: int


def launch_environment(
    environment: Mapping[str, str],
    loaded: Loaded,
    *,
    config: str | None,
    sets: Sequence[tuple[str, Flag]],
    whole: bool,
) -> dict[str, str]:
    """The launcher's settings, from file, environment and flags, for the environment of training processes, so that
    they see the same values. With `whole` (the agent is on this machine), the rest of the launcher's environment
    too."""
    taken = {
        name: text
        for name, text in environment.items()
        if (whole or name.startswith(PREFIX)) and name not in PROCESS_VARIABLES and name != "SHARDYARD_COORDINATOR"
    }
    if config:
        taken[CONFIG_VARIABLE] = os.path.abspath(config)
    for path, flag in sets:
        if flag.value is not None:
            taken[environment_name(path)] = str(flag.value)
            if path == "job.name":
                taken.pop("SHARDYARD_JOB", None)
    # an agent says how many it starts; a file that says more knows of other agents
    if loaded.origins[WORKERS_EXPECTED].layer is Layer.FILE:
        taken[environment_name(WORKERS_EXPECTED)] = str(loaded.settings.job.workers_expected)
    return taken


class ScriptRun:
    """One launch on one agent. For one thread; a second thread, its own, polls the status."""

    def __init__(self, coordinator: str, agent: str) -> None:
        network = GrpcNetwork()
        self._coordinator = network.connect(coordinator, name="coordinator", unavailable=errors.CoordinatorUnavailable)
        self._agent = network.connect(agent, name="agent", unavailable=errors.Unavailable)
        self._launch = 0
        self._events: queue.Queue[agent_wire.LaunchEvent | errors.ShardyardError] = queue.Queue(EVENTS_QUEUED_MAX)
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._pids: set[int] = set()
        self._shown = ShownOutput()
        self._script: Script | None = None
        self._launched_again = 0
        self._wait_registry = WaitRegistry()
        self.workers = 0

    def launch(self, script: Script) -> None:
        """Raises what the agent answers: InvalidRequest, LaunchRefused, NotReady, Unavailable."""
        request = agent_wire.LaunchRequest(
            script=str(script.path.absolute()),
            arguments=script.arguments,
            working_directory=os.getcwd(),
            environment=script.environment,
            workers=script.workers,
            restarts_max=script.restarts_max,
            restarts_window_ms=script.restarts_window_ms,
        )
        with self._wait_registry.over(lambda: f"the {self._agent.name} to launch {script.path}"):
            reply = self._agent.call(methods.LAUNCH, request, timeout_ms=CALL_TIMEOUT_MS)
        self._launch, self.workers, self._script = reply.launch, reply.workers, script
        self._watcher = threading.Thread(target=self._watch, name="watch-launch", daemon=True)
        self._watcher.start()

    def follow(
        self, display: Display, *, stop: threading.Event, check: Callable[[], list[str]]
    ) -> agent_wire.LaunchEnded | None:
        """Shows what happens, and what `check` reports, until the launch has ended. Returns None if `stop` was set
        first. Raises what `check` raises, and Unavailable when the agent is gone. The script's processes are stopped in
        any case."""
        ended: agent_wire.LaunchEnded | None = None
        poller = _StatusPoller(self._coordinator)
        try:
            while not stop.is_set():
                try:
                    ended = self._show_next(display)
                except errors.NotFound as error:
                    self._launch_again(display, stop, error)
                if ended is not None:
                    break
                for line in check():
                    display.note(line)
                status = poller.take()
                if status is not None:
                    display.progress(status, frozenset(self._pids))
            return ended
        finally:
            poller.close()
            if ended is None:
                self._stop(display)
            else:
                self._show_last(display)

    def _launch_again(self, display: Display, stop: threading.Event, lost: errors.NotFound) -> None:
        """Launches the script again, because the agent that launched it was replaced by another one that does not know
        it."""
        script, agent = self._script, self._agent.name
        assert script is not None
        if self._launched_again >= script.restarts_max:
            raise errors.Unavailable(
                f"the {agent} died, and the script's processes with it ({lost.what})",
                todo=f"start the script again; it is launched again by itself {script.restarts_max} times at most "
                "(yard.restarts_max)",
            ) from lost
        self._launched_again += 1
        display.note(f"the {agent} died, and the script's processes with it; it is launched again")
        if self._watcher is not None:
            with self._wait_registry.over(lambda: f"the last events of the launch that the {agent} has lost"):
                self._watcher.join(CALL_TIMEOUT_MS / 1000)
        give_up = time.monotonic() + AGENT_PATIENCE_MS / 1000
        while not stop.is_set():
            try:
                self.launch(script)
                return
            except errors.NotReady:
                if time.monotonic() >= give_up:
                    raise
                stop.wait(SLICE_S)

    def first_error(self, ended: agent_wire.LaunchEnded) -> str:
        """The error of the first failed process, without a traceback that its output has shown already."""
        return self._shown.tell(ended.first_error_index, ended.first_error, several=self.workers > 1)

    def close(self) -> None:
        self._closing.set()
        self._wait_registry.close()
        self._agent.close()
        self._coordinator.close()
        if self._watcher is not None:
            self._watcher.join(5)

    def _show_next(self, display: Display) -> agent_wire.LaunchEnded | None:
        try:
            event = self._events.get(timeout=SLICE_S)
        except queue.Empty:
            return None
        if isinstance(event, errors.ShardyardError):
            raise event
        match event.WhichOneof("event"):
            case "started":
                self._pids.add(event.started.pid)
            case "output":
                said = event.output
                self._shown.note(said.local_index, said.standard_error, said.line)
                display.output(said.local_index, said.standard_error, said.line)
            case "exited" if event.exited.will_restart:
                exited = event.exited
                display.note(
                    f"process {exited.local_index} (pid {exited.pid}) {exited.ending}; the agent starts it again"
                )
            case "ended":
                return event.ended
        return None

    def _show_last(self, display: Display) -> None:
        with contextlib.suppress(errors.ShardyardError):
            status = self._coordinator.call(methods.STATUS, wire.StatusRequest(), timeout_ms=2_000)
            display.progress(status, frozenset(self._pids), last=True)

    def _stop(self, display: Display) -> None:
        """Stops the launch and shows what it still prints."""
        request = agent_wire.StopRequest(launch=self._launch, grace_ms=GRACE_MS)
        try:
            self._agent.call(methods.STOP, request, timeout_ms=2_000)
            give_up = time.monotonic() + STOP_MS_MAX / 1000
            with ExplainedWait(lambda: f"the {self._agent.name} to stop launch {self._launch}") as wait:
                while time.monotonic() < give_up and self._show_next(display) is None:
                    wait.tick()
        except errors.ShardyardError as error:
            # its processes die with it
            display.note(f"the agent no longer answers: {error.what}")

    def _watch(self) -> None:
        wanted = 0
        silent_since: float | None = None
        while not self._closing.is_set():
            request = agent_wire.WatchRequest(launch=self._launch, next_event=wanted)
            try:
                for event in self._agent.receive(methods.WATCH, request, timeout_ms=WATCH_TIMEOUT_MS):
                    wanted, silent_since = event.number + 1, None
                    self._put(event)
                    if event.HasField("ended"):
                        return
            except errors.Unavailable as error:
                now = time.monotonic()
                silent_since = now if silent_since is None else silent_since
                if not isinstance(error, errors.DeadlineExceeded) and (now - silent_since) * 1000 > AGENT_PATIENCE_MS:
                    self._put(error)
                    return
                self._closing.wait(SLICE_S)
            except errors.ShardyardError as error:
                self._put(error)
                return

    def _put(self, event: agent_wire.LaunchEvent | errors.ShardyardError) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(queue.Full):
                self._events.put(event, timeout=SLICE_S)
                return


class _StatusPoller:
    """Asks the coordinator for its status in a thread, so that a slow answer delays no output: once a second, and more
    often until a job has taken its first step."""

    def __init__(self, coordinator: Peer) -> None:
        self._coordinator = coordinator
        self._latest: queue.Queue[wire.StatusReply] = queue.Queue(1)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="poll-status", daemon=True)
        self._thread.start()

    def take(self) -> wire.StatusReply | None:
        try:
            return self._latest.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5)

    def _run(self) -> None:
        pause_ms = FIRST_STEP_MS
        while not self._closing.wait(pause_ms / 1000):
            # errors of the coordinator are noticed and reported elsewhere
            with contextlib.suppress(errors.ShardyardError, queue.Full):
                status = self._coordinator.call(methods.STATUS, wire.StatusRequest(), timeout_ms=PROGRESS_MS)
                if any(job.state == wire.JOB_STATE_RUNNING and job.samples for job in status.jobs):
                    pause_ms = PROGRESS_MS
                self._latest.put_nowait(status)


def find_agent(coordinator: str) -> str:
    """The address of an agent of a running yard. Raises CoordinatorUnavailable, NotReady."""
    with CoordinatorClient(coordinator) as client:
        members = client.status().members
    agents = [member for member in members if member.role == wire.ROLE_AGENT and member.address]
    if agents:
        # an agent on this machine sees the same paths
        here = os.uname().nodename
        return min(agents, key=lambda member: (member.host != here, member.incarnation)).address
    raise errors.NotReady(
        f"the yard of {coordinator} has no agent",
        why="an agent starts the training processes",
        todo=f"start one (`shardyard agent --coordinator {coordinator} --workers N`), or start the script by hand: "
        f"SHARDYARD_COORDINATOR={coordinator} python SCRIPT",
    )
