"""`shardyard coordinator`, `server`, `agent`: one role, in the foreground.

Owns: which addresses a role binds and advertises, the ready line, the end by a signal. Invariants: a line `ready
ADDRESS` goes to standard output once the role can be used. Roles are imported only when they are started.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
import signal
import socket
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from shardyard.runtime.failpoints import arm
from shardyard.transport import refuse_tls_12
from shardyard_launcher.terminal.options import (
    ADDRESS,
    Given,
    StopSignals,
    insecure_network_option,
    load_given,
    log_option,
    settings_options,
)

if TYPE_CHECKING:
    from shardyard.config.settings import Settings
    from shardyard.runtime.preemption import PreemptionWatch

F = TypeVar("F", bound=Callable[..., Any])

PRIVATE = 0o077
"""The umask of coordinators and servers: what they write, no other user can read. An agent keeps its own, since its
training processes inherit it."""
_WILDCARDS = ("0.0.0.0", "[::]")  # noqa: S104 - it is looked for, not bound


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


def _role(role: str) -> Callable[[F], F]:
    """Adds the options of all roles, loads the settings and sets up the log. The command gets `given`, the address to
    listen on, and the one to advertise (None: the same)."""
    is_coordinator = role == "coordinator"

    def decorate(command: F) -> F:
        @wraps(command)
        def called(
            *,
            coordinator: str | None,
            bind: str | None,
            advertise: str | None,
            config: str | None,
            sets: tuple[str, ...],
            log_format: str | None,
            failpoints: str,
            insecure_network: bool,
            **own: Any,
        ) -> Any:
            arm(failpoints)
            flags: dict[str, object] = {"log.format": log_format, "coordinator": coordinator}
            flags["security.insecure_network"] = insecure_network or None
            if is_coordinator:
                del flags["coordinator"]
                advertise = advertise or coordinator
            given = load_given(config, sets, flags)
            settings = given.loaded.settings
            if not is_coordinator:
                _require_coordinator(settings)
            _set_up_log(role, settings)
            port = settings.yard.coordinator_port if is_coordinator else 0
            if settings.security.tls:
                refuse_tls_12()
            where, known_as = addresses(bind or f"{settings.yard.bind}:{port}", advertise)
            _protect(settings, where)
            gc.disable()  # until `_ready`: what is imported meanwhile stays
            try:
                return command(given=given, bind=where, advertise=known_as, **own)
            finally:
                gc.enable()

        meaning = "The same as --advertise." if is_coordinator else "The coordinator's address."
        advertised = (
            "The address at which other processes reach this one (default: that of --bind; the machine's name if it "
            "listens on all addresses)."
        )
        with_options = launcher_options(log_option(insecure_network_option(settings_options(called))))
        with_options = click.option("--failpoints", default="", hidden=True)(with_options)
        with_options = click.option("--advertise", metavar=ADDRESS, help=advertised)(with_options)
        bound = "The address to listen on. Port 0 takes a free port."
        with_options = click.option("--bind", metavar=ADDRESS, help=bound)(with_options)
        return cast(F, click.option("--coordinator", metavar=ADDRESS, help=meaning)(with_options))

    return decorate


def _prepare() -> None:
    """Sets the umask, and lets this process open as many files as it may: each connection is one."""
    os.umask(PRIVATE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@click.command()
@click.option("--state", metavar="DIR", help="Folder of its journal. Without it the coordinator cannot be restarted.")
@_role("coordinator")
def coordinator(given: Given, bind: str, advertise: str | None, state: str | None) -> int:
    """Run a coordinator: it assigns partitions to servers and data to workers."""
    _prepare()
    from shardyard_coordinator.service import process

    with StopSignals() as signals:
        process.serve(
            bind=bind,
            advertise=advertise,
            settings=given.loaded.settings,
            state=None if state is None else Path(state),
            stop=signals.stop,
            ready=_ready,
        )
    return 0


@click.command()
@_role("server")
def server(given: Given, bind: str, advertise: str | None) -> int:
    """Run a server: it holds parameters and updates them."""
    _prepare()
    from shardyard_ps_server.service import process

    with StopSignals() as signals, _stopped_by_notice(given.loaded.settings, signals):
        process.serve(
            coordinator=given.loaded.settings.coordinator,
            bind=bind,
            advertise=advertise,
            settings=given.loaded.settings,
            stop=signals.stop,
            hurry=signals.hurry,
            ready=_ready,
        )
    return 0


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--workers", type=click.IntRange(min=1), help="How many training processes a launch starts (default: yard.workers)."
)
@click.option(
    "--state",
    metavar="DIR",
    help="Folder for what launches print, in `launches` below it (default: the setting yard.state).",
)
@_role("agent")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- SCRIPT ARGUMENTS...]")
def agent(
    given: Given,
    bind: str,
    advertise: str | None,
    workers: int | None,
    state: str | None,
    command: tuple[str, ...],
) -> int:
    """Run an agent: it starts and watches training processes.

    With a script, the agent launches the script and ends with its exit code.
    """
    from shardyard_launcher.scripts.script import launch_environment
    from shardyard_worker.agent import process as agent_process

    settings = given.loaded.settings
    # the training processes inherit the settings with the environment
    os.environ.update(launch_environment(os.environ, given.loaded, config=given.config, sets=given.sets, whole=False))
    with StopSignals() as signals, _stopped_by_notice(settings, signals):
        code = agent_process.serve(
            coordinator=settings.coordinator,
            bind=bind,
            advertise=advertise,
            workers=workers or settings.yard.workers,
            state=Path(state or settings.yard.state),
            settings=settings,
            command=list(command) or None,
            stop=signals.stop,
            hurry=signals.hurry,
            ready=_ready,
        )
    if command and signals.exit_code is not None:
        return signals.exit_code
    return exit_status(code)


def _stopped_by_notice(settings: Settings, signals: StopSignals) -> PreemptionWatch:
    """A notice of preemption has the effect of a signal while this lasts."""
    from shardyard.runtime.preemption import PreemptionWatch

    return PreemptionWatch(settings.membership.notice_place, lambda _: signals.stop.set())


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


def _require_coordinator(settings: Settings) -> None:
    from shardyard.domain import errors

    if not settings.coordinator:
        raise errors.ConfigurationError(
            "the coordinator's address is missing",
            why="a server or an agent registers with the coordinator of its yard",
            todo="give --coordinator HOST:PORT, set SHARDYARD_COORDINATOR, or name it in the settings file",
        )


def _tie(ends_with: int | None, awaits_go: bool) -> None:
    """Ends this process with its launcher; or makes it wait until the launcher has recorded it."""
    from shardyard_worker.agent.bootstrap import die_with_parent

    if ends_with is not None:
        die_with_parent(ends_with, signal.SIGTERM)
    if awaits_go and not sys.stdin.readline():
        sys.exit("the process that started this one ended before this one could begin")


def _protect(settings: Settings, bind: str) -> None:
    """Raises ConfigurationError if everybody on the network could use this process."""
    from shardyard.domain import errors
    from shardyard.security.local import is_loopback

    host = bind.rpartition(":")[0]
    if settings.security.tls or is_loopback(host):
        return
    if not settings.security.insecure_network:
        raise errors.ConfigurationError(
            f"without TLS this process does not listen on {host}, which is open to the network",
            why="whoever reaches the port could train, read and stop jobs, and run programs",
            todo="remove security.tls from the settings; or, in a network that you trust, add --insecure-network",
        )


def _set_up_log(role: str, settings: Settings) -> None:
    from shardyard.runtime import log

    log.setup(settings.log.format, settings.log.level)
    log.bind_process(role=role)


def _ready(address: str) -> None:
    gc.freeze()  # a later collection stops the role only for what is new, not for its modules
    gc.enable()
    sys.stdout.write(f"ready {address}\n")
    sys.stdout.flush()
