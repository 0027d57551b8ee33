"""`shardyard status`: what a coordinator knows, what its servers say, and what was started again on this machine, as
tables or JSON.

Owns: the shape of both. The JSON is a promise to scripts: names stay, new ones may come. Must not know: who asks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation, JobId
from shardyard.runtime.waits import WaitRegistry
from shardyard.transport.interfaces import Network
from shardyard.wire import methods
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_launcher.commands.set import describe_switch
from shardyard_launcher.commands.stop import describe_stop
from shardyard_launcher.yard.running_yard import RunningYard
from shardyard_launcher.yard.state_file import RoleRestart, read_state

TIMEOUT_MS: Final = 3_000
SERVER_TIMEOUT_MS: Final = 1_500
RESTARTS_SHOWN_MAX: Final = 10

ROLES: Final = {wire.ROLE_SERVER: "server", wire.ROLE_WORKER: "worker", wire.ROLE_AGENT: "agent"}
STATES: Final = {
    wire.JOB_STATE_STARTING: "starting",
    wire.JOB_STATE_RUNNING: "running",
    wire.JOB_STATE_FINISHING: "finishing",
    wire.JOB_STATE_FINISHED: "finished",
    wire.JOB_STATE_FAILED: "failed",
}
MODES: Final = {common.UPDATE_MODE_SYNC: "sync", common.UPDATE_MODE_ASYNC: "async"}
CONSISTENCY_MODES: Final = {
    wire.CONSISTENCY_MODE_SYNC: "sync",
    wire.CONSISTENCY_MODE_LOCAL: "local",
    wire.CONSISTENCY_MODE_BOUNDED: "bounded",
    wire.CONSISTENCY_MODE_ASYNC: "async",
    wire.CONSISTENCY_MODE_HYBRID: "hybrid",
}


@dataclass(frozen=True)
class YardReport:
    coordinator: str
    status: wire.StatusReply
    servers: Mapping[int, server_wire.DescribeServerReply | errors.ShardyardError]
    """What each server said, by incarnation."""
    local: LocalReport | None = None


@dataclass(frozen=True)
class LocalReport:
    """Of a yard that `shardyard up` started here. `supervisor`: its process id, 0 where nobody starts processes again;
    `given_up`: by name, how a process ended and why it is not started again; `unready`: what was started and cannot be
    used yet."""

    supervisor: int
    restarts: tuple[RoleRestart, ...]
    given_up: Mapping[str, str]
    unready: tuple[str, ...] = ()


def look_here(folder: Path, coordinator: str) -> LocalReport | None:
    """None where the folder has no yard, or one of another coordinator. Raises ConfigurationError."""
    state = read_state(folder)
    if state is None or state.address_of("coordinator") != coordinator:
        return None
    yard = RunningYard(folder, state)
    supervisor = state.supervisor.pid if state.supervisor is not None and yard.supervised else 0
    unready = tuple(f"{process}; its log is {process.log}" for process in state.roles if not process.ready)
    return LocalReport(supervisor, state.restarts, state.given_up, unready)


def ask(network: Network, coordinator: str, local: LocalReport | None = None) -> YardReport:
    """Raises CoordinatorUnavailable; a server that does not answer is part of the report."""
    peer = network.connect(coordinator, name="coordinator", unavailable=errors.CoordinatorUnavailable)
    try:
        status = peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=TIMEOUT_MS)
    except errors.CoordinatorUnavailable as error:
        raise _with_what_is_known_here(error, local) from None
    finally:
        peer.close()
    asked = [member for member in status.members if member.role == wire.ROLE_SERVER]
    servers: dict[int, server_wire.DescribeServerReply | errors.ShardyardError] = {}
    wait_registry = WaitRegistry()
    try:
        with wait_registry.over(lambda: f"{len(asked) - len(servers)} of {len(asked)} servers to describe themselves"):
            for member in asked:
                servers[member.incarnation] = _describe(network, member)
    finally:
        wait_registry.close()
    return YardReport(coordinator, status, servers, local)


def _describe(network: Network, member: wire.MemberStatus) -> server_wire.DescribeServerReply | errors.ShardyardError:
    peer = network.connect(member.address, name=f"server {Incarnation(member.incarnation)}")
    try:
        return peer.call(methods.DESCRIBE_SERVER, server_wire.DescribeServerRequest(), timeout_ms=SERVER_TIMEOUT_MS)
    except errors.ShardyardError as error:
        return error
    finally:
        peer.close()


def _with_what_is_known_here(
    error: errors.CoordinatorUnavailable, local: LocalReport | None
) -> errors.CoordinatorUnavailable:
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


def to_json(report: YardReport) -> str:
    status = report.status
    return json.dumps(
        {
            "coordinator": report.coordinator,
            "term": status.term,
            "uptime_ms": status.uptime_ms,
            "waiting_for": status.waiting_for,
            "members": [_member(member) for member in status.members],
            "jobs": [_job(report, job) for job in status.jobs],
            "servers": [_server(incarnation, said) for incarnation, said in sorted(report.servers.items())],
            "local": None if report.local is None else _local(report.local),
        },
        indent=2,
    )


def _member(member: wire.MemberStatus) -> dict[str, object]:
    entry: dict[str, object] = {
        "incarnation": member.incarnation,
        "role": ROLES.get(member.role, "unknown"),
        "address": member.address,
        "host": member.host,
        "pid": member.pid,
        "release": member.release,
        "last_seen_ms_ago": member.last_seen_ms_ago,
        "waiting_for": member.waiting_for,
    }
    if member.role == wire.ROLE_WORKER:
        entry |= {
            "job": member.job,
            "step": member.step,
            "samples": member.samples,
            "ranks": list(member.ranks),
            "not_finite": member.not_finite,
            "dropped": member.dropped,
        }
    return entry


def _job(report: YardReport, job: wire.JobStatus) -> dict[str, object]:
    versions = _versions(report, job.job)
    return {
        "job": job.job,
        "name": job.name,
        "state": STATES.get(job.state, "unknown"),
        "failure": {"code": job.failure.code, "what": job.failure.what} if job.HasField("failure") else None,
        "mode": _mode(job),
        "logical_ranks": job.logical_ranks,
        "staleness": {"bound": job.staleness, "most": _staleness(report, job.job)}
        if job.HasField("staleness")
        else None,
        "lateness": _lateness(report, job.job),
        "local_steps": job.local_steps if job.HasField("local_steps") else None,
        "workers": job.workers,
        "step": job.step,
        "samples": job.samples,
        "samples_per_s": job.samples_per_s,
        "metrics": {metric.name: metric.value for metric in job.metrics},
        "waits": list(job.waits),
        "parameters": job.parameters,
        "payload_bytes": job.payload_bytes,
        "lost_pushes": job.lost_pushes,
        "contributions_dropped": job.dropped,
        "residuals_lost": job.residuals_lost,
        "residual_lost_norm": job.residual_lost_norm,
        "checkpoint": _checkpoint(job.checkpoint) if job.HasField("checkpoint") else None,
        "restored": _restored(job.restored) if job.HasField("restored") else None,
        "recovering": job.recovering,
        "not_finite": job.not_finite,
        "workers_quarantined": job.workers_quarantined,
        "stop": _stop(job.stop) if job.HasField("stop") else None,
        "switch": _switch(job.consistency) if job.HasField("consistency") else None,
        "evaluation": _evaluation(job.evaluation) if job.HasField("evaluation") else None,
        "best": _best(job.best) if job.HasField("best") else None,
        "readers": job.readers,
        "generation": job.map.generation,
        "tables": [_table_document(table, _of_table(report, job.job, table.name)) for table in job.tables],
        "partitions": [
            {
                "partition": owner.partition,
                "server": owner.server,
                "address": owner.address,
                "life": versions[owner.partition].life if owner.partition in versions else None,
                "version": versions[owner.partition].number if owner.partition in versions else None,
            }
            for owner in job.map.owners
        ],
        "feeds": [
            {
                "feed": feed.feed,
                "samples": feed.samples,
                "epochs": feed.epochs,
                "data_shards_free": feed.free,
                "data_shards_leased": feed.leased,
                "data_shards_done": feed.done,
                "batches_quarantined": feed.quarantined,
                "finished": feed.finished,
            }
            for feed in job.feeds
        ],
    }


def _table_document(table: wire.TableStatus, held: TableOnServers) -> dict[str, object]:
    return {
        "name": table.name,
        "dim": table.dim,
        "optimizer": table.optimizer,
        "rows": held.rows if held.servers else table.rows,
        "ids": held.ids,
        "bytes": held.nbytes,
        "rows_on_disk": held.cold_rows,
        "disk_bytes": held.disk_bytes,
        "disk_refused": list(held.refused),
        "load": held.load,
        "admitted": held.admitted,
        "expired": held.expired,
        "servers": held.servers,
    }


def _checkpoint(taken: wire.CheckpointStatus) -> dict[str, object]:
    return {"number": taken.number, "step": taken.step, "created_s": taken.created_s}


def _stop(stop: wire.Stop) -> dict[str, object]:
    return {
        "reason": stop.reason,
        "worker": stop.worker or None,
        "step": stop.step if stop.settled and stop.step else None,
    }


def _switch(switch: wire.SwitchStatus) -> dict[str, object]:
    said = switch.consistency
    return {
        "number": said.number,
        "mode": CONSISTENCY_MODES.get(said.mode, "unknown"),
        "staleness": said.staleness if said.HasField("staleness") else None,
        "servers": switch.servers,
        "workers_behind": list(switch.behind),
        "before_step": switch.step or None,
        "draining": switch.draining or None,
    }


def _evaluation(evaluation: wire.EvaluationStatus) -> dict[str, object]:
    return {
        "step": evaluation.step,
        "metrics": {metric.name: metric.value for metric in evaluation.metrics},
        "reported_s": evaluation.reported_s,
    }


def _best(best: wire.KeptBest) -> dict[str, object]:
    return {
        "metric": best.metric,
        "mode": "min" if best.lowest else "max",
        "value": best.value,
        "step": best.step,
        "url": best.url,
        "reported_s": best.reported_s,
    }


def _restored(restored: wire.RestoredStatus) -> dict[str, object]:
    return {
        "checkpoint": _checkpoint(restored.checkpoint),
        "partitions": restored.partitions,
        "data_shards_leased_again": restored.leased_again,
        "logs": restored.logs,
    }


def _server(incarnation: int, said: server_wire.DescribeServerReply | errors.ShardyardError) -> dict[str, object]:
    if isinstance(said, errors.ShardyardError):
        return {"server": incarnation, "error": said.what}
    return {
        "server": incarnation,
        "partitions": len(said.partitions),
        "pushes_applied": said.pushes_applied,
        "pushes_duplicate": said.pushes_duplicate,
        "bytes_received": said.bytes_received,
        "bytes_sent": said.bytes_sent,
        "workers_attached": said.workers_attached,
        "workers_streaming": said.workers_streaming,
        "pins": said.pins,
        "memory_bytes_max": said.memory_bytes_max or None,
    }


def _local(local: LocalReport) -> dict[str, object]:
    return {
        "supervisor": local.supervisor or None,
        "restarts": [asdict(restart) for restart in local.restarts],
        "given_up": dict(local.given_up),
        "unready": list(local.unready),
    }


def _mode(job: wire.JobStatus) -> str:
    if job.HasField("local_steps"):
        return "local"
    if job.rows_at_once:
        return "hybrid"
    return "bounded" if job.HasField("staleness") else MODES.get(job.mode, "unknown")


def _staleness(report: YardReport, job: int) -> int:
    """The most steps of a worker that were missing in values that a server gave."""
    said = [each for each in report.servers.values() if isinstance(each, server_wire.DescribeServerReply)]
    return max([found.most for each in said for found in each.staleness if found.job == job], default=0)


def _lateness(report: YardReport, job: int) -> dict[str, float] | None:
    """Of the gradients of a job with a rule for stale ones, on all servers: how many, their staleness in updates of a
    partition, and how many of an older version could not be compensated. None of other jobs."""
    said = [each for each in report.servers.values() if isinstance(each, server_wire.DescribeServerReply)]
    found = [each for reply in said for each in reply.lateness if each.job == job]
    if not found:
        return None
    gradients = sum(each.gradients for each in found)
    return {
        "gradients": gradients,
        "mean": sum(each.total for each in found) / max(gradients, 1),
        "most": max(each.most for each in found),
        "uncompensated": sum(each.uncompensated for each in found),
    }


@dataclass(frozen=True)
class TableOnServers:
    """What servers say of a table. `servers`: so many of them did; `load`: the share of the index's places that ids
    take, None where nobody said; `refused`: by server, why its disk takes no more rows."""

    servers: int
    rows: int
    ids: int
    nbytes: int
    load: float | None
    admitted: int
    expired: int
    cold_rows: int
    disk_bytes: int
    refused: tuple[str, ...]


def _of_table(report: YardReport, job: int, name: str) -> TableOnServers:
    said = [each for each in report.servers.values() if isinstance(each, server_wire.DescribeServerReply)]
    by_server = [
        (reply.server, each) for reply in said for each in reply.tables if each.job == job and each.name == name
    ]
    found = [each for _, each in by_server]
    refused = tuple(
        [f"server {Incarnation(server)}: {each.disk_refused}" for server, each in by_server if each.disk_refused]
    )
    ids, homes = sum(each.ids for each in found), sum(each.homes for each in found)
    return TableOnServers(
        len(found),
        sum(each.rows for each in found),
        ids,
        sum(each.bytes for each in found),
        ids / homes if homes else None,
        sum(each.admitted for each in found),
        sum(each.expired for each in found),
        sum(each.cold_rows for each in found),
        sum(each.disk_bytes for each in found),
        refused,
    )


def _versions(report: YardReport, job: int) -> dict[int, common.Version]:
    return {
        part.partition: part.version
        for said in report.servers.values()
        if not isinstance(said, errors.ShardyardError)
        for part in said.partitions
        if part.job == job
    }


def show(report: YardReport, console: Console) -> None:
    status = report.status
    uptime = _duration(status.uptime_ms)
    parts: list[RenderableType] = [
        Text(f"coordinator {report.coordinator}, up {uptime}, term {status.term}"),
        *([_waiting(status.waiting_for)] if status.waiting_for else []),
        _title("members"),
        _members_table(report),
        *_local_tables(report.local),
    ]
    if not status.jobs:
        parts.append(Text("no jobs yet"))
    for job in sorted(status.jobs, key=lambda job: job.job):
        parts += _job_tables(report, job)
    console.print(Group(*parts))


def _local_tables(local: LocalReport | None) -> list[RenderableType]:
    if local is None:
        return []
    found: list[RenderableType] = []
    if local.restarts:
        table = _table("process", "pid", "ended", "restart", "when")
        for restart in local.restarts[-RESTARTS_SHOWN_MAX:]:
            of = f"{restart.number} of {restart.restarts_max} within {restart.window_ms / 1000:g} s"
            ago_ms = max(0, int((time.time() - restart.died_s) * 1000))
            cells = [restart.name, str(restart.pid), restart.ending, of, f"{_duration(ago_ms)} ago"]
            table.add_row(*map(Text, cells))
        found += [_title("started again on this machine"), table]
    for name, why in sorted(local.given_up.items()):
        found.append(Text(f"{name} {why}", style="red"))
    for name in local.unready:
        found.append(Text(f"not ready yet: {name}", style="yellow"))
    if not local.supervisor:
        said = "the supervisor of this yard is gone: nobody starts its processes again when they die; `shardyard up`"
        found.append(Text(f"{said} starts another", style="red"))
    return found


def _waiting(what: str) -> Text:
    return Text(f"  waits for {what}", style="yellow")


def _title(text: str) -> Text:
    return Text("\n" + text, style="bold")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _members_table(report: YardReport) -> Table:
    names = {job.job: job.name for job in report.status.jobs}
    table = _table("role", "id", "address", "host", "pid", "seen", "job", "step", "says")
    for member in sorted(report.status.members, key=lambda m: (m.role, m.incarnation)):
        worker = member.role == wire.ROLE_WORKER
        said = report.servers.get(member.incarnation)
        says = said.what if isinstance(said, errors.ShardyardError) else ""
        if isinstance(said, server_wire.DescribeServerReply):
            says = _of_server(said)
        if worker:
            says = f"ranks {', '.join(map(str, member.ranks))}" if member.ranks else ""
            says += f"; {member.dropped:,} contributions came late" if member.dropped else ""
        waiting = f"waits for {member.waiting_for}" if member.waiting_for else ""
        says = "; ".join(part for part in (says, waiting) if part)
        cells = [
            ROLES.get(member.role, "unknown"),
            str(Incarnation(member.incarnation)),
            member.address or "-",
            member.host,
            str(member.pid),
            f"{member.last_seen_ms_ago / 1000:.1f} s ago",
            names.get(member.job, "-") if worker else "-",
            f"{member.step:,}" if worker else "-",
            says,
        ]
        table.add_row(*map(Text, cells))
    return table


def _of_server(said: server_wire.DescribeServerReply) -> str:
    parts = [f"{len(said.partitions)} partitions", f"{said.pushes_applied:,} pushes applied"]
    if said.workers_attached:
        parts.append(f"shares memory with {said.workers_attached} worker{'s'[: said.workers_attached != 1]}")
    if said.workers_streaming:
        parts.append(f"streams to {said.workers_streaming} worker{'s'[: said.workers_streaming != 1]}")
    if said.memory_bytes_max:
        held = sum(table.bytes for table in said.tables)
        parts.append(f"tables take {_size(held)} of {_size(said.memory_bytes_max)}")
    return ", ".join(parts)


def _job_tables(report: YardReport, job: wire.JobStatus) -> list[RenderableType]:
    table = _table("state", "mode", "workers", "step", "samples", "samples/s", "metrics")
    metrics = ", ".join(f"{metric.name} {metric.value:.4g}" for metric in job.metrics) or "-"
    mode = _mode(job)
    more = {
        "sync": f", {job.logical_ranks} ranks",
        "local": f", {job.logical_ranks} ranks, {job.local_steps} steps a round",
        "hybrid": f", {job.logical_ranks} ranks",
        "bounded": f", {_staleness(report, job.job)} of {job.staleness} steps",
    }
    cells = [
        STATES.get(job.state, "unknown"),
        mode + more.get(mode, ""),
        str(job.workers),
        f"{job.step:,}",
        f"{job.samples:,}",
        f"{job.samples_per_s:,.0f}",
        metrics,
    ]
    table.add_row(*map(Text, cells))
    name = f"{job.name} (id {JobId(job.job)})"
    found: list[RenderableType] = [_title(f"job {name}"), table]
    if job.HasField("failure"):
        found.append(Text(f"  failed: {job.failure.code}: {job.failure.what}", style="red"))
    if job.HasField("stop"):
        found.append(Text(f"  told to stop {describe_stop(job.stop)}"))
    if job.HasField("consistency"):
        found.append(Text(f"  switched {describe_switch(job.consistency)}"))
    late = _lateness(report, job.job)
    if late is not None:
        said = f"  gradients are {late['mean']:.2f} updates late, {late['most']:,.0f} at most"
        more_said = f"; {late['uncompensated']:,.0f} could not be compensated" if late["uncompensated"] else ""
        found.append(Text(said + more_said))
    if job.lost_pushes:
        said = f"  {job.lost_pushes:,} pushes without leased data are lost; the coordinator's log says which"
        found.append(Text(said, style="red"))
    if job.not_finite:
        said = f"  {job.not_finite:,} gradients were not finite, and do not count; the audit lists them"
        found.append(Text(said, style="red"))
    if job.workers_quarantined:
        said = f"  {job.workers_quarantined:,} workers are in quarantine, since they kept sending such gradients"
        found.append(Text(said, style="red"))
    if job.dropped:
        said = f"  {job.dropped:,} contributions came late and were dropped; their samples count at steps of their own"
        found.append(Text(said))
    if job.residuals_lost:
        workers = f"{job.residuals_lost:,} worker{'s'[: job.residuals_lost != 1]}"
        said = f"  {workers} took along what compression had not sent yet (2-norm {job.residual_lost_norm:.3g})"
        found.append(Text(said, style="red"))
    if job.HasField("checkpoint"):
        found.append(Text(f"  newest checkpoint: {describe_checkpoint(job.checkpoint, report.status.time_ms)}"))
    if job.HasField("evaluation"):
        found.append(Text(f"  evaluated: {describe_evaluation(job.evaluation, report.status.time_ms)}"))
    if job.HasField("best"):
        found.append(Text(f"  best: {describe_best(job.best)}"))
    if job.HasField("restored"):
        taken = describe_checkpoint(job.restored.checkpoint, 0)
        found.append(Text(f"  restored from checkpoint {taken}: {describe_restored(job.restored)}"))
    found += [_waiting(what) for what in job.waits]
    owners = _owners_shown(report, job)
    if owners:
        size = f"{job.parameters:,} parameters, {job.payload_bytes:,} bytes"
        title = f"partitions of {name}, generation {job.map.generation}, {size}"
        found += [_title(title), _partitions_table(report, job.job, owners)]
    if job.tables:
        found += [_title(f"tables of {name}"), _rows_table(report, job)]
        for each in job.tables:
            for refused in _of_table(report, job.job, each.name).refused:
                said = f"  colder rows of {each.name} stay in memory: the disk refuses them; {refused}"
                found.append(Text(said, style="yellow"))
    if job.feeds:
        feeds = _table("feed", "samples", "epochs", "free", "leased", "done", "quarantined", "finished")
        for feed in job.feeds:
            numbers = [feed.feed, feed.samples, feed.epochs, feed.free, feed.leased, feed.done, feed.quarantined]
            feeds.add_row(*(f"{number:,}" for number in numbers), "yes" if feed.finished else "no")
        found += [_title(f"data of {name}"), feeds]
    return found


def describe_checkpoint(taken: wire.CheckpointStatus, now_ms: int) -> str:
    """For example `11 of step 4,950, 32.0 s old`. `now_ms`: the coordinator's wall clock."""
    age = f", {_duration(max(0, now_ms - 1_000 * taken.created_s))} old" if taken.created_s and now_ms else ""
    return f"{taken.number} of step {taken.step:,}{age}"


