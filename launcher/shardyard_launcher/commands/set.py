"""`shardyard set`: changes a running job's consistency mode, or its bound on staleness.

Owns: which settings of a running job can be set, what the command prints. Must not know: how servers and workers change
the mode.
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
PREFIX: Final = "job."
MODE, STALENESS = "consistency.mode", "consistency.staleness"


@click.command("set")
@click.argument("what", nargs=-1, required=True, metavar="[JOB] NAME=VALUE...")
@click.option("--wait", is_flag=True, help="Wait until all servers and workers of the job use the new settings.")
@click.option(
    "--coordinator", metavar=ADDRESS, help="The coordinator's address (default: that of the yard of `shardyard up`)."
)
@click.option("--state", metavar="DIR", help="State folder of `shardyard up` (default: yard.state).")
@settings_options
def set_(
    what: tuple[str, ...],
    wait: bool,
    coordinator: str | None,
    state: str | None,
    config: str | None,
    sets: tuple[str, ...],
) -> int:
    """Change the consistency of a running job.

    JOB is a name. Without it: of the only job that runs. The settings are consistency.mode (async or bounded; sync
    cancels a change that has not taken effect yet) and consistency.staleness.
    """
    from shardyard.domain import errors
    from shardyard.runtime.waits import WaitRegistry
    from shardyard.transport.grpc_client import GrpcNetwork
    from shardyard.wire import methods
    from shardyard_launcher.status.words import describe_consistency
    from shardyard_launcher.yard.state_file import coordinator_of

    request = parse_request(what)
    settings = load_given(config, sets, {"coordinator": coordinator, "yard.state": state}).loaded.settings
    address = coordinator_of(settings)
    peer = GrpcNetwork().connect(address, name="coordinator", unavailable=errors.CoordinatorUnavailable)
    wait_registry = WaitRegistry()
    try:
        with wait_registry.over(lambda: f"the {peer.name} to take the switch"):
            told = peer.call(methods.SWITCH_CONSISTENCY, request, timeout_ms=TIMEOUT_MS)
        shown = describe_consistency(told.consistency)
        click.echo(f"job {told.job_name} {'goes over to' if told.first else 'goes already by'} {shown}")
        return _await_all(peer, told) if wait else 0
    finally:
        wait_registry.close()
        peer.close()


def parse_request(what: tuple[str, ...]) -> wire.SwitchConsistencyRequest:
    """The request in the command's arguments. Raises click.UsageError, ConfigurationError for a value that no job could
    have."""
    from shardyard.config.configuration import load
    from shardyard.wire import common_messages
    from shardyard.wire.v1 import coordinator_pb2 as wire

    names = [each for each in what if "=" not in each]
    if len(names) > 1 or (names and what[0] != names[0]):
        raise click.UsageError(f"{names[-1]!r}: expected NAME=VALUE, such as {MODE}=bounded")
    given = dict(each.split("=", 1) for each in what if "=" in each)
    given = {name.removeprefix(PREFIX): value for name, value in given.items()}
    odd = sorted(set(given) - {MODE, STALENESS})
    if odd:
        raise click.UsageError(f"{odd[0]!r} cannot be changed in a running job; {MODE} and {STALENESS} can")
    if not given:
        raise click.UsageError(f"nothing to set; for example {MODE}=bounded {STALENESS}=3")
    flags = {PREFIX + name: as_flag(name, value) for name, value in given.items()}
    consistency = load(None, {}, flags).settings.job.consistency
    return wire.SwitchConsistencyRequest(
        job_name=names[0] if names else "",
        mode=common_messages.CONSISTENCY_MODES.to_wire(consistency.mode) if MODE in given else None,
        staleness=consistency.staleness if STALENESS in given else None,
    )


def as_flag(name: str, value: str) -> object:
    from shardyard.config.configuration import Flag

    return Flag(value, f"shardyard set {name}")


def _await_all(peer: Peer, told: wire.SwitchConsistencyReply) -> int:
    """0 once all workers follow this switch or a later one; 1 if the job has ended, was forgotten, or keeps its
    mode."""
    from shardyard.runtime.waits import ExplainedWait
    from shardyard.wire import methods
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.status.words import describe_switch

    number, why, halts = told.consistency.number, "", False
    with ExplainedWait(lambda: f"job {told.job_name} to go over{why}") as explained:
        while number:
            status = peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=TIMEOUT_MS)
            found = next((each for each in status.jobs if each.job == told.job), None)
            if found is None or found.state in (wire.JOB_STATE_FINISHED, wire.JOB_STATE_FAILED):
                click.echo(f"job {told.job_name} has ended", err=True)
                return 1
            switch = found.consistency
            ahead = switch.consistency.number - number
            halts = halts or (ahead == 0 and switch.HasField("step"))
            if ahead < 0 and halts:
                click.echo(f"job {told.job_name} stays as it was: somebody has taken that back", err=True)
                return 1
            if ahead > 0 or (ahead == 0 and switch.servers and not switch.behind):
                break
            why = f" ({describe_switch(switch)})"
            explained.tick()
            time.sleep(ASK_AGAIN_S)
    click.echo(f"all servers and workers of job {told.job_name} have gone over")
    return 0
