"""The process that `shardyard up` leaves running to watch a yard. It starts the roles, and restarts those that die.

It must be a process of its own: `up` itself ends, and only a process's parent learns how the process ended. One
supervisor costs less than one for each role. Its own death does no harm: the roles continue, `shardyard status`
says that they are not watched, and the next `shardyard up` starts another supervisor, which adopts them. The state file
lists it, and `shardyard down` ends it before all others.

Owns: the state file while it lives; its log, which has each death and each restart. Invariants: it is recorded in the
state file before it does anything. If the yard cannot be started, nothing of it stays. Must not know: scripts,
displays.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from shardyard_launcher.commands.roles import launcher_options
from shardyard_launcher.terminal.options import StopSignals, load_given, log_option, settings_options

if TYPE_CHECKING:
    from shardyard.config.settings import Settings
    from shardyard_launcher.yard.role_process import RunningRole
    from shardyard_launcher.yard.running_yard import RunningYard
    from shardyard_launcher.yard.state_file import YardState

POLL_EVERY_S: Final = 0.1
LATE_MS: Final = 30_000
"""How long a supervisor may take beyond the time that a start is given."""
ERROR: Final = "error: "


class StartFailed(Exception):
    """The supervisor ended before the yard was up. `said`: its error, as it is to be shown."""

    def __init__(self, said: str, exit_code: int) -> None:
        super().__init__(said)
        self.said = said
        self.exit_code = exit_code


@click.command(hidden=True)
@click.option("--state", required=True, metavar="DIR")
@settings_options
@log_option
@launcher_options
def supervisor(state: str, config: str | None, sets: tuple[str, ...], log_format: str | None) -> int:
    """Start and watch the yard of a state folder, which names this process."""
    from shardyard.runtime import log
    from shardyard_launcher.yard.state_file import SUPERVISOR

    settings = load_given(config, sets, {"log.format": log_format}).loaded.settings
    found = _own_state(Path(state))
    log.setup(settings.log.format, settings.log.level)
    log.bind_process(role=SUPERVISOR)
    with StopSignals() as signals:
        return _serve(settings, Path(state), found, signals.stop)


def _own_state(folder: Path) -> YardState:
    """Returns the folder's state if it names this process as supervisor. Raises ConfigurationError."""
    from shardyard.domain import errors
    from shardyard_launcher.yard.state_file import read_state

    found = read_state(folder)
    if found is None or found.supervisor is None or found.supervisor.pid != os.getpid():
        raise errors.ConfigurationError(
            f"{folder} does not name this process as the supervisor of a yard",
            why="two would start each dead process twice",
            todo="use `shardyard up`, which starts one where it is missing",
        )
    return found


def _serve(settings: Settings, folder: Path, found: YardState, stop: threading.Event) -> int:
    import logging

    from shardyard_launcher.yard.local_cluster import Interrupted, LocalCluster
    from shardyard_launcher.yard.state_file import YardState

    log = logging.getLogger("shardyard.supervisor")
    myself = found.supervisor
    assert myself is not None

    def write(state: YardState) -> None:
        YardState((myself, *state.processes), state.restarts, state.given_up).write(folder)

    cluster = LocalCluster(settings, folder, tied=False, on_change=write)
    if found.roles:
        cluster.adopt(found)
        log.info("watching the yard of %s, which had no supervisor", folder)
    else:
        try:
            cluster.start(stop=stop)
        except Interrupted:
            return 1
        log.info("watching the yard of %s", folder)
    sys.stdout.write(f"ready {cluster.coordinator}\n")
    sys.stdout.flush()
    while not stop.wait(POLL_EVERY_S):
        for line in cluster.poll():
            log.warning("%s", line)
    return 0


def start_supervised(settings: Settings, folder: Path, stop: threading.Event) -> RunningYard:
    """Starts a yard in the folder, under a supervisor, and waits until it is up. Raises StartFailed, DeadlineExceeded,
    and Interrupted once `stop` is set; then nothing of it is left. The caller must hold the folder's lock."""
    from shardyard_launcher.yard.local_cluster import write_settings
    from shardyard_launcher.yard.state_file import YardState, forget_state

    write_settings(settings, folder)
    yard, child = _begin(settings, folder, YardState(()))
    try:
        _await_ready(yard, child, stop)
    except BaseException:
        yard.stop()
        forget_state(folder)
        raise
    return yard


def supervise_again(settings: Settings, folder: Path, state: YardState) -> RunningYard:
    """Starts a supervisor for a yard that has lost its own. The caller must hold the folder's lock."""
    from shardyard_launcher.yard.local_cluster import SETTINGS_FILE, write_settings
    from shardyard_launcher.yard.state_file import YardState

    if not (folder / SETTINGS_FILE).exists():
        write_settings(settings, folder)
    # a process that was given up gets a new budget
    return _begin(settings, folder, YardState(state.roles, state.restarts))[0]


def keep_supervised(yard: RunningYard, settings: Settings, folder: Path) -> list[str]:
    """Starts a supervisor if a running yard has lost its own, as the next `shardyard up` would. Says so."""
    from shardyard.domain import errors
    from shardyard_launcher.yard.state_file import locked, read_state

    if yard.supervised:
        return []
    try:
        with locked(folder):
            found = read_state(folder)
            if found is None:
                return []
            dead, yard.state = yard.state.supervisor, supervise_again(settings, folder, found).state
    except errors.NotReady:
        return []  # another command starts or stops the yard
    return [f"{dead or 'the supervisor'} has ended; started {yard.state.supervisor} in its place"]


def _begin(settings: Settings, folder: Path, state: YardState) -> tuple[RunningYard, RunningRole]:
    from shardyard_launcher.yard.local_cluster import SETTINGS_FILE, environment_of_roles
    from shardyard_launcher.yard.role_process import start_role
    from shardyard_launcher.yard.running_yard import RunningYard
    from shardyard_launcher.yard.state_file import LOGS, SUPERVISOR, YardState

    whole = folder.absolute()
    child = start_role(
        SUPERVISOR,
        SUPERVISOR,
        ["-c", str(whole / SETTINGS_FILE), "--state", str(whole)],
        log=whole / LOGS / f"{SUPERVISOR}.log",
        environment=environment_of_roles(),
        tied=False,
    )
    written = YardState((child.process, *state.processes), state.restarts)
    written.write(folder)
    child.release()
    return RunningYard(settings, folder, written), child


def _await_ready(yard: RunningYard, child: RunningRole, stop: threading.Event) -> None:
    from shardyard.domain import errors
    from shardyard_launcher.yard.local_cluster import READY_MS_MAX, wait_until

    def missing() -> str:
        if child.read_ready():
            return ""
        if not child.alive:
            raise _failed(child)
        yard.refresh()
        return yard.waited_for

    left = wait_until(missing, time.monotonic() + (READY_MS_MAX + LATE_MS) / 1000, stop)
    if left:
        raise errors.DeadlineExceeded(f"the yard was not ready in time: it waited for {left}")


def _failed(supervisor: RunningRole) -> StartFailed:
    """The supervisor's error, which `shardyard up` shows as its own."""
    from shardyard_launcher.yard.role_process import tail

    process = supervisor.process
    said = process.log.read_text(encoding="utf-8", errors="replace")
    at = said.find(f"\n{ERROR}") + 1 or (0 if said.startswith(ERROR) else -1)
    if at < 0:
        text = f"{ERROR}{process} {supervisor.ending} before the yard was up; the end of {process.log}:\n"
        return StartFailed(text + tail(process.log), 1)
    return StartFailed(said[at:].rstrip(), supervisor.exit_code or 1)
