"""Jobs that train on one machine (job.strategy central_storage, mirrored).

With central storage the variables are on one server of that machine, which the workers reach through its memory.
Invariants: all partitions are on one server; while it lives, they stay there. Must not know: members, the clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardyard.domain.errors import ConfigurationError
from shardyard.domain.ids import Incarnation
from shardyard.domain.replica_groups import Strategy
from shardyard_coordinator.placement.placement import Server, staying


def eligible(servers: Sequence[Server], owners: Collection[Incarnation], host: str) -> list[Server]:
    """The servers that may hold the partitions: those that have them now, and without one that stays another on `host`,
    the workers' machine."""
    kept = [server for server in servers if server.incarnation in owners]
    if staying(kept):
        return kept
    return [*kept, *staying(server for server in servers if server.host == host)[:1]]


def check_machine(strategy: Strategy, title: str, host: str, others: Collection[str]) -> None:
    """Raises ConfigurationError for a worker on `host` if the strategy wants one machine, and the job is on another.
    `others`: the machines of its servers and workers, as far as they matter."""
    elsewhere = sorted({*others} - {host})
    if strategy.is_of_one_machine and elsewhere:
        raise ConfigurationError(
            f"a worker on {host} in {title}, which is on {elsewhere[0]}",
            why=f"job.strategy {strategy.value} trains on one machine",
            todo="start all workers on one machine, or set job.strategy to multi_worker_mirrored or parameter_server",
        )
