"""Brings a job's variables to the servers: registration, creation of partitions, first values, opening.

The job's `deployment` has the stage. Invariant: a job with checkpoints serves no worker before it has one to which it
can go back.
Must not know: how servers are called, leases of members.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardyard.domain import errors
from shardyard.domain.ids import Generation, Incarnation
from shardyard.domain.replica_groups import Strategy
from shardyard_coordinator.core.effects import (
    Acknowledged,
    CreatePartitions,
    DropJob,
    Effect,
    JobPhase,
    LogMessage,
    OpenPartitions,
    Reply,
    VariablesPlaced,
)
from shardyard_coordinator.core.events import VariablesRegistered
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import recovery, residuals
from shardyard_coordinator.flows.checkpointing import spec_of
from shardyard_coordinator.placement import deployment as stages
from shardyard_coordinator.placement import table_specs
from shardyard_coordinator.placement.deployment import Stage
from shardyard_coordinator.placement.placement import Server, servers_of, staying
from shardyard_coordinator.placement.registration import check_registration
from shardyard_coordinator.records import Entry
from shardyard_coordinator.storage.log_owners import LogOwner


def register_variables(
    job: JobState, registered: VariablesRegistered, servers: Sequence[Server], missing: str = ""
) -> list[Effect]:
    """Replies, or creates partitions; in that case the worker asks again. `missing`: the servers for which partitions
    wait. Raises VariableConflict, NotReady, and what
    placement raises."""
    worker, variables, optimizer = registered.caller.incarnation, registered.variables, registered.optimizer
    table_specs.check_settings(registered.tables, job.settings)
    _check_places(job, registered)
    deployed = job.deployment
    if job.mode.is_former_map(deployed.generation):
        raise errors.NotReady(
            f"{job.title} switches to {job.mode.latest}: its partitions are being restored",
            why=job.recovery.waits_for or "that takes a moment",
        )
    if job.origin is not None:
        recovery.check_fits(job, variables, optimizer, registered.tables)
    if not deployed.may_initialize(worker):
        _check_begun(job)
    effects: list[Effect] = []
    if deployed.stage is Stage.EMPTY:
        if missing:
            raise errors.NotReady(
                f"{job.title} waits for {missing}", why="its partitions are spread over all servers that are expected"
            )
        effects += _place(job, registered, servers)
    else:
        assert deployed.layout is not None
        check_registration(deployed.layout, variables, optimizer, registered.tables)
    effects += _create(job)
    effects += job.records(deployed.admit(worker))
    if deployed.stage is not Stage.CREATING:
        assert deployed.layout is not None
        assert deployed.map is not None
        placed = VariablesPlaced(
            deployed.layout,
            deployed.map,
            initializer=deployed.initializer == worker,
            feedback=residuals.for_worker(job, worker),
            restored_generation=job.checkpoint_residuals.generation,
            consistency=job.consistency,
        )
        effects.append(Reply(placed))
    return effects


def commit_variables(job: JobState, worker: Incarnation, generation: Generation) -> list[Effect]:
    """Replies, or opens partitions; in that case the worker asks again. `generation`: of the map under which the values
    were given."""
    deployed = job.deployment
    deployed.check_commit(worker, generation)
    effects = job.records(deployed.commit(worker))
    effects += _open(job)
    if deployed.stage is Stage.OPEN:
        _check_begun(job)
    if deployed.stage is not Stage.OPENING:
        effects.append(Reply(Acknowledged()))
    return effects


def end_creation(job: JobState, generation: Generation, *, created: bool) -> list[Effect]:
    if job.phase.ended:
        # a creation that arrived after the DropJob would stay on its server for ever
        return [DropJob(job.id, server) for server in job.deployment.servers]
    return job.records(job.deployment.end_creation(generation, created=created))


def end_opening(job: JobState, generation: Generation, *, opened: bool, now_ms: int) -> list[Effect]:
    if job.phase.ended:
        return []
    return [
        *job.records(job.deployment.end_opening(generation, opened=opened, now_ms=now_ms)),
        *begin_running(job),
    ]


def reopen(job: JobState, now_ms: int) -> list[Effect]:
    """Opens the partitions again after a failure. Once the values are committed, no worker is needed for that."""
    return _open(job) if job.deployment.is_opening_due(now_ms) else []


def begin_running(job: JobState) -> list[Effect]:
    """Sets the phase to running if the job was starting and its partitions are open."""
    if job.phase is not JobPhase.STARTING or job.deployment.stage is not Stage.OPEN:
        return []
    job.phase, layout = JobPhase.RUNNING, job.deployment.layout
    assert layout is not None
    tables = f" and {len(layout.tables)} tables" if layout.tables else ""
    return [LogMessage(f"{job.title} runs: {len(layout.variables)} variables{tables} on the servers")]


def _check_places(job: JobState, registered: VariablesRegistered) -> None:
    """Raises InvalidRequest."""
    places, settings = registered.places, job.settings
    pushes_stages = settings.strategy is Strategy.PIPELINE and not settings.has_replicas
    count = settings.workers_per_rank if pushes_stages else 0
    wanted = len(registered.variables) if count else 0
    if len(places) != wanted or max(places, default=-1) >= count:
        raise errors.InvalidRequest(
            f"places {places[:8]} of {len(registered.variables)} variables in {job.title}",
            why=f"workers at {count} places push gradients of different variables",
        )


def _place(job: JobState, registered: VariablesRegistered, servers: Sequence[Server]) -> list[Effect]:
    if not staying(servers):
        raise errors.NotReady(
            "all servers leave in order" if servers else "no server has registered yet",
            why="the variables need a server to lie on",
            todo="start one with `shardyard server`; the worker asks again by itself",
        )
    layout = stages.plan(job.settings, registered.variables, registered.optimizer, registered.tables, registered.places)
    job.deployment.place(layout, servers, Stage.UNCREATED)
    assert job.deployment.map is not None
    began: list[Entry] = []
    if job.log_owners is not None:
        logs = {server.incarnation: server.logs for server in servers}
        owners = job.deployment.map.owners
        began = [job.log_owners.begin({each.partition: LogOwner(each.server, 0, logs[each.server]) for each in owners})]
    return job.records([job.deployment.registered, *began])


def _create(job: JobState) -> list[Effect]:
    if not job.deployment.begin_creation():
        return []
    map_ = job.deployment.map
    assert map_ is not None
    return [CreatePartitions(spec_of(job), server, map_.generation, owned) for server, owned in servers_of(map_)]


def _open(job: JobState) -> list[Effect]:
    if not job.deployment.begin_opening():
        return []
    assert job.deployment.map is not None
    return [OpenPartitions(job.id, server, job.deployment.map.generation) for server in job.deployment.servers]


def _check_begun(job: JobState) -> None:
    """Raises NotReady if what is acknowledged now could not be restored."""
    if not job.may_acknowledge:
        raise errors.NotReady(
            f"{job.title} begins when its first checkpoint is written",
            why="if a server died before, its values would be nowhere else",
        )
