"""Which servers a job may use, and which workers may join it, where its strategy wants one machine.

Must not know: how partitions are placed, the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardyard.domain.ids import Incarnation
from shardyard.domain.replica_groups import Strategy
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.members.membership import Membership
from shardyard_coordinator.placement import one_machine
from shardyard_coordinator.placement.placement import Server


def servers_for(
    members: Membership, job: JobState, servers: Sequence[Server], missing: str
) -> tuple[Sequence[Server], str]:
    """The servers that may hold the job's partitions, and those for which they wait, in words. `servers`, `missing`:
    of the yard."""
    if job.settings.strategy is not Strategy.CENTRAL_STORAGE:
        return servers, missing
    host = next(iter(_hosts(members, [*job.deployment.workers, *job.workers])), "")
    found = one_machine.eligible(servers, job.deployment.owners, host)
    return found, "" if found else f"a server on {host or 'the machine of its workers'}"


def check_worker(members: Membership, job: JobState, worker: Incarnation, servers: Sequence[Server]) -> None:
    """Raises ConfigurationError for a worker on another machine than its job, if that wants one machine."""
    strategy = job.settings.strategy
    others = _hosts(members, (each for each in job.deployment.workers if each != worker))
    if strategy is Strategy.CENTRAL_STORAGE:
        others += [server.host for server in servers if server.incarnation in job.deployment.owners]
    one_machine.check_machine(strategy, job.title, members.require(worker).registration.host, others)


def _hosts(members: Membership, incarnations: Iterable[Incarnation]) -> list[str]:
    """The machines of those that live."""
    found = map(members.get, incarnations)
    return [member.registration.host for member in found if member is not None]
