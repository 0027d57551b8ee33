"""`shardyard eval --follow`: runs a script that evaluates a job during its training.

Owns: the script's process on this machine. If it dies while the job continues, it is started again, within a budget.
Invariants: the process ends with this one, however that ends. Each start follows the same run. Must not know: what the
script does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import click

from shardyard_launcher.commands.roles import exit_status
from shardyard_launcher.terminal.options import (
    StopSignals,
    coordinator_option,
    load_given,
    require_script,
    script_options,
    state_option,
)

if TYPE_CHECKING:
    from shardyard.config.settings import Settings
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.terminal.coordinator_client import CoordinatorClient

TIMEOUT_MS: Final = 3_000
LOOK_S: Final = 0.1
GRACE_S: Final = 10.0
WINDOW_MS: Final = 600_000


@click.command("eval", context_settings={"allow_interspersed_args": False})
@click.option("--follow", is_flag=True, help="Evaluate again and again until the job has ended.")
@click.option("--job", metavar="NAME", help="The job (default: the only one that runs).")
@click.option("--every", type=click.IntRange(0), metavar="SECONDS", help="Evaluate at most once in this time.")
@click.option(
    "--into", metavar="URL", help="Folder or URL for the best version (default: beside the job's checkpoints)."
)
@coordinator_option
@state_option
@script_options()
def evaluate(
    follow: bool,
    job: str | None,
    every: int | None,
    into: str | None,
    coordinator: str | None,
    state: str | None,
    config: str | None,
    sets: tuple[str, ...],
    log_format: str | None,
    command: tuple[str, ...],
) -> int:
    """Run a script that evaluates a job while it trains.

    The command waits for the job to begin. The script reads the job's values with `sy.follow()`; training does not wait
    for it. See docs/guides/evaluation.md.
    """
    from shardyard.config.assignments import Layer
    from shardyard.config.configuration import Flag
    from shardyard.domain import errors
    from shardyard_launcher.scripts.script import launch_environment
    from shardyard_launcher.yard.state_file import coordinator_of

    if not follow:
        raise errors.ConfigurationError("`shardyard eval` needs --follow", why="", todo="add --follow")
    require_script(command[0])
    own = {"job.name": job, "evaluator.every_s": every, "evaluator.into": into}
    given = load_given(config, sets, {**own, "coordinator": coordinator, "yard.state": state, "log.format": log_format})
    settings = given.loaded.settings
    address = coordinator_of(settings)
    flags = [(path, Flag(value, "a flag")) for path, value in own.items() if value is not None]
    environment = launch_environment(
        os.environ, given.loaded, config=given.config, sets=[*given.sets, *flags], whole=True
    )
    name = settings.job.name if given.loaded.origins["job.name"].layer is not Layer.DEFAULT else ""
    with StopSignals() as signals:
        code = _follow(settings, address, name, command, environment, signals.stop)
    return signals.exit_code or code


def _follow(
    settings: Settings,
    address: str,
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    stop: threading.Event,
) -> int:
    from shardyard.runtime.restart_policy import GivenUp, RestartPolicy
    from shardyard_launcher.terminal.coordinator_client import CoordinatorClient
    from shardyard_launcher.terminal.yard_network import network_of

    grace_ms = settings.membership.coordinator_grace_ms
    restarts = RestartPolicy(
        restarts_max=settings.evaluator.restarts_max, window_ms=WINDOW_MS, setting="evaluator.restarts_max"
    )
    with CoordinatorClient(address, network_of(settings, coordinator=address)) as client:
        job = _await_job(client, name, grace_ms, stop)
        if job is None:
            return 130
        follows = {**environment, "SHARDYARD_COORDINATOR": address, "SHARDYARD_FOLLOWS": str(job.job)}
        while True:
            code = _run(command, follows, stop)
            if code == 0 or stop.is_set():
                return exit_status(code)
            how = f"was ended by signal {-code}" if code < 0 else f"exited ({code})"
            if all(each.job != job.job for each in _unfinished(client, grace_ms, stop)):
                click.echo(f"{command[0]} {how}, and job {job.name} has ended", err=True)
                return exit_status(code)
            decided = restarts.died(command[0], _now_ms())
            if isinstance(decided, GivenUp):
                click.echo(
                    f"error: {command[0]} {how}, and is not restarted (evaluator.restarts_max is "
                    f"{settings.evaluator.restarts_max} within {WINDOW_MS // 60_000} minutes)",
                    err=True,
                )
                return exit_status(code)
            said = f"{decided.number} of {settings.evaluator.restarts_max}"
            click.echo(f"{command[0]} {how}; it is restarted ({said})", err=True)
            if stop.wait(max(0, decided.at_ms - _now_ms()) / 1000):
                return 130


def _run(command: Sequence[str], environment: Mapping[str, str], stop: threading.Event) -> int:
    """Returns the script's exit code. Once `stop` is set, asks the script to end, and kills it if it does not."""
    from shardyard.runtime.waits import ExplainedWait

    arguments = [sys.executable, "-u", "-P", "-m", "shardyard_worker.agent.bootstrap", str(os.getpid()), *command]
    # this process passes on the terminal's signals
    process = subprocess.Popen(arguments, env=dict(environment), start_new_session=True)
    try:
        while process.poll() is None and not stop.wait(LOOK_S):
            """It runs until the job has ended."""
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            give_up = time.monotonic() + GRACE_S
            with ExplainedWait(lambda: f"{command[0]} (pid {process.pid}) to end") as wait:
                while process.poll() is None and time.monotonic() < give_up:
                    wait.tick()
                    time.sleep(LOOK_S)
    finally:
        if process.poll() is None:
            process.kill()
        code = process.wait()
    return code


def _await_job(client: CoordinatorClient, name: str, grace_ms: int, stop: threading.Event) -> wire.JobStatus | None:
    """The job to follow; None once `stop` is set. Raises InvalidRequest if several jobs run and none is named,
    CoordinatorUnavailable."""
    from shardyard.domain import errors
    from shardyard.runtime.waits import ExplainedWait

    with ExplainedWait(lambda: f"job {name or 'of any name'} to begin") as wait:
        while not stop.is_set():
            jobs = [job for job in _unfinished(client, grace_ms, stop) if not name or job.name == name]
            if len(jobs) > 1:
                names = ", ".join(sorted(job.name for job in jobs))
                raise errors.InvalidRequest(f"{len(jobs)} jobs run: {names}", why="", todo="say which with --job")
            if jobs:
                return jobs[0]
            wait.tick()
            stop.wait(LOOK_S)
    return None


def _unfinished(client: CoordinatorClient, grace_ms: int, stop: threading.Event) -> list[wire.JobStatus]:
    """Jobs that have not ended; none once `stop` is set. Waits for an unavailable coordinator for the grace time.
    Raises CoordinatorUnavailable."""
    from shardyard.domain import errors
    from shardyard.runtime.waits import ExplainedWait
    from shardyard.wire.v1 import coordinator_pb2 as wire

    ended = (wire.JOB_STATE_FINISHED, wire.JOB_STATE_FAILED)
    give_up = time.monotonic() + grace_ms / 1000
    with ExplainedWait(lambda: "the coordinator to answer") as wait:
        while not stop.is_set():
            try:
                return [job for job in client.status(timeout_ms=TIMEOUT_MS).jobs if job.state not in ended]
            except (errors.Unavailable, errors.NotReady):
                if time.monotonic() >= give_up:
                    raise
            wait.tick()
            stop.wait(LOOK_S)
    return []


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
