"""`shardyard stop`: ends a job before its data ends.

Owns: what the command prints. Must not know: where a job stops, how its workers are told.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from shardyard_launcher.terminal.options import ADDRESS, load_given, settings_options

if TYPE_CHECKING:
    from shardyard.transport.interfaces import Peer
    from shardyard.wire.v1 import coordinator_pb2 as wire

TIMEOUT_MS: Final = 10_000
ASK_AGAIN_S: Final = 0.1


@click.command()
@click.argument("job", required=False)
@click.option(
    "--reason", default="", metavar="TEXT", help="Why. `shardyard status` shows it, and the scripts can read it."
)
@click.option("--wait", is_flag=True, help="Wait until the job has ended and its last checkpoint is written.")
@click.option(
    "--coordinator", metavar=ADDRESS, help="The coordinator's address (default: that of the yard of `shardyard up`)."
)
@click.option("--state", metavar="DIR", help="State folder of `shardyard up` (default: yard.state).")
@settings_options
def stop(
    job: str | None,
    reason: str,
    wait: bool,
    coordinator: str | None,
    state: str | None,
    config: str | None,
    sets: tuple[str, ...],
) -> int:
    """Stop a job in good order.

    Its workers finish the step that they compute, and a last checkpoint is written. JOB is a name. Without it: the only
    job that runs.
    """
    from shardyard.domain import errors
    from shardyard.runtime.waits import WaitRegistry
    from shardyard.transport.grpc_client import GrpcNetwork
    from shardyard.wire import methods
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.status.words import describe_stop
    from shardyard_launcher.yard.state_file import coordinator_of

    settings = load_given(config, sets, {"coordinator": coordinator, "yard.state": state}).loaded.settings
    address = coordinator_of(settings)
    peer = GrpcNetwork().connect(address, name="coordinator", unavailable=errors.CoordinatorUnavailable)
    wait_registry = WaitRegistry()
    try:
        request = wire.StopJobRequest(job_name=job or "", reason=reason)
        with wait_registry.over(lambda: f"the {peer.name} to take the stop"):
            told = peer.call(methods.STOP_JOB, request, timeout_ms=TIMEOUT_MS)
        if told.first:
            click.echo(f"job {told.job_name} is told to stop")
        else:
            click.echo(f"job {told.job_name} was told to stop before, {describe_stop(told.stop)}")
        return _await_end(peer, told) if wait else 0
    finally:
        wait_registry.close()
        peer.close()


def _await_end(peer: Peer, told: wire.StopJobReply) -> int:
    """0 if the job is finished, 1 if it has failed or was forgotten."""
    from shardyard.runtime.waits import ExplainedWait
    from shardyard.wire import methods
    from shardyard.wire.v1 import coordinator_pb2 as wire

    with ExplainedWait(lambda: f"job {told.job_name} to end") as explained:
        while True:
            status = peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=TIMEOUT_MS)
            found = next((each for each in status.jobs if each.job == told.job), None)
            if found is None or found.state == wire.JOB_STATE_FAILED:
                why = f": {found.failure.what}" if found is not None else ""
                click.echo(f"job {told.job_name} has failed{why}", err=True)
                return 1
            if found.state == wire.JOB_STATE_FINISHED:
                click.echo(f"job {told.job_name} is finished, at step {found.step:,}")
                return 0
            explained.tick()
            time.sleep(ASK_AGAIN_S)