def describe_evaluation(evaluation: wire.EvaluationStatus, now_ms: int) -> str:
    """For example `accuracy 0.9722 at step 1,350, 4 s ago`. `now_ms`: the coordinator's wall clock."""
    metrics = ", ".join(f"{metric.name} {metric.value:.4g}" for metric in evaluation.metrics) or "no metrics"
    ago = f", {_duration(max(0, now_ms - 1_000 * evaluation.reported_s))} ago" if now_ms else ""
    return f"{metrics} at step {evaluation.step:,}{ago}"


def describe_best(best: wire.KeptBest) -> str:
    """For example `accuracy 0.9722 (max) of step 1,350, in /data/digits/best`."""
    mode = "min" if best.lowest else "max"
    return f"{best.metric} {best.value:.4g} ({mode}) of step {best.step:,}, in {best.url}"


def describe_restored(restored: wire.RestoredStatus) -> str:
    """For example `8 partitions, 3 data shards leased anew`."""
    said = f"{restored.partitions} partition{'s'[: restored.partitions != 1]}"
    if restored.logs:
        return f"{said}, with what logs say after it; nothing is computed again"
    return f"{said}, {restored.leased_again:,} data shard{'s'[: restored.leased_again != 1]} leased anew"


def _owners_shown(report: YardReport, job: wire.JobStatus) -> list[common.PartitionOwner]:
    """The owners of a job's partitions; of a job that has ended only those that still hold them."""
    if job.state not in (wire.JOB_STATE_FINISHED, wire.JOB_STATE_FAILED):
        return list(job.map.owners)
    held = {
        (server, part.partition)
        for server, said in report.servers.items()
        if not isinstance(said, errors.ShardyardError)
        for part in said.partitions
        if part.job == job.job
    }
    return [owner for owner in job.map.owners if (owner.server, owner.partition) in held]


