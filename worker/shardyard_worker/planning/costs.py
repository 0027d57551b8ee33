"""Memory of each process, and bytes that each step moves, for a planned model under each strategy.

Counted is what grows with the model: its variables, their gradients, and the optimizer's state, at the moment at which
a worker takes the most. Not counted: activations, modules that are gathered for a moment, what torch itself takes, rows
of tables. Must not know: scripts, servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.optimizers import WHOLE_VARIABLES
from shardyard.domain.replica_groups import Strategy
from shardyard_worker.planning.dry_run import PlannedModel

VERSIONS: Final = 3
"""Copies of the values on servers: two versions that workers may pull, and the one that is being made."""


@dataclass(frozen=True, slots=True)
class Cost:
    """`worker`: bytes of memory in each worker. `servers`: in all servers together. `busiest`: bytes that a step moves,
    both ways, at the machine that moves the most, if each process has a machine of its own; None: mostly activations,
    which are not counted.
    `refused`: why the model cannot be trained so; empty if it can."""

    strategy: Strategy
    worker: int
    servers: int
    busiest: int | None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    strategy: Strategy
    why: str


def costs_of(model: PlannedModel, workers: int, servers: int) -> list[Cost]:
    """
    >>> model = PlannedModel(JobSettings(), "adam", 1_000, 4_000, 8_000, 0, 0)
    >>> [cost.busiest for cost in costs_of(model, workers=4, servers=2)]
    [16000, 0, 0, 12000, None, 18000, None]
    """
    values, gradients = model.parameters + model.buffers, model.parameters
    consistency = model.settings.consistency
    ranks = workers if consistency.logical_ranks == "auto" else consistency.logical_ranks
    stored = VERSIONS * values + model.state
    # a step's gradients wait for those of the other ranks
    steps = stored + gradients * ranks
    # the model, the values as they come from servers, and the gradients as they go there
    worker = model.fixed + 2 * values + gradients
    moved = gradients + values
    busiest = max(moved, workers * moved // servers)
    # the model, gradients, their buckets, and the state; servers hold what was published last
    mirrored = model.fixed + values + 2 * gradients + model.state
    clips_rows = bool(model.tables and model.settings.clip.norm)
    stages = _in_replica(model, Strategy.PIPELINE, workers)
    shards = _in_replica(model, Strategy.SHARDED, workers)
    parts = _in_replica(model, Strategy.TENSOR, workers)
    refused = "job.clip.norm is of variables, and of rows on servers" if clips_rows else ""
    return [
        Cost(
            Strategy.PARAMETER_SERVER, worker, steps if consistency.mode.updates is UpdateMode.SYNC else stored, busiest
        ),
        Cost(Strategy.CENTRAL_STORAGE, worker, steps, 0),
        Cost(Strategy.MIRRORED, mirrored, stored, 0, refused),
        Cost(Strategy.MULTI_WORKER_MIRRORED, mirrored, stored, _all_reduced(gradients, workers), refused),
        _of_pipeline(model, workers, stages, stored, refused),
        _of_shards(model, workers, shards, stored, refused, busiest),
        _of_parts(model, workers, parts, stored, refused),
    ]


def _of_shards(model: PlannedModel, workers: int, shards: int, stored: int, refused: str, served: int) -> Cost:
    """`served`: bytes at the busiest machine if each worker pushes whole gradients."""
    parameters, gradients = model.parameters, model.parameters
    gathered, is_whole = 6 * gradients * (shards - 1) // shards, _needs_whole(model)
    if _pushes(model, Strategy.SHARDED):
        worker, servers = _with_values_on_servers(model, parameters // shards, shards, workers, stored)
        busiest = max(gathered + 2 * parameters // shards, served // shards)
        return Cost(Strategy.SHARDED, worker, servers, busiest, is_whole)
    # a shard of everything; when the data ends, the whole model, and a shard of its values and the state; parameters
    # are gathered twice
    worker = model.fixed + model.buffers + (parameters + _sums(gradients, workers, shards) + model.state) // shards
    worker += max(gradients // shards, parameters)
    busiest = gathered + _all_reduced(gradients // shards, workers // shards)
    return Cost(Strategy.SHARDED, worker, stored, busiest, refused or is_whole)


def _of_parts(model: PlannedModel, workers: int, parts: int, stored: int, refused: str) -> Cost:
    part, uncut = model.parameters - model.cut + model.cut // parts, _needs_whole(model) or model.uncut
    if _pushes(model, Strategy.TENSOR):
        worker, servers = _with_values_on_servers(model, part, parts, workers, stored)
        return Cost(Strategy.TENSOR, worker, servers, None, uncut)
    # layers that are cut are in the workers in parts, with their gradients and state; when the data ends, whole too
    worker = model.fixed + model.buffers + part + _sums(part, workers, parts) + max(part, model.cut)
    worker += model.state * part // max(1, model.parameters)
    return Cost(Strategy.TENSOR, worker, stored, None, refused or uncut)


def _needs_whole(model: PlannedModel) -> str:
    return f"{model.optimizer} needs whole parameters" if model.optimizer in WHOLE_VARIABLES else ""


def _pushes(model: PlannedModel, strategy: Strategy) -> bool:
    """Whether the job's replicas push their gradients to servers, under this strategy."""
    return model.settings.strategy is strategy and not model.settings.has_replicas


