"""A yard on this machine, as processes: a coordinator, servers, an agent.

Owns: the order of start and stop, the waiting until all are registered, the watching of the processes. Invariants: what
fails to start is stopped as a whole; `stop` is bounded in time and leaves no process; only processes that were started
here, or written down by who started them, are ever ended. Must not know: scripts, displays, command lines.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from shardyard.ground import errors
from shardyard.runtime.configuration import PREFIX
from shardyard.runtime.settings import Settings
from shardyard.transport.channel import GrpcNetwork
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.role_process import POLL_S, RoleProcess, RunningRole, start_role, tail
from shardyard_launcher.yard_state import LOGS, YardState

READY_MS_MAX: Final = 60_000
STATUS_TIMEOUT_MS: Final = 2_000
STOP_MS: Final = {"agent": 10_000, "server": 5_000, "coordinator": 5_000}
"""How long each role may take to end after SIGTERM; then it is killed. In the order in which they are stopped."""

_LOST: Final[dict[str, type[errors.ShardyardError]]] = {
    "coordinator": errors.CoordinatorLost,
    "server": errors.ServerLost,
    "agent": errors.Unavailable,
}


class Interrupted(Exception):
    """Somebody asked to stop while the yard was starting."""


class LocalCluster:
    """`settings.yard` says how many servers, for how many workers, where. `folder` takes logs, settings and journal.

    `tied` processes end when the thread that called `start` ends; others stay until they are stopped. `on_change` is
    told the state whenever a process was started or has become ready.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        *,
        tied: bool,
        on_change: Callable[[YardState], None] | None = None,
    ) -> None:
        self._settings = settings
        self._folder = folder.absolute()
        self._tied = tied
        self._on_change = on_change
        self._roles: list[RunningRole] = []

    @classmethod
    def found(cls, settings: Settings, folder: Path, state: YardState) -> LocalCluster:
        """The yard that a state file describes."""
        cluster = cls(settings, folder, tied=False)
        cluster._roles = [RunningRole(process) for process in state.processes]
        return cluster

    @property
    def state(self) -> YardState:
        return YardState(tuple(role.process for role in self._roles))

    @property
    def coordinator(self) -> str:
        return self.state.address_of("coordinator")

    @property
    def agent(self) -> str:
        return self.state.address_of("agent")

    def start(self, *, stop: threading.Event, ready_ms: int = READY_MS_MAX) -> None:
        """Starts everything and waits until all are registered, `ready_ms` at most. What was started is stopped again
        if that fails. Raises AddressInUse, Unavailable or a subclass with the end of the log of who failed, and
        Interrupted once `stop` is set."""
        give_up = time.monotonic() + ready_ms / 1000
        yard = self._settings.yard
        check_free(yard.bind, yard.coordinator_port)
        (self._folder / LOGS).mkdir(parents=True, exist_ok=True)
        self._settings_file = self._folder / "settings.yaml"
        # JSON is YAML; the roles see what was given, wherever it came from
        given = self._settings.model_dump(mode="json", exclude_unset=True)
        self._settings_file.write_text(json.dumps(given, indent=1), encoding="utf-8")
        self._environment = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
        try:
            journal = ["--state", str(self._folder / "coordinator")]
            where = f"{yard.bind}:{yard.coordinator_port}"
            coordinator = self._start("coordinator", "coordinator", ["--bind", where, *journal])
            self._await_ready([coordinator], give_up, stop)
            joining = ["--coordinator", self.coordinator, "--bind", f"{yard.bind}:0"]
            others = [self._start(f"server-{index}", "server", joining) for index in range(yard.servers)]
            others.append(self._start("agent", "agent", [*joining, "--workers", str(yard.workers)]))
            self._await_ready(others, give_up, stop)
            self._await_registered(give_up, stop)
        except BaseException:
            self.stop()
            raise

    @property
    def alive_count(self) -> int:
        return sum(role.alive for role in self._roles)

    @property
    def alive(self) -> bool:
        """Whether all of its processes run."""
        return all(role.alive for role in self._roles)

    def check_whole(self, folder: Path) -> None:
        """For a yard that was found. Raises NotReady where some of it is missing."""
        gone = [role.process for role in self._roles if not role.alive]
        kinds = {role.process.role for role in self._roles if role.process.address}
        try:
            gone = gone or self.registered()[0]
            problem = f"{', '.join(map(str, gone))} of it is gone" if gone else ""
            if not problem and kinds != set(STOP_MS):
                problem = "its start was broken off"
        except errors.CoordinatorUnavailable as error:
            problem = error.what
        if problem:
            raise errors.NotReady(
                f"the yard of {folder} is up, but not whole: {problem}",
                why="a script would fail on it",
                todo=f"`shardyard down --state {folder}`, then start it again; the logs are in {folder / LOGS}",
            )

    def check(self) -> None:
        """Raises an error that names the process that has ended, with the end of its log: ServerLost, CoordinatorLost,
        Unavailable."""
        for role in self._roles:
            if not role.alive:
                raise self._lost(role, "")

    def registered(self) -> tuple[list[RoleProcess], wire.StatusReply]:
        """Which of the servers and the agent the coordinator does not know, and all that it knows. Raises
        CoordinatorUnavailable."""
        network = GrpcNetwork()
        peer = network.connect(self.coordinator, name="coordinator", unavailable=errors.CoordinatorUnavailable)
        try:
            status = peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=STATUS_TIMEOUT_MS)
        finally:
            peer.close()
        known = {member.pid for member in status.members if member.role != wire.ROLE_WORKER}
        members = [role.process for role in self._roles if role.process.role != "coordinator"]
        return [process for process in members if process.pid not in known], status

    def stop(self) -> None:
        """Ends all processes: first the agent with what it runs, then the servers, then the coordinator. Bounded."""
        for kind, limit_ms in STOP_MS.items():
            roles = [role for role in self._roles if role.process.role == kind]
            for role in roles:
                role.signal(signal.SIGTERM)
            give_up = time.monotonic() + limit_ms / 1000
            for role in roles:
                if not role.wait(max(0, int((give_up - time.monotonic()) * 1000))):
                    role.signal(signal.SIGKILL)
                    role.wait(5_000)

    def _start(self, name: str, role: str, arguments: list[str]) -> RunningRole:
        started = start_role(
            name,
            role,
            ["-c", str(self._settings_file), *arguments],
            log=self._folder / LOGS / f"{name}.log",
            environment=self._environment,
            tied=self._tied,
        )
        self._roles.append(started)
        self._changed()
        started.release()
        return started

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self.state)

    def _await_ready(self, roles: Iterable[RunningRole], give_up: float, stop: threading.Event) -> None:
        waiting = list(roles)
        while waiting:
            # in this order: one that prints and ends at once has ended
            ended = [role for role in self._roles if not role.alive]
            if ended:
                raise self._lost(ended[0], "before it was ready")
            ready = [role for role in waiting if role.read_address()]
            waiting = [role for role in waiting if role not in ready]
            if ready:
                self._changed()
            elif waiting:
                names = ", ".join(str(role.process) for role in waiting)
                log = waiting[0].process.log
                self._pause(give_up, stop, f"{names} did not become ready; the end of {log}:\n{tail(log)}")

    def _await_registered(self, give_up: float, stop: threading.Event) -> None:
        while True:
            self.check()
            missing, _ = self.registered()
            if not missing:
                return
            names = ", ".join(map(str, missing))
            self._pause(give_up, stop, f"the coordinator at {self.coordinator} does not know {names}")

    def _pause(self, give_up: float, stop: threading.Event, waiting_for: str) -> None:
        if time.monotonic() >= give_up:
            raise errors.DeadlineExceeded(f"the yard was not ready in time: {waiting_for}")
        if stop.wait(POLL_S):
            raise Interrupted

    def _lost(self, role: RunningRole, when: str) -> errors.ShardyardError:
        code = role.exit_code
        if code is None:
            how = "has ended"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        log = role.process.log
        said = " ".join(part for part in (str(role.process), how, when) if part)
        return _LOST[role.process.role](
            f"{said}; the end of {log}:\n{tail(log)}\n",
            why="" if when else None,
            todo="see the error above; `shardyard config explain` shows the settings in force" if when else None,
            facts={"process": role.process.name},
        )


def check_free(host: str, port: int) -> None:
    """Raises AddressInUse where somebody listens, before anything is started."""
    if port == 0:
        return
    bare = host.strip("[]")
    kind = socket.AF_INET6 if ":" in bare else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bare, port))
        except OSError as error:
            raise errors.AddressInUse(
                f"the coordinator cannot listen on {host}:{port} ({error.strerror})",
                todo=(
                    f"if that is a yard of yours, use it (SHARDYARD_COORDINATOR={host}:{port}) or stop it (`shardyard "
                    "down` with its --state); else choose another port with --set yard.coordinator_port=PORT (0 takes "
                    "a free one)"
                ),
            ) from None
