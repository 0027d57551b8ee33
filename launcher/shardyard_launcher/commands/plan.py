"""`shardyard plan`: what a script would take under each strategy, without training.

Owns: what is printed. Must not know: how sizes are found (shardyard_worker.planning).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from shardyard_launcher.terminal.options import load_given, require_script, script_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from shardyard_worker.planning.costs import Cost
    from shardyard_worker.planning.dry_run import PlannedModel


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--workers", type=click.IntRange(min=1), help="Number of training processes (default: yard.workers).")
@script_options()
def plan(
    workers: int | None, config: str | None, sets: tuple[str, ...], log_format: str | None, command: tuple[str, ...]
) -> int:
    """Show what a script would take under each strategy.

    The script is run until it calls job.prepare, without memory for its parameters. Then the command prints the memory
    of each process and the bytes of a step under each job.strategy, and which one it would choose.
    """
    from shardyard.config.configuration import CONFIG_VARIABLE, environment_name
    from shardyard_launcher.terminal.quantities import describe_size
    from shardyard_launcher.terminal.tables import show
    from shardyard_worker.planning.costs import choose, costs_of
    from shardyard_worker.planning.dry_run import dry_run

    given = load_given(config, sets, {"yard.workers": workers, "log.format": log_format, "log.level": "error"})
    require_script(command[0])
    settings = given.loaded.settings
    if given.config is not None:
        os.environ[CONFIG_VARIABLE] = given.config
    os.environ.update({environment_name(path): str(flag.value) for path, flag in given.sets})
    os.environ[environment_name("log.level")] = "error"
    count = settings.yard.workers
    model = dry_run(command[0], command[1:])
    costs = costs_of(model, count, settings.yard.servers)
    memory = _memory() // count
    chosen = choose(costs, count, memory)
    click.echo(_describe(model))
    show(_table(costs, count, settings.yard.servers))
    click.echo("not counted: activations, torch itself, rows of tables")
    for table in model.tables:
        click.echo(f"table {table.name}: {describe_size(table.row_bytes)} for each row's values, on the servers")
    click.echo(f"would choose job.strategy={chosen.strategy.value}: {chosen.why}")
    return 0


def _describe(model: PlannedModel) -> str:
    from shardyard_launcher.terminal.quantities import describe_size

    more = model.buffers + model.fixed
    others = f", {describe_size(more)} of buffers and parameters that are not trained" if more else ""
    return (
        f"{model.elements:,} parameters ({describe_size(model.parameters)}){others};"
        f" {model.optimizer} keeps {describe_size(model.state)}"
    )


def _table(costs: Sequence[Cost], workers: int, servers: int) -> Table:
    from shardyard_launcher.terminal.quantities import describe_size
    from shardyard_launcher.terminal.tables import new_table

    columns = ("strategy", f"each of {workers} workers", f"{servers} servers together", "busiest machine a step", "")
    table = new_table(*columns)
    for cost in costs:
        busiest = "activations" if cost.busiest is None else describe_size(cost.busiest)
        sizes = describe_size(cost.worker), describe_size(cost.servers), busiest
        table.add_row(cost.strategy.value, *sizes, f"not possible: {cost.refused}" if cost.refused else "")
    return table


def _memory() -> int:
    """Bytes of this machine, or of its first GPU."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory * torch.cuda.device_count()
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
