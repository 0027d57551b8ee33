"""The command `shardyard`: its commands, and how errors end it.

Owns: exit codes (0 done, 1 failed, 2 wrong use or settings, 128 + N ended by signal N; a script's own for `up`, `run`
and `agent`), the form of error messages. Invariants: Shardyard's own errors are shown without a traceback, defects with
one. No role is imported before it is needed, so `shardyard --version` is fast. Must not know: what a command does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardyard_launcher.commands import doctor, launches, roles, supervisor, up_run
from shardyard_launcher.commands.audit import audit
from shardyard_launcher.commands.checkpoint import checkpoint
from shardyard_launcher.commands.down import down
from shardyard_launcher.commands.evaluate import evaluate
from shardyard_launcher.commands.identities import identities, invite, join
from shardyard_launcher.commands.plan import plan
from shardyard_launcher.commands.quarantine import quarantined
from shardyard_launcher.commands.set import set_
from shardyard_launcher.commands.stop import drain, stop
from shardyard_launcher.terminal.error_output import print_error
from shardyard_launcher.terminal.options import load_given, settings_options, yard_options

if TYPE_CHECKING:
    from shardyard.config.settings import Settings


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="shardyard", message="shardyard %(version)s", help="Show the version.")
def shardyard() -> None:
    """A parameter server for PyTorch: train on machines that come and go."""


@shardyard.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--job", "wanted", metavar="NAME", help="Show only the jobs of this name, or the one with this id.")
@yard_options
def status(settings: Settings, as_json: bool, wanted: str | None) -> int:
    """Show members, jobs, partitions and data of a running yard."""
    from shardyard_launcher.status.as_json import to_json
    from shardyard_launcher.status.as_tables import as_tables
    from shardyard_launcher.status.report import ask, read_local
    from shardyard_launcher.terminal.tables import show
    from shardyard_launcher.terminal.yard_network import network_of
    from shardyard_launcher.yard.state_file import coordinator_of

    address, folder = coordinator_of(settings), Path(settings.yard.state)
    report = ask(network_of(settings, coordinator=address), address, read_local(settings, folder, address))
    if wanted is not None:
        report = report.of_job(wanted)
    if as_json:
        click.echo(to_json(report))
    else:
        show(as_tables(report))
    return 0


@shardyard.group()
def config() -> None:
    """Show settings."""


@config.command()
@settings_options
def explain(config: str | None, sets: tuple[str, ...]) -> int:
    """Show each setting, its value, and where the value comes from."""
    from shardyard.config.configuration import render_explanation

    click.echo(render_explanation(load_given(config, sets).loaded), nl=False)
    return 0


for command in (
    *(roles.coordinator, roles.server, roles.agent),
    *(up_run.up, down, up_run.run, plan, supervisor.supervisor, launches.logs, launches.attach),
    *(invite, join, identities),
    *(checkpoint, quarantined, audit, stop, drain, set_, evaluate, doctor.doctor),
):
    shardyard.add_command(command)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line. Returns the exit status."""
    from shardyard.domain import errors

    try:
        code = shardyard.main(args=arguments, prog_name="shardyard", standalone_mode=False)
        sys.stdout.flush()
    except errors.ShardyardError as error:
        print_error(error)
        return 2 if isinstance(error, errors.ConfigurationError) else 1
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        return 130
    except BrokenPipeError:
        # the reader of our output has gone; flushing at exit would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
