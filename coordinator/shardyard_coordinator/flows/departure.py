"""How the partitions of a server that leaves in order come to other servers (rule C9 of docs/internals/ledger.md).

    the server has partitions  ->  a checkpoint seals them: they change no more after their cuts
                               ->  the checkpoint is committed: the partitions are lost, with all of their state in it
                               ->  other servers restore them; the partitions of the other servers stay as they are

Invariant: a partition moves only when a committed checkpoint has everything that it has acknowledged. If the server
dies before that, it has died as any server. Must not know: why a server leaves, how servers are called, the clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardyard.domain.ids import Incarnation
from shardyard_coordinator.core.effects import Effect, JobPhase, LogMessage
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import recovery
from shardyard_coordinator.placement.deployment import Stage
from shardyard_coordinator.placement.placement import Server, staying

NOBODY: frozenset[Incarnation] = frozenset()


def due(job: JobState, servers: Sequence[Server]) -> frozenset[Incarnation]:
    """The servers that the next checkpoint seals. `servers`: the living ones."""
    owners = job.deployment.owners
    leaving = [server for server in servers if server.leaves and server.incarnation in owners]
    job.departing = ""
    if not leaving or job.phase is not JobPhase.RUNNING or job.recovery.needed or not job.may_acknowledge:
        return NOBODY
    numbers = ", ".join(str(server.incarnation) for server in leaving)
    if not job.book.enabled:
        job.departing = f"server {numbers} to leave, with partitions that cannot move: the job has no checkpoints"
        return NOBODY
    if job.pending_switch.switch_point is not None:
        job.departing = f"the switch of its mode, before the partitions of server {numbers} move"
        return NOBODY
    alone = not staying(servers) and bool(job.workers)
    if alone and not any(server.hurries for server in leaving):
        job.departing = f"another server for the partitions of server {numbers}, which leaves"
        return NOBODY
    job.departing = f"the partitions of server {numbers}, which leaves, to be written before they move"
    return frozenset(server.incarnation for server in leaving)


def give_up_first_values(job: JobState, servers: Sequence[Server], now_ms: int) -> list[Effect]:
    """A server that leaves has partitions of a job that has not begun: they begin again on other servers."""
    if job.recovery.needed or job.deployment.stage in (Stage.EMPTY, Stage.OPEN) or not recovery.can_begin_again(job):
        return []
    effects: list[Effect] = []
    for server in servers if staying(servers) else ():
        owned = recovery.owned_by(job, server.incarnation) if server.leaves else []
        if owned:
            effects += recovery.lose_values(job, owned, server, "leaves", now_ms, at_once=True)
    return effects


def move(job: JobState, sealed: frozenset[Incarnation], now_ms: int) -> list[Effect]:
    """The newest checkpoint has sealed the partitions of these servers. They go to other servers."""
    map_ = job.deployment.map
    assert map_ is not None
    moved = [owner.partition for owner in map_.owners if owner.server in sealed]
    record = job.recovery.lose(moved, now_ms, sealed=True)
    numbers, servers = ", ".join(map(str, moved[:8])), ", ".join(map(str, sorted(sealed)))
    return [
        *job.records([record]),
        LogMessage(f"{job.title}: partitions {numbers} leave server {servers}"),
    ]