def _partitions_table(report: YardReport, job: int, owners: list[common.PartitionOwner]) -> Table:
    versions = _versions(report, job)
    table = _table("server", "address", "partitions", "versions")
    owned: dict[tuple[int, str], list[int]] = {}
    for owner in owners:
        owned.setdefault((owner.server, owner.address), []).append(owner.partition)
    for (server, address), partitions in sorted(owned.items()):
        known = [versions[p].number for p in partitions if p in versions]
        low, high = min(known, default=None), max(known, default=None)
        span = "-" if low is None else str(low) if low == high else f"{low} to {high}"
        table.add_row(str(Incarnation(server)), address, ", ".join(map(str, partitions)), span)
    return table


def _rows_table(report: YardReport, job: wire.JobStatus) -> Table:
    """Where no server has said more, of a job that has ended for example, what the coordinator has heard last."""
    table = _table("table", "dim", "optimizer", "rows", "ids", "memory", "disk", "index", "admitted", "expired")
    for each in job.tables:
        held = _of_table(report, job.job, each.name)
        cells = [each.name, str(each.dim), each.optimizer, f"{held.rows if held.servers else each.rows:,}"]
        if held.servers:
            load = "-" if held.load is None else f"{held.load:.0%} full"
            disk = _size(held.disk_bytes) if held.disk_bytes else "-"
            cells += [f"{held.ids:,}", _size(held.nbytes), disk, load, f"{held.admitted:,}", f"{held.expired:,}"]
        else:
            cells += ["-"] * 6
        table.add_row(*map(Text, cells))
    return table


def _size(nbytes: int) -> str:
    """For example `1.5 GiB`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _duration(duration_ms: int) -> str:
    seconds = duration_ms // 1000
    hours, minutes = seconds // 3600, seconds // 60 % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds % 60} s" if minutes else f"{seconds} s"
