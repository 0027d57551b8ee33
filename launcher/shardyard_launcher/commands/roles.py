"""`shardyard coordinator`, `server`, `agent`: one role, in the foreground.

Owns: which addresses a role binds and advertises, the ready line, the end by a signal. Invariants: a line `ready
ADDRESS` goes to standard output once the role can be used. Roles are imported only when they are started.
"""

from __future__ import annotations

import platform
import signal
import socket
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from shardyard_launcher.terminal.options import ADDRESS, Given, StopSignals, load_given, log_option, settings_options

if TYPE_CHECKING:
    from shardyard.config.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

_WILDCARDS = ("0.0.0.0", "[::]")

_coordinator = click.option("--coordinator", metavar=ADDRESS, help="The coordinator's address.")


def launcher_options(command: F) -> F:
    """How a launcher ties a process to itself (shardyard_launcher.yard.role_process). The process is tied before the
    command runs."""

    @click.option("--ends-with", type=int, hidden=True)
    @click.option("--awaits-go", is_flag=True, hidden=True)
    @wraps(command)
    def called(*, ends_with: int | None, awaits_go: bool, **given: Any) -> Any:
        _tie(ends_with, awaits_go)
        return command(**given)

    return cast(F, called)


def _role_options(command: F) -> F:
    """The options of all roles."""
    command = launcher_options(log_option(settings_options(command)))
    command = click.option(
        "--advertise",
        metavar=ADDRESS,
        help="The address at which other processes reach this one (default: that of --bind; the machine's name if it "
        "listens on all addresses).",
    )(command)
    return click.option("--bind", metavar=ADDRESS, help="The address to listen on. Port 0 takes a free port.")(command)


@click.command()
@click.option("--coordinator", "own", metavar=ADDRESS, help="The same as --advertise.")
@click.option("--state", metavar="DIR", help="Folder of its journal. Without it the coordinator cannot be restarted.")
@_role_options
def coordinator(
    own: str | None,
    bind: str | None,
    advertise: str | None,
    state: str | None,
    config: str | None,
    sets: tuple[str, ...],
    log_format: str | None,
) -> int:
    """Run a coordinator: it assigns partitions to servers and data to workers."""
    settings = load_given(config, sets, {"log.format": log_format}).loaded.settings
    _set_up_log("coordinator", settings)
    where, known_as = addresses(bind or f"{settings.yard.bind}:{settings.yard.coordinator_port}", advertise or own)
    from shardyard_coordinator.service import process

    with StopSignals() as signals:
        process.serve(
            bind=where,
            advertise=known_as,
            settings=settings,
            state=None if state is None else Path(state),
            stop=signals.stop,
            ready=_ready,
        )
    return 0


@click.command()
@_coordinator
@_role_options
def server(
    coordinator: str | None,
    bind: str | None,
    advertise: str | None,
    config: str | None,
    sets: tuple[str, ...],
    log_format: str | None,
) -> int:
    """Run a server: it holds parameters and updates them."""
    settings = _given(coordinator, config, sets, log_format).loaded.settings
    _set_up_log("server", settings)
    where, known_as = addresses(bind or f"{settings.yard.bind}:0", advertise)
    from shardyard_ps_server.service import process

    with StopSignals() as signals:
        process.serve(
            coordinator=settings.coordinator,
            bind=where,
            advertise=known_as,
            settings=settings,
            stop=signals.stop,
            ready=_ready,
        )
    return 0


