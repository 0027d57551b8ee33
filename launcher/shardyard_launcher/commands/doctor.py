"""`shardyard doctor`: says what is wrong on this machine, and between it and a yard, in one line each.

Owns: the order of the probes, the exit status (1 if something FAILED), the two outputs. Invariant: no probe can hang
the command (shardyard_launcher.probes.findings). Must not know: how anything is probed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardyard_launcher.terminal.options import yard_options

if TYPE_CHECKING:
    from shardyard.config.settings import Settings
    from shardyard.transport.grpc_client import GrpcNetwork
    from shardyard_launcher.probes.findings import Finding


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@yard_options
def doctor(settings: Settings, as_json: bool) -> int:
    """Check this machine and the way to a yard.

    One line says what was found, and what to do about it. The exit status is 1 if a line says FAILED.
    """
    from shardyard.runtime import log
    from shardyard_launcher.probes.findings import Verdict

    log.setup(settings.log.format, settings.log.level)
    found: list[Finding] = []
    for finding in _examine(settings):
        found.append(finding)
        if not as_json:
            click.echo(finding.line)
    failures = sum(finding.verdict is Verdict.FAILED for finding in found)
    if as_json:
        entries = [
            {"probe": each.probe, "verdict": each.verdict.value, "said": each.said, "todo": each.todo} for each in found
        ]
        click.echo(json.dumps({"failed": failures, "findings": entries}, indent=2))
    sys.stdout.flush()
    return 1 if failures else 0


def _examine(settings: Settings) -> Iterator[Finding]:
    from shardyard.domain.errors import CoordinatorUnavailable, NotTrusted
    from shardyard.transport.grpc_client import GrpcNetwork
    from shardyard_launcher.probes import machine, network
    from shardyard_launcher.probes.findings import carry_out, warning
    from shardyard_launcher.terminal.yard_network import network_of
    from shardyard_launcher.yard.state_file import read_state

    coordinator, state = settings.coordinator, Path(settings.yard.state)
    if not coordinator:
        found = read_state(state)
        coordinator = found.coordinator if found else ""
    if coordinator:
        reached: GrpcNetwork | NotTrusted
        try:
            reached = network_of(settings, coordinator=coordinator)
        except CoordinatorUnavailable:
            reached = GrpcNetwork(None)  # the probes say why
        except NotTrusted as error:
            reached = error
        yield from network.probe(coordinator, reached)
    else:
        said = f"no yard is up in {state}, so only this machine is checked"
        yield warning("name", said, "give --coordinator HOST:PORT to check the way to a yard")
    for probe in machine.probes(state):
        yield from carry_out(probe)