def _with_values_on_servers(model: PlannedModel, part: int, shares: int, workers: int, stored: int) -> tuple[int, int]:
    """Memory of a worker, and of all servers. The worker has values and gradients of its part, and what travels of its
    share; when the data ends, the whole model, and its values as they come. Servers keep a step's gradients of all
    ranks."""
    share = model.parameters // shares
    worker = model.fixed + model.buffers + max(2 * part + 2 * share, 2 * model.parameters)
    return worker, stored + _of_step(model, workers // shares)


def _of_step(model: PlannedModel, ranks: int) -> int:
    """Bytes of the gradients that servers keep until a step has those of all ranks."""
    return model.parameters * ranks if model.settings.consistency.mode.updates is UpdateMode.SYNC else 0


def _of_pipeline(model: PlannedModel, workers: int, stages: int, stored: int, refused: str) -> Cost:
    parameters, gradients, own = model.parameters, model.parameters, model.fixed + model.buffers
    if _pushes(model, Strategy.PIPELINE):
        # of its stage the values, as they come from servers too, and the gradients; when the data ends, the whole model
        worker = own + max((2 * parameters + gradients) // stages, 2 * parameters)
        return Cost(Strategy.PIPELINE, worker, stored + _of_step(model, workers // stages), None)
    # of its stage everything; when the data ends, the whole model, and the state of its stage
    worker = own + (_sums(gradients, workers, stages) + model.state) // stages
    worker += max((parameters + gradients) // stages, parameters)
    return Cost(Strategy.PIPELINE, worker, stored, None, refused)


def _in_replica(model: PlannedModel, strategy: Strategy, workers: int) -> int:
    """How many workers have a replica together: as many as the settings say, if they choose this strategy."""
    settings = model.settings
    chosen = settings.workers_per_replica if settings.strategy is strategy else None
    return min(chosen or workers, workers)


def _all_reduced(nbytes: int, members: int) -> int:
    """What a member of a ring sends and gets."""
    return 4 * nbytes * (members - 1) // members


def _sums(gradients: int, workers: int, in_replica: int) -> int:
    """The buckets in which the gradients of several replicas are added up."""
    return gradients if workers > in_replica else 0


def choose(costs: Sequence[Cost], workers: int, memory: int) -> Choice:
    """The strategy for machines that are alike, one for each process. `memory`: bytes that a worker may take.

    >>> model = PlannedModel(JobSettings(), "adam", 1_000, 4_000, 8_000, 0, 0)
    >>> choose(costs_of(model, workers=4, servers=2), workers=4, memory=40_000).strategy.value
    'multi_worker_mirrored'
    >>> choose(costs_of(model, workers=4, servers=2), workers=4, memory=16_000).why
    "a worker with the optimizer's state does not fit into its memory"
    """
    by_strategy = {cost.strategy: cost for cost in costs}
    served, mirrored = by_strategy[Strategy.PARAMETER_SERVER], by_strategy[Strategy.MULTI_WORKER_MIRRORED]
    if mirrored.refused:
        return Choice(Strategy.PARAMETER_SERVER, mirrored.refused)
    if workers == 1:
        return Choice(Strategy.PARAMETER_SERVER, "one worker has no other to sum its gradients with")
    if mirrored.worker > memory:
        return Choice(Strategy.PARAMETER_SERVER, "a worker with the optimizer's state does not fit into its memory")
    assert served.busiest is not None
    if mirrored.busiest is not None and mirrored.busiest < served.busiest:
        return Choice(Strategy.MULTI_WORKER_MIRRORED, "a step moves fewer bytes at the busiest machine")
    return Choice(
        Strategy.PARAMETER_SERVER, "a step moves no more bytes at the busiest machine, and workers need not wait"
    )
