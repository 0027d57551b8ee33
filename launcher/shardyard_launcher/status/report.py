"""Asks a yard's coordinator, its servers and the state folder on this machine for their state, and adds it up.

Owns: the questions, and the sums over servers. Must not know: which command asks, how it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from shardyard.config.settings import Settings
from shardyard.domain import errors
from shardyard.domain.ids import Incarnation, JobId
from shardyard.transport.interfaces import Network
from shardyard.wire import methods
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_launcher.scripts.launches import Described, FoundLaunch, ask_agents, list_launches
from shardyard_launcher.terminal.coordinator_client import CoordinatorClient
from shardyard_launcher.terminal.member_answers import describe_members
from shardyard_launcher.yard.running_yard import RunningYard
from shardyard_launcher.yard.state_file import RoleRestart, read_state

TIMEOUT_MS: Final = 3_000
UNFINISHED: Final = (wire.JOB_STATE_STARTING, wire.JOB_STATE_RUNNING, wire.JOB_STATE_FINISHING)
"""The states of a job that has not ended."""

Server = server_wire.DescribeServerReply | errors.ShardyardError


@dataclass(frozen=True)
class YardReport:
    """`servers`, `agents`: by incarnation, what each reports, or why it did not answer."""

    coordinator: str
    status: wire.StatusReply
    servers: Mapping[int, Server]
    local: LocalReport | None = None
    agents: Mapping[int, Described] = field(default_factory=dict)

    @property
    def launches(self) -> list[FoundLaunch]:
        return list_launches(list(self.status.members), self.agents)

    def of_job(self, wanted: str) -> YardReport:
        """The report of the jobs of that name, or of the one with that id, and of the members that they have. Raises
        NotFound."""
        jobs = [job for job in self.status.jobs if wanted in (job.name, str(JobId(job.job)))]
        if not jobs:
            known = ", ".join(sorted({job.name for job in self.status.jobs})) or "none"
            raise errors.NotFound(f"the yard has no job {wanted!r}; its jobs are: {known}", why="", todo="")
        numbers = {job.job for job in jobs}
        status = wire.StatusReply()
        status.CopyFrom(self.status)
        del status.jobs[:], status.members[:]
        status.jobs.extend(jobs)
        status.members.extend(
            member for member in self.status.members if member.role != wire.ROLE_WORKER or member.job in numbers
        )
        return replace(self, status=status)

    @property
    def jobs(self) -> list[wire.JobStatus]:
        """Those that have not ended in the order in which they began, then those that have, the newest first."""
        unfinished = [job for job in self.status.jobs if job.state in UNFINISHED]
        ended = [job for job in self.status.jobs if job.state not in UNFINISHED]
        return [*sorted(unfinished, key=lambda job: job.job), *sorted(ended, key=lambda job: -job.job)]

    @property
    def answers(self) -> list[server_wire.DescribeServerReply]:
        """The replies of the servers that answered."""
        return [each for each in self.servers.values() if isinstance(each, server_wire.DescribeServerReply)]

    def versions(self, job: int) -> dict[int, common.Version]:
        """The versions by partition, from the servers that answered."""
        return {part.partition: part.version for said in self.answers for part in said.partitions if part.job == job}

    def staleness(self, job: int) -> int:
        """The most steps of a worker that were missing from values that a server gave."""
        return max([found.most for each in self.answers for found in each.staleness if found.job == job], default=0)

    def lateness(self, job: int) -> dict[str, float] | None:
        """How late gradients were, over all servers: their number, their staleness in updates of a partition, and how
        many could not be compensated. None for a job without a rule for stale gradients."""
        found = [each for said in self.answers for each in said.lateness if each.job == job]
        if not found:
            return None
        gradients = sum(each.gradients for each in found)
        return {
            "gradients": gradients,
            "mean": sum(each.total for each in found) / max(gradients, 1),
            "most": max(each.most for each in found),
            "uncompensated": sum(each.uncompensated for each in found),
        }

    def table(self, job: int, table: wire.TableStatus) -> dict[str, Any]:
        """A table over all servers, as JSON shows it. If no server reports it, for example because the job has ended,
        `rows` is what was last reported to the coordinator. `load`: how full the index is, None if no server reports
        it. `disk_refused`: by server, why its disk takes no more rows. `servers`: how many servers report the
        table."""
        found = [
            (said.server, each)
            for said in self.answers
            for each in said.tables
            if each.job == job and each.name == table.name
        ]
        tables = [each for _, each in found]
        ids, homes = sum(each.ids for each in tables), sum(each.homes for each in tables)
        return {
            "name": table.name,
            "dim": table.dim,
            "optimizer": table.optimizer,
            "rows": sum(each.rows for each in tables) if tables else table.rows,
            "ids": ids,
            "bytes": sum(each.bytes for each in tables),
            "rows_on_disk": sum(each.cold_rows for each in tables),
            "disk_bytes": sum(each.disk_bytes for each in tables),
            "disk_refused": [
                f"server {Incarnation(server)}: {each.disk_refused}" for server, each in found if each.disk_refused
            ],
            "load": ids / homes if homes else None,
            "admitted": sum(each.admitted for each in tables),
            "expired": sum(each.expired for each in tables),
            "servers": len(tables),
        }


@dataclass(frozen=True)
class LocalReport:
    """A yard that `shardyard up` started on this machine. `supervisor`: its process id, 0 without one; `given_up`: by
    name, how a process ended and why it is not restarted; `unready`: processes that cannot be used yet."""

    supervisor: int
    restarts: tuple[RoleRestart, ...]
    given_up: Mapping[str, str]
    unready: tuple[str, ...] = ()


def read_local(settings: Settings, folder: Path, coordinator: str) -> LocalReport | None:
    """None if the folder has no yard, or one of another coordinator. Raises ConfigurationError."""
    state = read_state(folder)
    if state is None or state.coordinator != coordinator:
        return None
    yard = RunningYard(settings, folder, state)
    supervisor = state.supervisor.pid if state.supervisor is not None and yard.supervised else 0
    unready = tuple(f"{process}; its log is {process.log}" for process in state.roles if not process.ready)
    return LocalReport(supervisor, state.restarts, state.given_up, unready)


def ask(network: Network, coordinator: str, local: LocalReport | None = None) -> YardReport:
    """Raises CoordinatorUnavailable; a server that does not answer is part of the report."""
    try:
        with CoordinatorClient(coordinator, network) as client:
            status = client.status(timeout_ms=TIMEOUT_MS)
    except errors.CoordinatorUnavailable as error:
        raise _explained(error, local) from None
    asked = [member for member in status.members if member.role == wire.ROLE_SERVER]
    request = server_wire.DescribeServerRequest()
    servers = describe_members(network, asked, "server", methods.DESCRIBE_SERVER, request)
    return YardReport(coordinator, status, servers, local, ask_agents(network, list(status.members)))


def _explained(error: errors.CoordinatorUnavailable, local: LocalReport | None) -> errors.CoordinatorUnavailable:
    """Adds what the state folder knows about the coordinator's end."""
    if local is None:
        return error
    why = local.given_up.get("coordinator")
    if why is not None:
        todo = "see its log in the state folder; `shardyard down`, then `shardyard up`"
        return errors.CoordinatorUnavailable(f"{error.what}: it {why}", todo=todo)
    died = next((restart for restart in reversed(local.restarts) if restart.name == "coordinator"), None)
    if died is not None and local.supervisor:
        return errors.CoordinatorUnavailable(f"{error.what}: {died}", todo="it is being started: ask again in a moment")
    return error


def enum_text(enum: EnumTypeWrapper, value: int) -> str:
    """`JOB_STATE_RUNNING` is "running". "unknown": 0, and values that this release does not know."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    names = {number: name.removeprefix(prefix).lower() for name, number in enum.items() if number}
    return names.get(value, "unknown")


def mode_of(job: wire.JobStatus) -> str:
    if job.HasField("local_steps"):
        return "local"
    if job.rows_at_once:
        return "hybrid"
    return "bounded" if job.HasField("staleness") else enum_text(common.UpdateMode, job.mode)
