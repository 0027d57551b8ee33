"""`shardyard stop`: ends a job before its data ends.

Owns: what the command prints. Must not know: where a job stops, how its workers are told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shardyard_launcher.terminal.options import yard_options

if TYPE_CHECKING:
    from shardyard.config.settings import Settings
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.terminal.coordinator_client import CoordinatorClient


@click.command()
@click.argument("job", required=False)
@click.option(
    "--reason", default="", metavar="TEXT", help="Why. `shardyard status` shows it, and the scripts can read it."
)
@click.option("--wait", is_flag=True, help="Wait until the job has ended and its last checkpoint is written.")
@yard_options
def stop(settings: Settings, job: str | None, reason: str, wait: bool) -> int:
    """Stop a job before its data ends.

    The workers finish their present step, and a last checkpoint is written. JOB is a job's name. Without it, the only
    job that runs is stopped.
    """
    from shardyard.wire import methods
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.status.words import describe_stop
    from shardyard_launcher.terminal.coordinator_client import CoordinatorClient
    from shardyard_launcher.yard.state_file import coordinator_of

    with CoordinatorClient(coordinator_of(settings)) as client:
        request = wire.StopJobRequest(job_name=job or "", reason=reason)
        reply = client.call(methods.STOP_JOB, request, "to stop the job")
        if reply.first:
            click.echo(f"job {reply.job_name} is told to stop")
        else:
            click.echo(f"job {reply.job_name} was told to stop before, {describe_stop(reply.stop)}")
        return _await_end(client, reply) if wait else 0


def _await_end(client: CoordinatorClient, stopped: wire.StopJobReply) -> int:
    """0 if the job is finished, 1 if it has failed or was forgotten."""
    from shardyard.wire.v1 import coordinator_pb2 as wire

    for found in client.watch(stopped.job, lambda: f"job {stopped.job_name} to end"):
        if found is None or found.state == wire.JOB_STATE_FAILED:
            why = f": {found.failure.what}" if found is not None else ""
            click.echo(f"job {stopped.job_name} has failed{why}", err=True)
            return 1
        if found.state == wire.JOB_STATE_FINISHED:
            click.echo(f"job {stopped.job_name} is finished, at step {found.step:,}")
            return 0
    raise AssertionError("watch has no end")
