"""A training script launched through an agent, and watched until it ends.

Owns: what is launched; how long an agent that does not answer is waited for; a new launch if the agent died and came
back, or another one took its place (the script's processes died with it, as if a signal had killed each); the stop.
Invariants: `follow` returns or raises within seconds after a signal or `check` raises, and the script's processes
have ended then. Must not know: how the yard was started, how progress is drawn.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from shardyard.config.assignments import Layer
from shardyard.config.configuration import CONFIG_VARIABLE, PREFIX, PROCESS_VARIABLES, Flag, Loaded, environment_name
from shardyard.config.settings import Settings
from shardyard.domain import errors
from shardyard.runtime.restart_policy import GivenUp, RestartPolicy
from shardyard.transport.interfaces import Network, Peer
from shardyard.wire import methods
from shardyard.wire.v1 import agent_pb2 as agent_wire
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.scripts.agent_launch import STOP_MS_MAX, AgentLaunch
from shardyard_launcher.scripts.launches import FoundLaunch
from shardyard_launcher.terminal.coordinator_client import CoordinatorClient
from shardyard_launcher.terminal.options import StopSignals
from shardyard_worker.agent.error_report import ShownOutput

SILENT_MS: Final = 1_000
"""How long an agent may not answer before that is said."""
GRACE_MS: Final = 5_000
AT_ONCE_MS: Final = 1
"""The grace time of processes that are to be killed. An agent takes 0 for its own default."""
KEY_BITS: Final = 48
PROGRESS_MS: Final = 1_000
FIRST_STEP_MS: Final = 200
"""How often status is asked for, and how often before the first step of a job."""
_GRACE: Final = "as long as a coordinator is (membership.coordinator_grace_ms)"
_IDLE: Final = "as long as a job without workers is (job.idle_ms)"
WORKERS_EXPECTED: Final = "job.workers_expected"
OWN: Final = frozenset({"security.identity", "security.invitation"})
"""Settings of the process itself, which what it starts does not inherit by them."""


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
    unattended: bool = False
    """Nobody follows it, so that the agent launches it again if it was killed itself."""


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
        if flag.value is not None and path not in OWN:
            taken[environment_name(path)] = str(flag.value)
            if path == "job.name":
                taken.pop("SHARDYARD_JOB", None)
    # an agent says how many it starts; a file that says more knows of other agents
    if loaded.origins[WORKERS_EXPECTED].layer is Layer.FILE:
        taken[environment_name(WORKERS_EXPECTED)] = str(loaded.settings.job.workers_expected)
    return taken


class ScriptRun:
    """One script on the agents of a yard, at first on that at address `agent`. For one thread; others, its own, read
    events and poll the status. `settings`: how long a silent agent is waited for, and how often the script is launched
    again.

    With a launch that was found in the place of a script, that launch is followed from where it is. It is neither
    launched again nor stopped.
    """

    def __init__(
        self, network: Network, coordinator: str, agent: str, script: Script | FoundLaunch, settings: Settings
    ) -> None:
        self._network = network
        self._coordinator = network.connect(coordinator, name="coordinator", unavailable=errors.CoordinatorUnavailable)
        self._launch = AgentLaunch(network, agent)
        self._request = _request_for(script) if isinstance(script, Script) else None
        self._grace_ms, self._grace_setting = settings.membership.coordinator_grace_ms, _GRACE
        self._idle_ms = settings.job.idle_ms
        self._restarts = RestartPolicy(
            restarts_max=settings.yard.restarts_max,
            window_ms=settings.yard.restarts_window_ms,
            setting="yard.restarts_max",
        )
        self._agents: Sequence[wire.MemberStatus] = ()
        self._said_silent = False
        self._pids: set[int] = set()
        self._shown = ShownOutput()
        self.workers = 0
        """How many processes it has; 0 before it is launched."""
        if isinstance(script, FoundLaunch):
            self.workers = script.described.workers
            self._pids.update(script.described.pids)
            self._launch.watch(script.number, script.described.next_event)

    @property
    def number(self) -> int:
        """The number of its launch; 0 before it is launched."""
        return self._launch.number

    def start(self, display: Display, *, stop: threading.Event) -> agent_wire.LaunchEnded | None:
        """Launches the script, and waits until all its processes have started, it has ended, or `stop` is set. Returns
        None unless it has ended. Raises what `follow` raises. Call `follow` or `stop` after that."""
        ended: agent_wire.LaunchEnded | None = None
        while ended is None and len(self._pids) < max(self.workers, 1) and not stop.is_set():
            ended = self._continue(display)
            self._bear_silence(display)
        return ended

    def follow(
        self, display: Display, *, signals: StopSignals, check: Callable[[], list[str]]
    ) -> agent_wire.LaunchEnded | None:
        """Launches the script, and shows what happens, and what `check` reports, until it has ended. Returns None if
        a signal came first. Raises what `check` raises, what the agent answers (InvalidRequest, NotPermitted), and
        Unavailable when the agent does not come back. The script's processes are stopped in any case, unless the launch
        was found."""
        ended: agent_wire.LaunchEnded | None = None
        poller = _StatusPoller(self._coordinator)
        try:
            while ended is None and not signals.stop.is_set():
                ended = self._continue(display)
                for line in check():
                    display.note(line)
                status = poller.take()
                if status is not None:
                    self._agents = agents_of(status)
                    display.progress(status, frozenset(self._pids))
                self._bear_silence(display)
            return ended
        finally:
            poller.close()
            if ended is None:
                if self._request is not None:
                    self.stop(display, signals.hurry)
            else:
                self._show_last(display)

    def first_error(self, ended: agent_wire.LaunchEnded) -> str:
        """The error of the first failed process, without a traceback that its output has shown already."""
        return self._shown.tell(ended.first_error_index, ended.first_error, several=self.workers > 1)

    def close(self) -> None:
        self._launch.close()
        self._coordinator.close()

    def _continue(self, display: Display) -> agent_wire.LaunchEnded | None:
        """Launches, if the script is not launched; otherwise shows the next event. Takes a moment at most."""
        if not self._launch.is_launched:
            assert self._request is not None
            reply = self._launch.launch(self._request)
            if reply is not None:
                self.workers = reply.workers
            return None
        try:
            ended = self._show_next(display)
            if ended is None or not ended.agent_leaves or self._request is None:
                return ended
            self._leave_agent(display)
            return None
        except errors.NotFound as error:
            self._launch_again(display, f"{self._launch.name} died, and the script's processes with it", error)
            return None

    def _launch_again(self, display: Display, what: str, cause: errors.ShardyardError) -> None:
        """The agent has lost the launch. Another process takes its place, and the script is launched there."""
        if self._request is None:
            raise errors.Unavailable(
                f"{what}; the script is not launched again",
                why="only the command that has launched a script launches it again",
                todo="`shardyard status` shows whether it was launched again, `shardyard logs` what it has printed",
            ) from cause
        decided = self._restarts.died("agent", time.monotonic_ns() // 1_000_000)
        if isinstance(decided, GivenUp):
            raise errors.Unavailable(
                f"{what}; the script is not launched again: {decided.why}",
                why="a script is launched again as often as an agent may be restarted",
                todo="read the agent's log to see why it dies; then start the script again",
            ) from cause
        display.note(f"{what}; the script is launched again")
        self._move(self._launch.address)

    def _leave_agent(self, display: Display) -> None:
        """The agent leaves in order, and the script is not done. Another agent launches it, or one that takes this
        one's place. No restart is counted."""
        assert self._request is not None
        display.note(f"{self._launch.name} leaves the yard; the script is launched again when an agent is there")
        self._grace_ms, self._grace_setting = self._idle_ms, _IDLE
        self._request.key = _new_key()  # for the old one the agent would answer with what has ended
        self._move(self._launch.address)

    def _bear_silence(self, display: Display) -> None:
        """Waits for an agent that does not answer, since it may be restarting: as long as members wait for a
        coordinator, or, if it has left in order, as long as the job waits for workers. If another agent has taken its
        place, the script is launched there. Raises Unavailable."""
        silence = self._launch.silence
        if silence is None:
            if self._said_silent:
                display.note(f"{self._launch.name} answers")
            self._said_silent = False
            return
        silent_ms = (time.monotonic() - silence.since_s) * 1000
        if silent_ms > self._grace_ms:
            raise errors.Unavailable(
                f"{self._launch.name} did not answer for {silent_ms / 1000:.0f} s: {silence.error.what}",
                todo="see in its log why it ended, and start the script again when there is an agent. It is waited for "
                + self._grace_setting,
            ) from silence.error
        if silent_ms > SILENT_MS and not self._said_silent:
            self._said_silent = True
            said = silence.error
            what = f"{self._launch.name} does not answer" if isinstance(said, errors.Unavailable) else said.what
            display.note(f"{what}; waiting for it, at most {self._grace_ms / 1000:g} s")
        # the coordinator forgets an agent that is gone
        others = [each.address for each in self._agents]
        if silent_ms > SILENT_MS and others and self._launch.address not in others:
            what = f"{self._launch.name} is gone, and the agent at {others[0]} is there"
            if self._launch.is_launched:
                self._launch_again(display, what, silence.error)
            else:
                display.note(f"the script is launched on the agent at {others[0]}")
            self._move(others[0])

    def _move(self, agent: str) -> None:
        self._launch.close()
        self._launch = AgentLaunch(self._network, agent)

    def _show_next(self, display: Display) -> agent_wire.LaunchEnded | None:
        event = self._launch.take()
        if event is None:
            return None
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

    def stop(self, display: Display, hurry: threading.Event) -> None:
        """Stops the launch and shows what it still prints. Once `hurry` is set, its processes are killed."""
        try:
            if not self._launch.stop(GRACE_MS):
                return
            give_up = time.monotonic() + STOP_MS_MAX / 1000
            has_hurried = False
            with self._launch.await_end() as wait:
                while time.monotonic() < give_up and self._show_next(display) is None:
                    wait.tick()
                    if hurry.is_set() and not has_hurried:
                        has_hurried = self._launch.stop(AT_ONCE_MS)
        except errors.ShardyardError as error:
            # its processes die with it
            display.note(f"the agent no longer answers: {error.what}")


