"""`shardyard up`, `run`: a yard on this machine, with or without a script.

Owns: when a yard is started, reused or refused; what stays running after a script, an error or Ctrl-C; the words
printed about it. Invariants: `run` leaves no process behind. `up` leaves a yard that is whole, or that its supervisor
is repairing, or no yard that it started. Must not know: how processes are started and watched (cluster, supervisor,
running_yard, script).
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from shardyard_launcher.commands.roles import exit_status
from shardyard_launcher.terminal.options import (
    ADDRESS,
    Given,
    StopSignals,
    load_given,
    require_script,
    script_options,
    state_option,
)

if TYPE_CHECKING:
    from shardyard.config.settings import Settings
    from shardyard.transport.interfaces import Network
    from shardyard.wire.v1 import agent_pb2 as agent_wire
    from shardyard_launcher.scripts.launches import FoundLaunch
    from shardyard_launcher.scripts.script import Script
    from shardyard_launcher.yard.running_yard import RunningYard

_PASSES_ARGUMENTS = {"allow_interspersed_args": False}
"""What follows the script is its own."""
_began = click.option("--began", type=int, hidden=True, help="When `make up` began, in seconds since 1970.")


@click.command(context_settings=_PASSES_ARGUMENTS)
@state_option
@_began
@script_options(required=False)
def up(
    state: str | None,
    began: int | None,
    config: str | None,
    sets: tuple[str, ...],
    log_format: str | None,
    command: tuple[str, ...],
) -> int:
    """Start a yard that stays up, and run a script on it.

    A yard is a coordinator, servers and an agent on this machine. A yard that is up already is used. Without a script,
    the command only starts the yard. `shardyard down` stops it.
    """
    from shardyard_launcher.commands.supervisor import StartFailed, keep_supervised
    from shardyard_launcher.terminal.yard_network import network_of
    from shardyard_launcher.yard.local_cluster import Interrupted

    given = load_given(config, sets, {"yard.state": state, "log.format": log_format})
    if command:
        require_script(command[0])
    folder = Path(given.loaded.settings.yard.state)
    with StopSignals() as signals:
        try:
            yard, ours = _bring_up(given, folder, signals)
        except Interrupted:
            click.echo("stopped before the yard was up", err=True)
            return signals.exit_code or 130
        except StartFailed as failed:
            click.echo(failed.said, err=True)
            return failed.exit_code
        if ours:
            _report_jobs(yard, given.loaded.settings, signals)
        code = 0
        if command:
            script = _script(command, given, {}, whole=True, workers=0)
            up_now, settings = yard.state, given.loaded.settings

            def check() -> list[str]:
                return [*keep_supervised(yard, settings, folder), *yard.check()]

            network = network_of(settings, coordinator=up_now.coordinator, state=folder)
            where = (network, up_now.coordinator, up_now.agent)
            code = _follow(*where, script, settings, signals, check, sys.stdout, began)
        yard.refresh()
        if ours and (signals.exit_code is not None or yard.broken):
            _take_down(yard, folder)
            click.echo("the yard is stopped", err=True)
            return signals.exit_code or code or 1
    if yard.broken:
        return signals.exit_code or code or 1
    _say_where(yard, folder, given.loaded.settings)
    return signals.exit_code or code


@click.command(context_settings=_PASSES_ARGUMENTS)
@click.option("--coordinator", metavar=ADDRESS, help="Run the script on the yard of this coordinator. Start nothing.")
@click.option("--workers", type=click.IntRange(min=1), help="Number of training processes (default: yard.workers).")
@click.option(
    "--env",
    "variables",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="An environment variable for the script. Without a value, that of this command.",
)
@click.option(
    "--detach", is_flag=True, help="Return when the script has started, and leave it running (with --coordinator)."
)
@script_options()
def run(
    coordinator: str | None,
    workers: int | None,
    variables: tuple[str, ...],
    detach: bool,
    config: str | None,
    sets: tuple[str, ...],
    log_format: str | None,
    command: tuple[str, ...],
) -> int:
    """Run a script on a yard of its own.

    The yard is started for the script, on free ports, and stopped when the script ends. With --coordinator, the script
    runs on a yard that is up already. Ctrl-C stops the script; a second one kills it. If the terminal is closed, a
    script on a yard that was up already goes on.
    """
    from shardyard_launcher.terminal.variables import given_variables

    own: dict[str, object] = {"coordinator": coordinator, "yard.workers": workers, "log.format": log_format}
    given = load_given(config, sets, own)
    require_script(command[0])
    settings = given.loaded.settings
    environment = given_variables(variables, os.environ)
    if detach and not settings.coordinator:
        raise _no_yard_to_stay_in()
    with StopSignals() as signals:
        if settings.coordinator:
            from shardyard_launcher.scripts.script import find_agent
            from shardyard_launcher.terminal.yard_network import network_of

            script = _script(command, given, environment, whole=False, workers=workers or 0)
            network = network_of(settings)
            agent = find_agent(network, settings.coordinator)
            if detach:
                return _leave_running(network, agent, replace(script, unattended=True), given, signals)
            # the agent and the script notice what happens to a yard that was not started here
            where = (network, settings.coordinator, agent)
            code = _follow(*where, script, settings, signals, list, sys.stderr, announced=True)
        else:
            code = _run_alone(given, command, environment, signals)
    return signals.exit_code or code


def _no_yard_to_stay_in() -> Exception:
    from shardyard.domain.errors import ConfigurationError

    return ConfigurationError(
        "--detach needs --coordinator",
        why="without it, the yard is started for the script, and ends with the command",
        todo="start a yard with `shardyard up`, which prints the coordinator's address, and give that address",
    )


def _run_alone(given: Given, command: tuple[str, ...], environment: Mapping[str, str], signals: StopSignals) -> int:
    from shardyard_launcher.terminal.coordinator_client import CoordinatorClient
    from shardyard_launcher.yard.local_cluster import Interrupted, LocalCluster, await_last_checkpoints
    from shardyard_launcher.yard.temp_folder import run_folder

    settings = given.loaded.settings
    settings = settings.model_copy(update={"yard": settings.yard.model_copy(update={"coordinator_port": 0})})
    with run_folder() as folder:
        cluster = LocalCluster(settings, folder, tied=True)

        def poll() -> list[str]:
            news = cluster.poll()
            cluster.check()
            return news

        try:
            cluster.start(stop=signals.stop)
            script = _script(command, given, environment, whole=True, workers=0)
            where = (cluster.network(), cluster.coordinator, cluster.state.agent)
            code = _follow(*where, script, settings, signals, poll, sys.stderr)
            if code == 0:
                with CoordinatorClient(cluster.coordinator, cluster.network()) as client:
                    await_last_checkpoints(client, signals.stop, poll)
            return code
        except Interrupted:
            return 130
        finally:
            cluster.stop()


def _bring_up(given: Given, folder: Path, signals: StopSignals) -> tuple[RunningYard, bool]:
    """The folder's yard, and whether it was started now."""
    from shardyard_launcher.commands.supervisor import start_supervised, supervise_again
    from shardyard_launcher.yard.local_cluster import check_free
    from shardyard_launcher.yard.running_yard import RunningYard
    from shardyard_launcher.yard.state_file import forget_state, locked, read_state

    settings = given.loaded.settings
    yard = settings.yard
    if not folder.exists():
        # a refused start leaves no folder
        check_free(yard.bind, yard.coordinator_port)
    with locked(folder):
        found = read_state(folder)
        if found is not None:
            standing = RunningYard(settings, folder, found)
            is_lost = standing.gone or standing.was_interrupted
            if not is_lost:
                if not standing.supervised:
                    standing = supervise_again(settings, folder, found)
                    click.echo(f"the yard in {folder} had no supervisor; started a new supervisor")
                standing.await_whole(signals.stop)
                click.echo(f"the yard in {folder} is up already and is used")
                _note_differences(settings, standing)
                return standing, False
            what = f"no process of the last yard in {folder} is left"
            if not standing.gone:
                what = f"the start of the yard in {folder} was interrupted, and what it had started is stopped"
            click.echo(f"{what}; starting a new yard")
            standing.stop()
            forget_state(folder)
        check_free(yard.bind, yard.coordinator_port)
        click.echo(f"starting a coordinator, {yard.servers} servers, an agent for {yard.workers} workers")
        return start_supervised(settings, folder, signals.stop), True


