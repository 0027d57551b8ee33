"""A running yard, read from its state file, for commands that show, use or end it.

Owns: whether the yard is whole, recovering or broken; its end. Invariants: its supervisor is ended before its roles,
and the state is read again after that, so that no process is missed that was started meanwhile. A dead process comes
back only if the supervisor's state says so. Must not know: how processes are started, command lines.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final

from shardyard.config.settings import Settings
from shardyard.domain import errors
from shardyard_launcher.terminal.coordinator_client import CoordinatorClient
from shardyard_launcher.terminal.yard_network import network_of
from shardyard_launcher.yard.local_cluster import lost, stop_roles, unregistered, wait_until
from shardyard_launcher.yard.role_process import RoleProcess, RunningRole
from shardyard_launcher.yard.state_file import LOGS, RoleRestart, YardState, coordinator_of, read_state

RECOVERY_MS_MAX: Final = 30_000
"""How long a yard may take to be whole again before it is called broken."""
ROLES: Final = {"coordinator", "server", "agent"}


def connect_to_yard(settings: Settings) -> CoordinatorClient:
    """The coordinator of the yard that a command means. Raises NotFound, NotTrusted."""
    address = coordinator_of(settings)
    return CoordinatorClient(address, network_of(settings, coordinator=address))


class RunningYard:
    """The yard of a folder that has a state file. For one thread."""

    def __init__(self, settings: Settings, folder: Path, state: YardState) -> None:
        self._settings = settings
        self._folder = folder
        self.state = state
        self._reported: set[RoleRestart] = set(state.restarts)

    def connect(self) -> CoordinatorClient:
        """Its coordinator. Raises NotTrusted."""
        address = self.state.coordinator
        return CoordinatorClient(address, network_of(self._settings, coordinator=address, state=self._folder))

    @property
    def supervised(self) -> bool:
        supervisor = self.state.supervisor
        return supervisor is not None and RunningRole(supervisor).alive

    @property
    def dead(self) -> tuple[RoleProcess, ...]:
        return tuple(process for process in self.state.roles if not RunningRole(process).alive)

    @property
    def gone(self) -> bool:
        """Whether all its processes are dead and none will be restarted."""
        return len(self.dead) == len(self.state.roles) and not self.will_recover

    @property
    def will_recover(self) -> bool:
        """Whether every dead process, if there is any, will be restarted."""
        return self.supervised and not self.state.given_up

    @property
    def broken(self) -> bool:
        return bool(self.dead) and not self.will_recover

    @property
    def was_interrupted(self) -> bool:
        """Whether its supervisor has ended before it had started all processes: the agent is the last one."""
        return not self.supervised and all(process.role != "agent" for process in self.state.roles)

    @property
    def waited_for(self) -> str:
        """What is not ready yet, in words that follow "waiting for"."""
        unready = ", ".join(str(process) for process in self.state.roles if not process.ready)
        what = f"{unready} to be ready" if unready else "servers and agent to be registered"
        return f"the yard in {self._folder}: {what}; logs are in {self._folder / LOGS}"

    def refresh(self) -> None:
        """Reads the state again. Keeps the last state if the file is gone."""
        self.state = read_state(self._folder) or self.state

    def check(self) -> list[str]:
        """What the supervisor has done since the last call, in words. Raises ServerLost, CoordinatorLost or Unavailable
        for a process that will not come back."""
        self.refresh()
        if self.broken:
            process = self.dead[0]
            unwatched = "has ended, and no supervisor runs that could restart it"
            raise lost(process, f"{process} {self.state.given_up.get(process.name, unwatched)}")
        news = [restart for restart in self.state.restarts if restart not in self._reported]
        self._reported.update(news)
        return list(map(str, news))

    def await_whole(self, stop: threading.Event) -> None:
        """Waits, at most RECOVERY_MS_MAX, until all of it runs and is registered. Raises NotReady that says what is
        missing, at once if that will not come back; Interrupted once `stop` is set."""

        def missing() -> str:
            self.refresh()
            problem = self._problem()
            if problem and not self.will_recover:
                raise self._incomplete(problem)
            return f"the yard in {self._folder} to be whole: {problem}" if problem else ""

        if wait_until(missing, time.monotonic() + RECOVERY_MS_MAX / 1000, stop):
            raise self._incomplete(self._problem())

    def _incomplete(self, problem: str) -> errors.NotReady:
        return errors.NotReady(
            f"the yard in {self._folder} is incomplete: {problem}",
            why="a script would fail on it",
            todo=f"`shardyard down --state {self._folder}`, then start it again; the logs are in {self._folder / LOGS}",
        )

    def stop(self) -> tuple[RoleProcess, ...]:
        """Ends all of it: the supervisor, the agent with what it runs, the servers, the coordinator. Bounded. Returns
        the processes that it had."""
        supervisor = self.state.supervisor
        if supervisor is not None:
            stop_roles([RunningRole(supervisor)])
        self.refresh()
        stop_roles([RunningRole(process) for process in self.state.roles])
        return self.state.processes

    def _problem(self) -> str:
        """What is missing, in words; empty if the yard is whole."""
        if {process.role for process in self.state.roles if process.address} != ROLES:
            return "its start was interrupted"
        gone = list(self.dead)
        if gone:
            return "; ".join(f"{each} {self.state.given_up.get(each.name, 'is gone')}" for each in gone)
        unready = [process for process in self.state.roles if not process.ready]
        if unready:
            return f"{', '.join(str(process) for process in unready)} is not ready yet"
        try:
            with self.connect() as client:
                absent = unregistered(self.state, client)
        except errors.CoordinatorUnavailable as error:
            return error.what
        return f"the coordinator does not know {absent}" if absent else ""
