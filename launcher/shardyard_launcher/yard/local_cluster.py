"""A yard on this machine, as processes: a coordinator, servers, an agent.

Owns: the order of start and stop, the wait until all are registered, the watching of the processes and the restart of
those that die. Invariants: if the start fails, everything that was started is stopped. A process is restarted on the
same port, with the same state folder, as often as its budget allows (shardyard.runtime.restart_policy), so that
it replaces the dead one. `stop` is bounded in time and leaves no process. Only processes are ever ended that were
started here, or recorded by the process that started them. Must not know: scripts, displays, command lines, other
watchers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from shardyard.config.configuration import PREFIX
from shardyard.config.settings import AUTO, CHECKPOINTS, COLD_FOLDER, WAL_FOLDER, Settings
from shardyard.domain import errors
from shardyard.runtime.restart_policy import GivenUp, RestartPolicy
from shardyard.runtime.waits import ExplainedWait
from shardyard.security.authority import Authority
from shardyard.security.identity import Role
from shardyard.security.issuing import OF_A_YARD, issue_local
from shardyard.security.local import AUTHORITY, FOLDER
from shardyard.transport.error_codes import from_detail
from shardyard.transport.interfaces import Network
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.terminal.coordinator_client import CoordinatorClient
from shardyard_launcher.terminal.yard_network import network_of
from shardyard_launcher.yard.role_process import FORMER, POLL_S, RoleProcess, RunningRole, start_role, tail
from shardyard_launcher.yard.state_file import JOURNAL, LOGS, RESTARTS_KEPT, SUPERVISOR, RoleRestart, YardState

READY_MS_MAX: Final = 60_000
STATUS_TIMEOUT_MS: Final = 2_000
STOP_MS: Final = {SUPERVISOR: 30_000, "agent": 10_000, "server": 5_000, "coordinator": 5_000}
"""How long each role may take to end after SIGTERM; then it is killed. In the order in which they are stopped. A
supervisor that is stopped while the yard starts ends all the others first."""
logger = logging.getLogger("shardyard.supervisor")

SETTINGS_FILE: Final = "settings.yaml"

_LOST: Final[dict[str, type[errors.ShardyardError]]] = {
    "coordinator": errors.CoordinatorLost,
    "server": errors.ServerLost,
    "agent": errors.Unavailable,
}


class Interrupted(Exception):
    """A stop was requested while the yard was starting."""


def wait_until(missing: Callable[[], str], give_up: float, stop: threading.Event) -> str:
    """Waits until nothing is missing. Returns what still is missing when the monotonic clock is at `give_up`; else
    nothing. Raises what `missing` raises, and Interrupted once `stop` is set."""
    what = missing()
    with ExplainedWait(lambda: what) as wait:
        while what and time.monotonic() < give_up:
            wait.tick()
            if stop.wait(POLL_S):
                raise Interrupted
            what = missing()
    return what


class RoleSlot:
    """A process of the yard, and those that replace it, one after the other."""

    def __init__(self, running: RunningRole) -> None:
        self.running = running
        self.restart_ms: int | None = None
        """When the next one starts; None while there is one."""
        self.given_up = ""
        """How the last one ended and why it is not replaced, in words that follow its name; otherwise empty."""
        self._number = 0
        self._explained = ExitStack()
        self._wait: ExplainedWait | None = None

    def begin(self, running: RunningRole, number: int) -> None:
        """`running` becomes the slot's process, as restart `number`, and is watched until it is ready."""
        self.running, self.restart_ms, self._number = running, None, number
        self._wait = self._explained.enter_context(ExplainedWait(lambda: self.waited_for))

    @property
    def waited_for(self) -> str:
        process = self.running.process
        return f"{process} to be ready after restart {self._number}; its log is {process.log}"

    def becomes_ready(self) -> bool:
        """Whether the restarted process has become ready since the last call."""
        if self._wait is None:
            return False
        self._wait.tick()
        if not self.running.read_ready():
            return False
        self.end_wait()
        return True

    def end_wait(self) -> None:
        self._wait = None
        self._explained.close()