def _request_for(script: Script) -> agent_wire.LaunchRequest:
    return agent_wire.LaunchRequest(
        script=str(script.path.absolute()),
        arguments=script.arguments,
        working_directory=os.getcwd(),
        environment=script.environment,
        workers=script.workers,
        restarts_max=script.restarts_max,
        restarts_window_ms=script.restarts_window_ms,
        key=_new_key(),
        unattended=script.unattended,
    )


def _new_key() -> int:
    return secrets.randbits(KEY_BITS) + 1


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


def agents_of(status: wire.StatusReply) -> list[wire.MemberStatus]:
    """The yard's agents that can launch a script, the best one first: an agent on this machine sees the same paths."""
    here = os.uname().nodename
    agents = [member for member in status.members if member.role == wire.ROLE_AGENT and member.address]
    agents = [member for member in agents if not member.HasField("drain")]
    return sorted(agents, key=lambda member: (member.host != here, member.incarnation))


def find_agent(network: Network, coordinator: str) -> str:
    """The address of an agent of a running yard. Raises CoordinatorUnavailable, NotReady."""
    with CoordinatorClient(coordinator, network) as client:
        agents = agents_of(client.status())
    if agents:
        return agents[0].address
    raise errors.NotReady(
        f"the yard of {coordinator} has no agent",
        why="an agent starts the training processes",
        todo=f"start one (`shardyard agent --coordinator {coordinator} --workers N`), or start the script by hand: "
        f"SHARDYARD_COORDINATOR={coordinator} python SCRIPT",
    )
