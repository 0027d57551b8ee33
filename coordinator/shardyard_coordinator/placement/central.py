"""Where the variables of a job with job.strategy central_storage live: on one server, on the machine of its workers.

Such a job has no use for more servers: its workers reach the values through this machine's memory. Invariants: all its
partitions are on one server; while that server lives, they stay there. Must not know: members, the clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardyard.domain.errors import ConfigurationError
from shardyard.domain.ids import Incarnation
from shardyard_coordinator.placement.placement import Server, staying


def eligible(servers: Sequence[Server], owners: Collection[Incarnation], host: str) -> list[Server]:
    """The servers that may hold the partitions: those that have them now, and without one that stays another on `host`,
    the workers' machine."""
    kept = [server for server in servers if server.incarnation in owners]
    if staying(kept):
        return kept
    return [*kept, *staying(server for server in servers if server.host == host)[:1]]


def check_host(servers: Sequence[Server], owners: Collection[Incarnation], host: str, title: str) -> None:
    """Raises ConfigurationError for a worker on another machine than the variables."""
    for server in servers:
        if server.incarnation in owners and server.host != host:
            raise ConfigurationError(
                f"a worker on {host} in {title}, whose variables are on {server.host}",
                why="job.strategy central_storage keeps them in the memory of one machine, for the workers on it",
                todo="start all workers on one machine, or set job.strategy to parameter_server",
            )