@click.command(context_settings={"allow_interspersed_args": False})
@_coordinator
@click.option(
    "--workers", type=click.IntRange(min=1), help="How many training processes a launch starts (default: yard.workers)."
)
@click.option(
    "--allow-remote-launch",
    is_flag=True,
    help="Start programs for callers on other machines too. Anybody who reaches the port can then run programs here.",
)
@_role_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- SCRIPT ARGUMENTS...]")
def agent(
    coordinator: str | None,
    bind: str | None,
    advertise: str | None,
    workers: int | None,
    allow_remote_launch: bool,
    config: str | None,
    sets: tuple[str, ...],
    log_format: str | None,
    command: tuple[str, ...],
) -> int:
    """Run an agent: it starts and watches training processes.

    With a script, the agent launches the script and ends with its exit code.
    """
    given = _given(coordinator, config, sets, log_format)
    settings = given.loaded.settings
    _set_up_log("agent", settings)
    where, known_as = addresses(bind or f"{settings.yard.bind}:0", advertise)
    _pass_on(given)
    from shardyard_worker.agent import process as agent_process

    with StopSignals() as signals:
        code = agent_process.serve(
            coordinator=settings.coordinator,
            bind=where,
            advertise=known_as,
            workers=workers or settings.yard.workers,
            settings=settings,
            allow_remote_launch=allow_remote_launch,
            command=list(command) or None,
            stop=signals.stop,
            ready=_ready,
        )
    if command and signals.exit_code is not None:
        return signals.exit_code
    return exit_status(code)


def exit_status(code: int) -> int:
    """The exit status for an exit code; a negative code means a signal."""
    return 128 - code if code < 0 else code


def addresses(bind: str, advertise: str | None) -> tuple[str, str | None]:
    """Where to listen and what to advertise (None: the same). Raises ConfigurationError.

    A role that listens on all addresses advertises the machine's name, unless told otherwise. This needs a port in
    advance, so a free one is chosen here. An advertised port of 0 means the one that is listened on.
    """
    from shardyard.domain import errors
    from shardyard.transport.grpc_server import split_address

    host, port = split_address(bind)
    told_host, told_port = (None, 0) if advertise is None else split_address(advertise)
    if told_host in _WILDCARDS:
        raise errors.ConfigurationError(
            f"other processes cannot reach this one at {advertise}",
            todo="give --advertise a name or address of this machine",
        )
    if told_host is None and host not in _WILDCARDS:
        return bind, None
    if told_port == 0:
        port = told_port = port or _free_port(host)
    return f"{host}:{port}", f"{told_host or platform.node()}:{told_port}"


def _free_port(host: str) -> int:
    kind = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as probe:
        probe.bind((host.strip("[]"), 0))
        return int(probe.getsockname()[1])


def _given(coordinator: str | None, config: str | None, sets: tuple[str, ...], log_format: str | None) -> Given:
    from shardyard.domain import errors

    given = load_given(config, sets, {"coordinator": coordinator, "log.format": log_format})
    if not given.loaded.settings.coordinator:
        raise errors.ConfigurationError(
            "the coordinator's address is missing",
            why="a server or an agent registers with the coordinator of its yard",
            todo="give --coordinator HOST:PORT, set SHARDYARD_COORDINATOR, or name it in the settings file",
        )
    return given


def _tie(ends_with: int | None, awaits_go: bool) -> None:
    """Ends this process with its launcher; or makes it wait until the launcher has recorded it."""
    from shardyard_worker.agent.bootstrap import die_with_parent

    if ends_with is not None:
        die_with_parent(ends_with, signal.SIGTERM)
    if awaits_go and not sys.stdin.readline():
        sys.exit("the process that started this one ended before this one could begin")


def _set_up_log(role: str, settings: Settings) -> None:
    from shardyard.runtime import log

    log.setup(settings.log.format, settings.log.level)
    log.bind_process(role=role)


def _pass_on(given: Given) -> None:
    """Puts an agent's settings into its environment, which its training processes inherit."""
    import os

    from shardyard_launcher.scripts.script import launch_environment

    passed = launch_environment(os.environ, given.loaded, config=given.config, sets=given.sets, whole=False)
    os.environ.update(passed)


def _ready(address: str) -> None:
    sys.stdout.write(f"ready {address}\n")
    sys.stdout.flush()