class LocalCluster:
    """`settings.yard` says how many servers, for how many workers, and where. `folder` holds logs, settings and
    journal.

    `tied` processes end when the thread that started them ends; others stay until they are stopped. `on_change` gets
    the state whenever a process was started, has become ready, or has died. For one thread.
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
        self._slots: list[RoleSlot] = []
        self._restarts = RestartPolicy(
            restarts_max=settings.yard.restarts_max,
            window_ms=settings.yard.restarts_window_ms,
            setting="yard.restarts_max",
        )
        self._restarted: list[RoleRestart] = []
        self._news: list[str] = []
        """What has happened and `poll` has not returned yet."""
        self._is_unwritten = False
        self._settings_file = self._folder / SETTINGS_FILE
        self._environment = environment_of_roles()

    @property
    def state(self) -> YardState:
        given_up = {slot.running.process.name: slot.given_up for slot in self._slots if slot.given_up}
        processes = tuple(slot.running.process for slot in self._slots)
        return YardState(processes, tuple(self._restarted[-RESTARTS_KEPT:]), given_up)

    @property
    def coordinator(self) -> str:
        """Its address."""
        return self.state.coordinator

    def network(self) -> Network:
        """How this process reaches the yard. Raises NotTrusted."""
        return network_of(self._settings, coordinator=self.coordinator, state=self._folder)

    def adopt(self, state: YardState) -> None:
        """Takes over a yard without a supervisor. It learns that its processes end, but not how."""
        self._slots = [RoleSlot(RunningRole(process)) for process in state.roles]
        self._restarted = list(state.restarts)
        for slot in self._slots:
            process = slot.running.process
            if not process.ready:  # its start was under way when the last supervisor died
                slot.begin(slot.running, self._restarted_count(process.name))
        self._changed()

    def start(self, *, stop: threading.Event) -> None:
        """Starts everything and waits until all are registered, at most READY_MS_MAX. A process that a signal kills
        meanwhile is started again; one that ends by itself has an error to show. If the start fails, what was started
        is stopped again. Raises AddressInUse, Unavailable or a subclass with the end of the failed process's log, and
        Interrupted once `stop` is set."""
        begun = time.monotonic()
        yard = self._settings.yard
        check_free(yard.bind, yard.coordinator_port)
        write_settings(self._settings, self._folder)
        self._issue_identities()
        try:
            self._start_role("coordinator", "coordinator")
            self._await(self._unready, begun, stop)
            for index in range(yard.servers):
                self._start_role(f"server-{index}", "server")
            self._start_role("agent", "agent")
            self._await(self._unready, begun, stop)
            self._await(self._unregistered, begun, stop)
        except BaseException:
            self.stop()
            raise

    def poll(self) -> list[str]:
        """Checks the processes, and restarts dead ones when it is time. Returns what is new since the last call, in
        words. Call it several times a second. A call takes no longer than the start of a process."""
        now_ms = int(time.monotonic() * 1000)
        if self._is_unwritten:
            self._changed_if_possible()
        news, self._news = self._news, []
        for slot in self._slots:
            if slot.given_up:
                continue
            if slot.restart_ms is not None:
                if now_ms >= slot.restart_ms:
                    news += self._start_again(slot, now_ms)
            elif not slot.running.alive:
                slot.running.read_ready()  # its successor listens where it has listened
                news.append(self._on_exit(slot, slot.running.ending, now_ms))
            elif slot.becomes_ready():
                self._changed_if_possible()
                news.append(f"{slot.running.process} is ready at {slot.running.process.address}")
        return news

    def check(self) -> None:
        """Raises an error that names a process that was given up, with the end of its log: ServerLost, CoordinatorLost,
        Unavailable."""
        for slot in self._slots:
            if slot.given_up:
                process = slot.running.process
                raise lost(process, f"{process} {slot.given_up}")

    def stop(self) -> None:
        """Ends all processes: first the agent with what it runs, then the servers, then the coordinator. Bounded."""
        for slot in self._slots:
            slot.end_wait()
        stop_roles([slot.running for slot in self._slots])

    @property
    def _authority(self) -> Path:
        given = self._settings.security.authority
        return self._folder / FOLDER / AUTHORITY if given == AUTO else Path(given)

    def _issue_identities(self) -> None:
        """The certificates of the yard's processes and of what its user starts here."""
        security = self._settings.security
        if security.tls and security.identity == AUTO:
            servers = {f"server-{index}": Role.SERVER for index in range(self._settings.yard.servers)}
            issue_local(Authority(self._authority), self._folder / FOLDER, {**OF_A_YARD, **servers})

    def _start_role(self, name: str, role: str) -> None:
        running = self._start(name, role, "")
        self._slots.append(RoleSlot(running))
        self._record_and_release(running)

    def _start(self, name: str, role: str, address: str) -> RunningRole:
        yard = self._settings.yard
        port = RoleProcess(name, role, 0, 0.0, Path(), address).port
        if role == "coordinator":
            own = ["--bind", f"{yard.bind}:{port or yard.coordinator_port}", "--state", str(self._folder / JOURNAL)]
        else:
            own = ["--coordinator", self.coordinator, "--bind", f"{yard.bind}:{port}"]
        security = self._settings.security
        if security.tls and security.identity == AUTO:
            own += ["--set", f"security.identity={self._folder / FOLDER / name}"]
            if role == "coordinator":
                own += ["--set", f"security.authority={self._authority}"]
        if role == "coordinator" and "servers_expected" not in self._settings.membership.model_fields_set:
            own += ["--set", f"membership.servers_expected={yard.servers}"]
        if role == "server" and yard.cold == AUTO:
            own += ["--set", f"yard.cold={self._folder / COLD_FOLDER}"]
        if role == "server" and yard.wal == AUTO:
            own += ["--set", f"yard.wal={self._folder / WAL_FOLDER}"]
        if role == "server" and self._settings.storage.allowed:
            checkpoints = (self._folder / JOURNAL / CHECKPOINTS).resolve().as_uri()
            own += ["--set", f"storage.allowed={self._settings.storage.allowed} {checkpoints}"]
        if role == "agent":
            own += ["--workers", str(yard.workers), "--state", str(self._folder)]
        return start_role(
            name,
            role,
            ["-c", str(self._settings_file), *own],
            log=self._folder / LOGS / f"{name}.log",
            environment=self._environment,
            tied=self._tied,
            address=address,
        )

    def _record_and_release(self, running: RunningRole) -> None:
        """Lets a process begin once it is recorded in the state."""
        try:
            self._changed()
        except OSError:
            running.signal(signal.SIGKILL)
            running.wait(5_000)
            raise
        running.release()

    def _on_exit(self, slot: RoleSlot, ending: str, now_ms: int) -> str:
        """Decides whether a dead process is restarted. Returns the decision in words."""
        slot.end_wait()
        process = slot.running.process
        decided = self._restarts.died(process.name, now_ms)
        if isinstance(decided, GivenUp):
            slot.given_up = f"{ending} and is not restarted: {decided.why}"
            self._changed_if_possible()
            return f"{process} {slot.given_up}; the end of its log:\n{tail(process.log)}"
        slot.restart_ms = decided.at_ms
        yard = self._settings.yard
        restart = RoleRestart(
            process.name,
            process.pid,
            ending,
            time.time(),
            decided.number,
            yard.restarts_max,
            yard.restarts_window_ms,
        )
        self._restarted = [*self._restarted[-RESTARTS_KEPT:], restart]
        self._changed_if_possible()
        former = process.log.name + FORMER
        return f"{restart}, in {(decided.at_ms - now_ms) / 1000:g} s; its log is {process.log.with_name(former)} then"

    def _start_again(self, slot: RoleSlot, now_ms: int) -> list[str]:
        dead = slot.running.process
        try:
            running = self._start(dead.name, dead.role, dead.address)
            slot.begin(running, self._restarted_count(dead.name))
            self._record_and_release(running)
        except OSError as error:
            return [self._on_exit(slot, f"could not be restarted ({error})", now_ms)]
        return [f"started {running.process} in the place of {dead}"]

    def _restarted_count(self, name: str) -> int:
        return next((each.number for each in reversed(self._restarted) if each.name == name), 0)

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self.state)

    def _changed_if_possible(self) -> None:
        """For changes that only readers of the state file need: `poll` tries again if the disk is full."""
        try:
            self._changed()
            self._is_unwritten = False
        except OSError as error:
            if not self._is_unwritten:
                logger.warning(
                    "the state in %s cannot be written (%s); `shardyard status` shows a former one, and the yard stays",
                    self._folder,
                    error,
                )
            self._is_unwritten = True

    def _await(self, missing: Callable[[], str], begun: float, stop: threading.Event) -> None:
        left = wait_until(missing, begun + READY_MS_MAX / 1000, stop)
        if left:
            log = next((each.running.process.log for each in self._slots if not each.running.process.ready), None)
            said = "" if log is None else f"; the end of {log}:\n{tail(log)}"
            raise errors.DeadlineExceeded(f"the yard was not ready in time: it waited for {left}{said}")

    def _unready(self) -> str:
        self._mend()
        waiting = [slot.running for slot in self._slots if not slot.running.process.ready]
        # a process that is to be started again is no longer ready, whatever its log says
        missing = [slot.running for slot in self._slots if slot.restart_ms is not None or not slot.running.read_ready()]
        if len(missing) < len(waiting):
            self._changed()
        return f"{_names(missing)} to be ready; logs are in {self._folder / LOGS}" if missing else ""

    def _unregistered(self) -> str:
        self._mend()
        try:
            with CoordinatorClient(self.coordinator, self.network()) as client:
                absent = unregistered(self.state, client)
        except (errors.CoordinatorUnavailable, errors.NotReady) as error:
            return error.what
        return f"the coordinator at {self.coordinator} to know {absent}" if absent else ""

    def _mend(self) -> None:
        """During the start: restarts what a signal has killed. Raises the error of what has ended by itself."""
        # in this order: a process that prints that it is ready, and ends at once, has ended
        for slot in self._slots:
            if slot.restart_ms is None and not slot.running.alive and not slot.running.was_killed:
                process = slot.running.process
                when = "" if process.ready else " before it was ready"
                raise lost(process, f"{process} {slot.running.ending}{when}", starting=bool(when))
        self._news = self.poll()
        self.check()


