"""`shardyard logs` and `attach`: what the scripts that agents run have printed, and print.

Owns: the options, where a line goes, the words printed. Invariant: neither command changes or ends a launch. Must not
know: how an agent keeps output, how a launch is found and followed (scripts).
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from shardyard_launcher.terminal.options import StopSignals, yard_options

if TYPE_CHECKING:
    from shardyard.config.settings import Settings
    from shardyard.wire.v1 import agent_pb2 as agent_wire

LINES_MAX: Final = 1_000_000_000

_launch = click.argument("launch", required=False)


@click.command()
@_launch
@click.option(
    "-f", "--follow", is_flag=True, help="Go on with what is printed from now on, until the launch has ended."
)
@click.option("--process", type=click.IntRange(min=0), metavar="N", help="Only what process N has printed.")
@click.option("--tail", type=click.IntRange(0, LINES_MAX), metavar="N", help="Only the last N lines.")
@click.option("-t", "--timestamps", is_flag=True, help="Show when each line was printed, in UTC.")
@yard_options
def logs(
    settings: Settings, launch: str | None, follow: bool, process: int | None, tail: int | None, timestamps: bool
) -> int:
    """Show what a launch has printed.

    LAUNCH is its number, as `shardyard status` shows it, or the name of its script. Without it, the launch that runs is
    used, or the newest. Agents keep the output of their latest launches, of those that have ended too. If the yard of
    the state folder is down, the output is read from the folder.
    """
    from shardyard_launcher.scripts import launches
    from shardyard_launcher.terminal.yard_network import network_of
    from shardyard_launcher.yard.state_file import coordinator_of, read_state

    folder = Path(settings.yard.state)
    if not settings.coordinator and read_state(folder) is None and launches.has_launches(folder):
        found = launches.find_launch_in(folder, launch)
        click.echo(f"no yard is up in {folder}; what follows is in its folder", err=True)
        batches = launches.read_kept(folder, found, process=process, tail=tail)
    else:
        coordinator = coordinator_of(settings)
        network = network_of(settings, coordinator=coordinator)
        found = launches.find_launch(network, coordinator, launch)
        batches = launches.read_output_of(network, found, process=process, tail=tail, follow=follow)
    several = process is None and found.described.workers > 1
    for lines in batches:
        for line in lines:
            _show(line, several=several, timestamps=timestamps)
        sys.stdout.flush()
    return 0


def _show(said: agent_wire.ProcessOutput, *, several: bool, timestamps: bool) -> None:
    from shardyard_launcher.scripts.launches import moment_of

    parts = [said.line]
    if said.by_agent:
        parts.insert(0, "[agent]")
    elif several:
        parts.insert(0, f"[{said.local_index}]")
    if timestamps:
        moment = datetime.datetime.fromtimestamp(moment_of(said.time_s), datetime.UTC)
        parts.insert(0, moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03}Z")
    stream = sys.stderr if said.standard_error else sys.stdout
    if said.standard_error:
        sys.stdout.flush()  # on a terminal both streams keep their order
    stream.write(" ".join(parts) + "\n")


@click.command()
@_launch
@yard_options
def attach(settings: Settings, launch: str | None) -> int:
    """Follow a launch as `shardyard run` does.

    The command shows what the launch prints from now on, and its progress, and ends with its exit code. Ctrl-C ends the
    command, and the launch goes on. LAUNCH is the number of the launch, as `shardyard status` shows it, or the name of
    its script. Without it, the launch that runs is used.
    """
    from shardyard_launcher.commands.up_run import follow_launch
    from shardyard_launcher.scripts.launches import find_launch
    from shardyard_launcher.terminal.yard_network import network_of
    from shardyard_launcher.yard.state_file import coordinator_of

    coordinator = coordinator_of(settings)
    network = network_of(settings, coordinator=coordinator)
    found = find_launch(network, coordinator, launch)
    with StopSignals() as signals:
        if found.runs:
            click.echo(f"attached to {found.title}; Ctrl-C detaches, and the launch goes on", err=True)
        return follow_launch(network, coordinator, found, settings, signals)
