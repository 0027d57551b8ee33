"""`shardyard stop` ends a job before its data ends; `shardyard drain` lets a member leave the yard in order.

Owns: what the commands print. Must not know: where a job stops, what a member finishes or hands over.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardyard_launcher.terminal.options import yard_options

if TYPE_CHECKING:
    from shardyard.config.settings import Settings
    from shardyard.transport.interfaces import Network
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.terminal.coordinator_client import CoordinatorClient


@click.command()
@click.argument("job", required=False)
@click.option(
    "--reason", default="", metavar="TEXT", help="Why. `shardyard status` shows it, and the scripts can read it."
)
@click.option("--wait", is_flag=True, help="Wait until the job has ended and its last checkpoint is written.")
@click.option(
    "--launch",
    metavar="LAUNCH",
    help="End the processes of this launch instead, whatever they do. Its number, or the name of its script.",
)
@yard_options
def stop(settings: Settings, job: str | None, reason: str, wait: bool, launch: str | None) -> int:
    """Stop a job before its data ends.

    The workers finish their present step, and a last checkpoint is written. JOB is a job's name. Without it, the only
    job that runs is stopped.
    """
    from shardyard.wire import methods
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.status.words import describe_stop
    from shardyard_launcher.terminal.coordinator_client import CoordinatorClient
    from shardyard_launcher.terminal.yard_network import network_of
    from shardyard_launcher.yard.state_file import coordinator_of

    coordinator = coordinator_of(settings)
    network = network_of(settings, coordinator=coordinator)
    if launch is not None:
        if job or reason:
            raise click.UsageError("--launch goes with neither a job nor a reason: it ends processes, not a job")
        return _end_launch(network, coordinator, launch)
    with CoordinatorClient(coordinator, network) as client:
        request = wire.StopJobRequest(job_name=job or "", reason=reason)
        reply = client.call(methods.STOP_JOB, request, "to stop the job")
        if reply.first:
            click.echo(f"job {reply.job_name} is told to stop")
        else:
            click.echo(f"job {reply.job_name} was told to stop before, {describe_stop(reply.stop)}")
        return _await_end(client, reply) if wait else 0


def _why(failed: wire.JobStatus) -> str:
    from shardyard.transport.error_codes import from_detail

    failure = from_detail(failed.failure)
    return f": {failure.what}" + (f"\n  what to do: {failure.todo_text}" if failure.todo_text else "")


def _end_launch(network: Network, coordinator: str, wanted: str) -> int:
    from shardyard_launcher.scripts.launches import end_launch, find_launch

    found = find_launch(network, coordinator, wanted)
    if not found.runs:
        click.echo(f"{found.title} has ended before")
        return 0
    ended = end_launch(network, found)
    click.echo(f"{found.title} {'has ended' if ended else 'is told to end, and has not ended yet'}")
    return 0 if ended else 1


def _await_end(client: CoordinatorClient, stopped: wire.StopJobReply) -> int:
    """0 if the job is finished, 1 if it has failed or was forgotten."""
    from shardyard.wire.v1 import coordinator_pb2 as wire

    for found in client.watch(stopped.job, lambda: f"job {stopped.job_name} to end"):
        if found is None or found.state == wire.JOB_STATE_FAILED:
            click.echo(f"job {stopped.job_name} has failed{'' if found is None else _why(found)}", err=True)
            return 1
        if found.state == wire.JOB_STATE_FINISHED:
            click.echo(f"job {stopped.job_name} is finished, at step {found.step:,}")
            return 0
    raise AssertionError("watch has no end")


@click.command()
@click.argument("member")
@click.option("--wait", is_flag=True, help="Wait until the member has left.")
@yard_options
def drain(settings: Settings, member: str, wait: bool) -> int:
    """Let a member leave in order: its work goes to others, and nothing is lost or computed twice.

    MEMBER is a server, worker or agent: its id or address in `shardyard status`, or its name in a yard on this machine
    (server-0). After membership.drain_s it counts as dead.
    """
    from shardyard.wire import methods
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.terminal.quantities import describe_duration
    from shardyard_launcher.yard.running_yard import connect_to_yard

    with connect_to_yard(settings) as client:
        request = wire.DrainRequest(member=_address(Path(settings.yard.state), member))
        reply = client.call(methods.DRAIN, request, f"to let {member} leave")
        left = describe_duration(reply.left_ms)
        click.echo(f"{reply.title} {'leaves' if reply.first else 'was told before to leave'} in order, within {left}")
        if wait:
            _await_departure(client, reply)
            click.echo(f"{reply.title} has left")
    return 0


def _address(folder: Path, member: str) -> str:
    """The address of a process that has this name in the yard on this machine; otherwise what was given."""
    from shardyard_launcher.yard.state_file import read_state

    state = read_state(folder)
    return next((role.address for role in state.roles if role.name == member), member) if state else member


def _await_departure(client: CoordinatorClient, draining: wire.DrainReply) -> None:
    import time

    from shardyard.runtime.waits import ExplainedWait
    from shardyard_launcher.terminal.coordinator_client import ASK_AGAIN_S

    with ExplainedWait(lambda: f"{draining.title} to leave") as wait:
        while any(each.incarnation == draining.incarnation for each in client.status().members):
            wait.tick()
            time.sleep(ASK_AGAIN_S)