def lost(process: RoleProcess, said: str, *, starting: bool = False) -> errors.ShardyardError:
    """The error for a process that is gone, with the end of its log."""
    return _LOST[process.role](
        f"{said}; the end of {process.log}:\n{tail(process.log)}\n",
        why="" if starting else None,
        todo="see the error above; `shardyard config explain` shows the settings in force" if starting else None,
        facts={"process": process.name},
    )


def await_last_checkpoints(client: CoordinatorClient, stop: threading.Event, poll: Callable[[], object]) -> None:
    """Waits until no job waits for its last checkpoint any more and no evaluator reads a finished job's values, which
    the coordinator bounds; or until `stop`. `poll` restarts processes that die meanwhile, the coordinator too, and
    raises if one does not come back. Raises StorageUnavailable if a job has ended without its last checkpoint."""
    what = "the job's last checkpoint to be written, and read by its evaluators"
    with ExplainedWait(lambda: what) as wait:
        while not stop.wait(POLL_S):
            poll()
            with contextlib.suppress(errors.CoordinatorUnavailable, errors.NotReady):
                jobs = client.status(timeout_ms=STATUS_TIMEOUT_MS).jobs
                if not any(map(_is_ending, jobs)):
                    _require_last_checkpoints(jobs)
                    return
            wait.tick()