def _note_differences(settings: Settings, yard: RunningYard) -> None:
    running = sum(process.role == "server" for process in yard.state.roles)
    if running != settings.yard.servers:
        click.echo(
            f"note: it has {running} servers, and the settings ask for {settings.yard.servers}; to start it with these "
            "settings, run `shardyard down` first",
            err=True,
        )


def follow_launch(
    network: Network, coordinator: str, found: FoundLaunch, settings: Settings, signals: StopSignals
) -> int:
    """Shows a launch that was found, from where it is, until it has ended or a signal comes. Returns the exit status of
    the command. The launch is not stopped."""
    if found.runs:
        code = _follow(network, coordinator, found.agent.address, found, settings, signals, list, sys.stderr)
        return 0 if signals.exit_code == 130 else signals.exit_code or code
    ending = found.described.ending
    if not found.described.HasField("ending"):
        click.echo(
            f"{found.title} has ended with its agent; `shardyard logs {found.number}` shows its output", err=True
        )
        return 1
    click.echo(f"{found.title} has ended; `shardyard logs {found.number}` shows its output", err=True)
    return _report_end(Path(found.described.script), found.described.workers, ending, ending.first_error)


def _follow(
    network: Network,
    coordinator: str,
    agent: str,
    script: Script | FoundLaunch,
    settings: Settings,
    signals: StopSignals,
    check: Callable[[], list[str]],
    progress_to: TextIO,
    began: int | None = None,
    *,
    announced: bool = False,
) -> int:
    """Runs a script, or follows a launch, and shows it. Returns its exit status. Errors of the yard are printed here,
    so that the caller can clean up and continue. `announced`: says first which launch it is, and how it is stopped."""
    from shardyard.domain import errors
    from shardyard_launcher.scripts.progress import FirstStep, display_for
    from shardyard_launcher.scripts.script import Script, ScriptRun
    from shardyard_launcher.terminal.error_output import print_error

    launched = ScriptRun(network, coordinator, agent, script, settings)
    try:
        with display_for(lambda: launched.workers, progress_to) as display:
            ended = launched.start(display, stop=signals.stop) if announced else None
            if ended is None:
                if announced and launched.number:
                    display.note(
                        f"launch {launched.number}; Ctrl-C stops it. If this terminal is closed, it goes on as long as "
                        f"its agent does, and `shardyard attach {launched.number}` follows it"
                    )
                shown = FirstStep(display, began) if isinstance(script, Script) else display
                ended = launched.follow(shown, signals=signals, check=check)
    except errors.ShardyardError as error:
        print_error(error)
        return 1
    finally:
        launched.close()
    if ended is None:
        click.echo("stopped" if isinstance(script, Script) else f"detached; {script.title} goes on", err=True)
        return signals.exit_code or 130
    path = script.path if isinstance(script, Script) else Path(script.described.script)
    return _report_end(path, launched.workers, ended, launched.first_error(ended))


