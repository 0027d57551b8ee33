"""`shardyard set`: changes a running job's consistency mode, its bound on staleness, or its strategy.

Owns: which settings of a running job can be set, what the command prints. Must not know: how servers and workers change
the mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from shardyard_launcher.terminal.options import yard_options

if TYPE_CHECKING:
    from shardyard.config.settings import Settings
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.terminal.coordinator_client import CoordinatorClient

PREFIX: Final = "job."
MODE, STALENESS, STRATEGY = "consistency.mode", "consistency.staleness", "strategy"


@click.command("set")
@click.argument("what", nargs=-1, required=True, metavar="[JOB] NAME=VALUE...")
@click.option("--wait", is_flag=True, help="Wait until all servers and workers of the job use the new settings.")
@yard_options
def set_(settings: Settings, what: tuple[str, ...], wait: bool) -> int:
    """Change the consistency mode or the strategy of a running job.

    JOB is a job's name. Without it, the only job that runs is changed. The settings are consistency.mode (sync, async
    or bounded), consistency.staleness, and strategy (parameter_server or multi_worker_mirrored). What the job has
    cancels a change that has not taken effect yet.
    """
    from shardyard.wire import methods
    from shardyard_launcher.status.words import describe_consistency
    from shardyard_launcher.yard.running_yard import connect_to_yard

    request = parse_request(what)
    with connect_to_yard(settings) as client:
        reply = client.call(methods.SWITCH_CONSISTENCY, request, "to change the job's mode")
        shown = describe_consistency(reply.consistency)
        click.echo(f"job {reply.job_name} {'changes to' if reply.first else 'already uses'} {shown}")
        return _await_all(client, reply) if wait else 0


def parse_request(what: tuple[str, ...]) -> wire.SwitchConsistencyRequest:
    """The request in the command's arguments. Raises click.UsageError, ConfigurationError for a value that no job could
    have."""
    from shardyard.config.configuration import Flag, load
    from shardyard.wire import common_messages
    from shardyard.wire.v1 import coordinator_pb2 as wire

    names = [each for each in what if "=" not in each]
    if len(names) > 1 or (names and what[0] != names[0]):
        raise click.UsageError(f"{names[-1]!r}: expected NAME=VALUE, such as {MODE}=bounded")
    given = dict(each.split("=", 1) for each in what if "=" in each)
    given = {name.removeprefix(PREFIX): value for name, value in given.items()}
    odd = sorted(set(given) - {MODE, STALENESS, STRATEGY})
    if odd:
        raise click.UsageError(f"{odd[0]!r} cannot be changed in a running job; {MODE}, {STALENESS} and {STRATEGY} can")
    if not given:
        raise click.UsageError(f"nothing to set; for example {MODE}=bounded {STALENESS}=3")
    flags = {PREFIX + name: Flag(value, f"shardyard set {name}") for name, value in given.items()}
    job = load(None, {}, flags).settings.job
    consistency = job.consistency
    return wire.SwitchConsistencyRequest(
        job_name=names[0] if names else "",
        mode=common_messages.CONSISTENCY_MODES.to_wire(consistency.mode) if MODE in given else None,
        staleness=consistency.staleness if STALENESS in given else None,
        strategy=job.strategy.value if STRATEGY in given else "",
    )


def _await_all(client: CoordinatorClient, switched: wire.SwitchConsistencyReply) -> int:
    """0 once all workers follow this change or a later one; 1 if the job has ended, was forgotten, or keeps its
    mode."""
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.status.words import describe_switch

    name, number, to_steps, seen = switched.job_name, switched.consistency.number, False, wire.SwitchStatus()
    if number:
        for found in client.watch(switched.job, lambda: f"job {name} to change its mode {describe_switch(seen)}"):
            if found is None or found.state in (wire.JOB_STATE_FINISHED, wire.JOB_STATE_FAILED):
                click.echo(f"job {name} has ended", err=True)
                return 1
            switch = found.consistency
            ahead = switch.consistency.number - number
            to_steps = to_steps or (ahead == 0 and switch.HasField("step"))
            if ahead < 0 and to_steps:
                click.echo(f"job {name} keeps its mode: the change was cancelled", err=True)
                return 1
            if ahead > 0 or (ahead == 0 and switch.servers and not switch.behind):
                break
            seen.CopyFrom(switch)
    click.echo(f"all servers and workers of job {name} have changed")
    return 0
