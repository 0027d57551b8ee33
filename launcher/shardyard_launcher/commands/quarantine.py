"""`shardyard quarantined`: the batches of a job that do not count, down to the indices of their samples.

Owns: the shape of the list. The JSON is a promise to scripts: names stay, new ones may come. Must not know: how a batch
is condemned.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from shardyard_launcher.terminal.options import yard_options

if TYPE_CHECKING:
    from shardyard.config.settings import Settings
    from shardyard.transport.interfaces import Network
    from shardyard.wire.v1 import coordinator_pb2 as wire

_LIST: Final = "to list the batches in quarantine"
INDICES_SHOWN_MAX: Final = 16


@click.command()
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the indices of all samples.")
@yard_options
def quarantined(settings: Settings, job: str | None, as_json: bool) -> int:
    """Show the batches that were taken out of training.

    A batch is quarantined if it has killed workers, or if its gradients were not finite. JOB is a job's name or id.
    Without it, the batches of all jobs are shown.
    """
    from shardyard_launcher.terminal.yard_network import network_of
    from shardyard_launcher.yard.state_file import coordinator_of

    coordinator = coordinator_of(settings)
    found = ask(network_of(settings, coordinator=coordinator), coordinator, job)
    batches = [batch for name, reply in found for batch in described(name, reply)]
    if as_json:
        click.echo(json.dumps({"batches": batches}, indent=2))
    elif batches:
        _show(batches)
    else:
        click.echo(f"no batch {f'of job {job} ' if job else ''}is in quarantine")
    return 0


def ask(network: Network, coordinator: str, job: str | None) -> list[tuple[str, wire.ListQuarantinedReply]]:
    """The replies with the jobs' names, for all jobs, or for those with this name or id. Raises CoordinatorUnavailable,
    NotFound if there is none."""
    from shardyard.domain import errors
    from shardyard.domain.ids import JobId
    from shardyard.wire import methods
    from shardyard.wire.v1 import coordinator_pb2 as wire
    from shardyard_launcher.terminal.coordinator_client import CoordinatorClient

    with CoordinatorClient(coordinator, network) as client:
        jobs = client.status().jobs
        chosen = [each for each in jobs if job in (None, each.name, str(JobId(each.job)))]
        if job is not None and not chosen:
            known = ", ".join(sorted({each.name for each in jobs})) or "none"
            raise errors.NotFound(f"this yard has no job {job!r}; its jobs are: {known}", why="", todo="")
        return [
            (each.name, client.call(methods.LIST_QUARANTINED, wire.ListQuarantinedRequest(job=each.job), _LIST))
            for each in chosen
        ]


def described(job: str, reply: wire.ListQuarantinedReply) -> list[dict[str, object]]:
    """An entry for each batch, with the positions of its samples in the epoch's order and their indices in the
    dataset."""
    from shardyard.domain.epochs import Indices, order

    feeds = {each.feed: each for each in reply.feeds}
    orders: dict[tuple[int, int], Indices] = {}
    found: list[dict[str, object]] = []
    for batch in reply.batches:
        feed = feeds[batch.feed]
        if (batch.feed, batch.epoch) not in orders:
            orders.clear()  # an epoch's order may be large
            orders[batch.feed, batch.epoch] = order(
                seed=reply.seed, feed=batch.feed, epoch=batch.epoch, samples=feed.samples, shuffle=feed.shuffle
            )
        entry: dict[str, object] = {"job": job, "feed": batch.feed, "epoch": batch.epoch}
        if batch.source.WhichOneof("kind") == "data_shard":
            entry |= {"data_shard": batch.source.data_shard.index, "batch": batch.sequence}
        else:
            entry |= {"rank": batch.source.logical_rank, "step": batch.sequence}
        entry |= {
            "deaths": batch.deaths,
            "not_finite": {"parameter": batch.parameter, "worker": batch.worker} if batch.parameter else None,
            "positions": [batch.begin, batch.end],
            "indices": orders[batch.feed, batch.epoch][batch.begin : batch.end].tolist(),
        }
        found.append(entry)
    return found


def _why(batch: dict[str, object]) -> str:
    found = batch["not_finite"]
    if isinstance(found, dict):
        from shardyard.domain.ids import Incarnation

        return f"{found['parameter']} not finite (worker {Incarnation(found['worker'])})"
    return f"{batch['deaths']} deaths"


def _show(batches: Sequence[dict[str, object]]) -> None:
    from shardyard_launcher.terminal.tables import new_table, show

    table = new_table("job", "feed", "epoch", "batch", "why", "positions", "indices in the dataset")
    for each in batches:
        where = (
            f"{each['batch']} of data shard {each['data_shard']}"
            if "batch" in each
            else f"step {each['step']} of logical rank {each['rank']}"
        )
        positions, indices = each["positions"], each["indices"]
        assert isinstance(positions, list)
        assert isinstance(indices, list)
        shown = ", ".join(map(str, indices[:INDICES_SHOWN_MAX]))
        more = len(indices) - INDICES_SHOWN_MAX
        table.add_row(
            str(each["job"]),
            str(each["feed"]),
            str(each["epoch"]),
            where,
            _why(each),
            f"{positions[0]} to {positions[1] - 1}",
            shown + (f" and {more} more (--json)" if more > 0 else ""),
        )
    show(table)