def _report_end(script: Path, workers: int, ended: agent_wire.LaunchEnded, first_error: str) -> int:
    """Says why a script has not ended well, if it has not. Returns its exit status."""
    from shardyard.runtime.restart_policy import LEFT_IN_ORDER

    if ended.exit_code == LEFT_IN_ORDER:
        click.echo(f"{script} ended: {ended.first_error}", err=True)
    elif ended.stopped:
        click.echo(f"{script} was stopped", err=True)
    elif ended.exit_code:
        which = f"; process {ended.first_error_index} failed first" if workers > 1 else ""
        said = textwrap.indent(textwrap.dedent(first_error), "  ")
        click.echo(f"error: {script} failed{which}:\n{said}", err=True)
    return exit_status(ended.exit_code)


def _leave_running(network: Network, agent: str, script: Script, given: Given, signals: StopSignals) -> int:
    """Launches a script, and returns when its processes have started."""
    from shardyard.config.assignments import Layer
    from shardyard_launcher.scripts.progress import NotesOnly
    from shardyard_launcher.scripts.script import ScriptRun

    settings = given.loaded.settings
    launched = ScriptRun(network, settings.coordinator, agent, script, settings)
    try:
        ended = launched.start(NotesOnly(), stop=signals.stop)
        if ended is not None:
            return _report_end(script.path, launched.workers, ended, ended.first_error)
        if signals.exit_code is not None:
            launched.stop(NotesOnly(), signals.hurry)
            click.echo("stopped", err=True)
            return signals.exit_code
    finally:
        launched.close()
    by_flag = given.loaded.origins["coordinator"].layer is Layer.FLAG
    option = f" --coordinator {settings.coordinator}" if by_flag else ""
    processes = f"{launched.workers} process{'es'[: 2 * (launched.workers != 1)]}"
    lines = [
        f"launch {launched.number} of {script.path} has started, in {processes}",
        f"  see what it prints:  shardyard logs {launched.number} --follow{option}",
        f"  follow it:           shardyard attach {launched.number}{option}",
        f"  stop it:             shardyard stop --launch {launched.number}{option}",
    ]
    click.echo("\n".join(lines))
    return 0