def _is_ending(job: wire.JobStatus) -> bool:
    is_read = job.state == wire.JOB_STATE_FINISHED and bool(job.readers)
    return job.state == wire.JOB_STATE_FINISHING or is_read


def _require_last_checkpoints(jobs: Iterable[wire.JobStatus]) -> None:
    """Raises StorageUnavailable, which no other job fails with."""
    for job in jobs:
        failure = from_detail(job.failure) if job.HasField("failure") else None
        if isinstance(failure, errors.StorageUnavailable):
            raise failure


def unregistered(state: YardState, client: CoordinatorClient) -> str:
    """Names the servers and the agent that the coordinator does not know. Raises CoordinatorUnavailable."""
    status = client.status(timeout_ms=STATUS_TIMEOUT_MS)
    known = {member.pid for member in status.members if member.role != wire.ROLE_WORKER}
    return ", ".join(str(each) for each in state.roles if each.role != "coordinator" and each.pid not in known)


def stop_roles(roles: Iterable[RunningRole]) -> None:
    """Ends processes, role by role in the order of STOP_MS. Bounded."""
    all_roles = list(roles)
    for kind, limit_ms in STOP_MS.items():
        stopping = [role for role in all_roles if role.process.role == kind]
        for role in stopping:
            role.signal(signal.SIGTERM)
        give_up = time.monotonic() + limit_ms / 1000
        for role in stopping:
            if not role.wait(max(0, int((give_up - time.monotonic()) * 1000))):
                role.signal(signal.SIGKILL)
                role.wait(5_000)


def write_settings(settings: Settings, folder: Path) -> Path:
    """Writes the file from which all processes of a yard take their settings, wherever these came from."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / LOGS).mkdir(exist_ok=True)
    # JSON is YAML
    given = settings.model_dump(mode="json", exclude_unset=True)
    file = folder / SETTINGS_FILE
    file.write_text(json.dumps(given, indent=1), encoding="utf-8")
    return file


def environment_of_roles() -> dict[str, str]:
    """The environment of the processes: all but settings, which they read from their file."""
    return {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}


def _names(roles: Iterable[RunningRole]) -> str:
    return ", ".join(str(role.process) for role in roles)


def check_free(host: str, port: int) -> None:
    """Raises AddressInUse if a process listens there, before anything is started."""
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
