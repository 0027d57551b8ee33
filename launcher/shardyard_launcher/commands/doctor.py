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

from shardyard_launcher.terminal.options import ADDRESS, load_given, settings_options

if TYPE_CHECKING:
    from shardyard_launcher.probes.findings import Finding


@click.command()
@click.option(
    "--coordinator", metavar=ADDRESS, help="The coordinator's address (default: that of the yard of `shardyard up`)."
)
@click.option("--state", metavar="DIR", help="State folder of `shardyard up` (default: yard.state).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@settings_options
def doctor(coordinator: str | None, state: str | None, as_json: bool, config: str | None, sets: tuple[str, ...]) -> int:
    """Probe this machine, and the way to a yard; say what is wrong."""
    from shardyard.runtime import log
    from shardyard_launcher.probes.findings import Verdict

    settings = load_given(config, sets, {"coordinator": coordinator, "yard.state": state}).loaded.settings
    log.setup(settings.log.format, settings.log.level)
    found: list[Finding] = []
    for finding in _examine(settings.coordinator, Path(settings.yard.state)):
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


def _examine(coordinator: str, state: Path) -> Iterator[Finding]:
    from shardyard_launcher.probes import machine, network
    from shardyard_launcher.probes.findings import carry_out, warning
    from shardyard_launcher.yard.state_file import read_state

    if not coordinator:
        found = read_state(state)
        coordinator = found.address_of("coordinator") if found else ""
    if coordinator:
        yield from network.probe(coordinator)
    else:
        said = f"no yard is up in {state}, and no coordinator was named"
        yield warning("name", said, "to probe the way to one give --coordinator HOST:PORT")
    for probe in machine.probes(state):
        yield from carry_out(probe)