def _report_jobs(yard: RunningYard, settings: Settings, signals: StopSignals) -> None:
    from shardyard.domain import errors
    from shardyard_launcher.checkpoints.resume_notice import report_jobs
    from shardyard_launcher.terminal.error_output import print_error

    try:
        with yard.connect() as client:
            report_jobs(client, settings.membership.lease_ms, signals.stop, click.echo)
    except errors.CoordinatorUnavailable as error:  # the script that needs it will say so
        print_error(error)


def _script(
    command: tuple[str, ...], given: Given, environment: Mapping[str, str], *, whole: bool, workers: int
) -> Script:
    """`environment`: variables for this script, beside those that every script gets."""
    from shardyard.config.configuration import RUN_ID_VARIABLE
    from shardyard_launcher.scripts.script import Script, launch_environment
    from shardyard_worker.agent.environment import run_id_of

    inherited = launch_environment(os.environ, given.loaded, config=given.config, sets=given.sets, whole=whole)
    return Script(
        path=Path(command[0]),
        arguments=command[1:],
        environment={**inherited, RUN_ID_VARIABLE: run_id_of(os.environ), **environment},
        workers=workers,
        restarts_max=given.loaded.settings.yard.restarts_max,
        restarts_window_ms=given.loaded.settings.yard.restarts_window_ms,
    )


def _take_down(yard: RunningYard, folder: Path) -> None:
    from shardyard_launcher.yard.state_file import forget_state, locked

    with locked(folder):
        yard.stop()
        forget_state(folder)


def _say_where(yard: RunningYard, folder: Path, settings: Settings) -> None:
    from shardyard.config.settings import YardSettings

    by_make = "MAKELEVEL" in os.environ
    option = "" if settings.yard.state == YardSettings().state else f" --state {folder}"
    lines = [
        "",
        f"the yard is up, with its coordinator at {yard.state.coordinator}",
        f"  run a script on it:  SHARDYARD_COORDINATOR={yard.state.coordinator} {sys.executable} SCRIPT.py",
        f"  see its state:       {'make status' if by_make else f'shardyard status{option}'}",
        f"  stop it:             {'make down' if by_make else f'shardyard down{option}'}",
    ]
    click.echo("\n".join(lines))
